"""What somebody must do now and then: half messages that no process will ever decide are rolled back.

A producer that nobody can ask, and that died between its prepare and its local transaction, leaves such ones. They are
never seen, and are parked in the end; rolled back they are over.
"""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from escrowmq.client.producing.producer import Producer
from escrowmq.model import ROLLBACK, TransactionId
from escrowmq_lab.chaos.books import business
from escrowmq_lab.chaos.modes.seam import Site

PAGE = 500
"""Keys that are looked up by one statement."""


def roll_back_leftovers(site: Site, producer: Producer) -> int:
    """Roll back what is undecided in the group of ``producer`` and has no business row in this site's database; how
    many were tried.

    The group must be this producer's own, each message must have its id as its key, and no local transaction may be
    under way or still to come: only then is "no row" for ever. Raises BROKER_AWAY while a broker is.
    """
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
    stands: set[str] = set()
    with site.engine.connect() as connection:
        for at in range(0, len(named), PAGE):
            stands.update(connection.scalars(sa.select(business.c.id).where(business.c.id.in_(named[at : at + PAGE]))))
    refused = [transaction for transaction, its in keys.items() if not its & stands]
    if refused:
        producer.end_batch(refused, ROLLBACK)
    return len(refused)
