"""From the shards' message tables to the warehouse: a relay a shard, EscrowMQ inside this process, one parcel a paid
order.
"""

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from placing import EVENTS
from shop_databases import Databases
from shop_tables import parcels

import escrowmq as mq
from escrowmq.outbox import State, inbox
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import trans_message
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.platform.failpoints import reach

GROUP = "warehouse"
LEASE_SECONDS = 1.0
"""Of what a process that died had in hand; only then can the next one have it."""


def deliver(databases: Databases, folder: Path) -> int:
    """Send what is in the message tables and pack what is paid, until nothing is left; how many messages had their
    effect."""
    url = f"file:{folder / 'broker'}"
    with ExitStack() as stack:
        bus = stack.enter_context(mq.connect(url))
        target = stack.enter_context(closing(EscrowTarget(url)))
        for shard in databases.shards:  # sent rows are kept for an hour: the auditor reads them
            stack.enter_context(Relay(shard, target, workers=1, keep=3600, lease=LEASE_SECONDS))
        while any(unsent(shard) for shard in databases.shards):
            time.sleep(0.05)
        consumer = bus.consumer(GROUP, [EVENTS], lease=LEASE_SECONDS)
        effects = 0
        while left(bus):
            effects += inbox.consume(consumer, databases.warehouse, pack, idle_timeout=0.2)
        return effects


def left(bus: mq.Bus) -> bool:
    """Whether the warehouse has something still to do, or somebody who died had it in hand."""
    group = next(group for group in bus.admin.groups() if group["name"] == GROUP)
    return any(queue["floor"] < queue["end"] for queue in group["queues"])


def unsent(shard: sa.Engine) -> bool:
    """Whether a message is still to be sent."""
    with shard.connect() as connection:
        pending = trans_message.c.state == State.PENDING.value
        return connection.scalar(sa.select(trans_message.c.seq).where(pending).limit(1)) is not None


def pack(warehouse: sa.Connection, message: Any) -> None:
    """A message's effect; it is in one transaction with the mark that says that the message was seen."""
    event = json.loads(message.body)
    if event["event"] == "paid":
        warehouse.execute(sa.insert(parcels).values(trans_id=event["trans_id"], units=event["units"]))
        reach("shop.parcel-packed")
