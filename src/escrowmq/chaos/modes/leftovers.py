"""What an operator does now and then: half messages that no process will ever decide are rolled back.

A producer that nobody can ask, and that died between its prepare and its local transaction, leaves such ones. They are never seen, and are
parked in the end; rolled back they are over.
"""

from __future__ import annotations

import sqlalchemy as sa

from escrowmq.chaos.books import business
from escrowmq.chaos.modes.seam import Site
from escrowmq.errors import Code, Rejected


def roll_back_leftovers(site: Site, group: str) -> int:
    """Roll back what is undecided in ``group`` and has no business row in this site's database; how many.

    ``group`` must be this producer's own, each message must have its id as its key, and no local transaction may be under way or
    still to come: only then is "no row" for ever.
    """
    count = 0
    for found in site.bus.admin.transactions(state="undecided", group=group):
        keys = [message["key"] for message in site.bus.admin.transaction(found["id"])["messages"]]
        with site.engine.connect() as connection:
            stands = connection.scalars(sa.select(business.c.id).where(business.c.id.in_(keys))).all()
        if stands:
            continue
        try:
            count += site.bus.admin.rollback(found["id"]) is Code.ROLLED_BACK
        except Rejected as problem:
            if problem.code is not Code.CONFLICT:  # decided meanwhile by somebody who was late
                raise
    return count
