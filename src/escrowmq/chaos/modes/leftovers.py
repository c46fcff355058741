"""What an operator does now and then: half messages that no process will ever decide are rolled back.

A producer that nobody can ask, and that died between its prepare and its local transaction, leaves such ones. They are never seen, and are
parked in the end; rolled back they are over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from escrowmq.chaos.books import business
from escrowmq.chaos.modes.seam import Site
from escrowmq.errors import Code, Rejected

AT_ONCE = 8
"""Transactions that are asked about beside each other."""


def roll_back_leftovers(site: Site, group: str) -> int:
    """Roll back what is undecided in ``group`` and has no business row in this site's database; how many.

    ``group`` must be this producer's own, each message must have its id as its key, and no local transaction may be under way or
    still to come: only then is "no row" for ever.
    """

    def roll_back(identity: str) -> bool:
        keys = [message["key"] for message in site.bus.admin.transaction(identity)["messages"]]
        with site.engine.connect() as connection:
            stands = connection.scalars(sa.select(business.c.id).where(business.c.id.in_(keys))).all()
        if stands:
            return False
        try:
            return site.bus.admin.rollback(identity) is Code.ROLLED_BACK
        except Rejected as problem:
            if problem.code is not Code.CONFLICT:  # decided meanwhile by somebody who was late
                raise
            return False

    left = [found["id"] for found in site.bus.admin.transactions(state="undecided", group=group)]
    with ThreadPoolExecutor(AT_ONCE, "leftovers") as threads:
        return sum(threads.map(roll_back, left))
