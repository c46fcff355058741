"""Periodic rollback of half messages that no process will ever decide. A producer without check-back that died between
its prepare and its local transaction leaves such messages. They never become visible and are eventually parked; a
rollback resolves them."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from escrowmq.client.producing.producer import Producer
from escrowmq.model import ROLLBACK, TransactionId
from escrowmq_lab.chaos.books import business
from escrowmq_lab.chaos.modes.seam import Site

PAGE = 500
"""Keys looked up by one statement."""


def roll_back_leftovers(site: Site, producer: Producer) -> int:
    """Roll back undecided transactions of the group of ``producer`` without a business row in this site's database.
    Returns their number. The group must belong to this producer only, each message must have its id as its key, and no
    local transaction may be running or follow: only then is "no row" final. Raises BROKER_AWAY if a broker is
    unreachable."""
    undecided = site.bus.admin.transactions(state="undecided", group=producer.group)
    if not undecided:
        return 0
    left = {bytes(TransactionId.parse(one["id"])) for one in undecided}
    first = min(one["position"] for one in undecided)
    keys: dict[bytes, set[str]] = defaultdict(set)
    for batch in site.bus.admin.read("%half", start=first, columns=["key", "transaction"]):
        for key, transaction in zip(*(batch.column(name).to_pylist() for name in ("key", "transaction")), strict=True):
            if transaction in left and key is not None:
                keys[transaction].add(key)
    named = sorted(set().union(*keys.values()))
    committed: set[str] = set()
    with site.engine.connect() as connection:
        for at in range(0, len(named), PAGE):
            committed.update(
                connection.scalars(sa.select(business.c.id).where(business.c.id.in_(named[at : at + PAGE])))
            )
    orphaned = [transaction for transaction, its in keys.items() if not its & committed]
    if orphaned:
        producer.end_batch(orphaned, ROLLBACK)
    return len(orphaned)
