"""The two sweeps, and transaction 3. Each act works on one order under lock, may be killed anywhere and run again.

``settle_order`` and ``release_orphan`` take connections that have no transaction open. They can be called by anything
that has found candidates: the loops at the end of this file, a cron job, or a cluster that looks through all shards at
once. What finds a candidate is only a hint; the act looks again, under lock.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum

import sqlalchemy as sa
from placing import MINUTE_US, tell
from shop_tables import Freeze, Mark, Order, freezes, insert_new, order_marks, orders, products, shard_of

from escrowmq.platform.failpoints import reach

ORPHAN_AGE_US = 10 * MINUTE_US
PAGE = 500

_log = logging.getLogger("shop.sweeps")


class Settled(StrEnum):
    """What an act did."""

    SOLD = "released as sold"
    TIMED_OUT = "timed out, stock given back"
    ORPHAN = "no order, stock given back"
    HAS_ORDER = "has an order"
    NOT_DUE = "nothing to do"
    BUSY = "somebody else has it"


class Inconsistent(Exception):
    """An order and its freeze contradict each other. Cannot happen; if it does, a person must look."""


def settle_order(order_db: sa.Connection, product_db: sa.Connection, trans_id: str, now_us: int) -> Settled:
    """Sweep 1's act on one order: unpaid past its time → timed out, and paid → sold.

    The order row stays locked from the first look until the end, so nobody pays meanwhile. The freeze is released
    first: if this dies in between, the order is unpaid with a released freeze, which the payment guard refuses and the
    next run finishes.
    """
    with order_db.begin():
        row = sa.select(orders).where(orders.c.trans_id == trans_id).with_for_update(skip_locked=True)
        order = order_db.execute(row).one_or_none()
        if order is None:
            return Settled.BUSY
        expired = order.state == Order.UNPAID and order.pay_by_us <= now_us
        if order.settled or not (expired or order.state == Order.PAID):
            return Settled.NOT_DUE
        reach("shop.order-locked-to-settle")
        final = Freeze.UNSOLD if expired else Freeze.SOLD
        with product_db.begin():
            release(product_db, trans_id, final)
            # Only now, with the freeze locked, is the order written: had its lock been lost meanwhile (a session that
            # the server ended), this fails, and the release is rolled back.
            state = Order.TIMED_OUT if expired else Order.PAID
            done = sa.update(orders).where(orders.c.trans_id == trans_id).values(state=state, settled=True)
            order_db.execute(done)
            if expired:
                tell(order_db, trans_id, "timed out", order.units)
            reach("shop.freeze-written")
        reach("shop.freeze-released")
    reach("shop.order-settled")
    return Settled.TIMED_OUT if expired else Settled.SOLD


def release_orphan(order_db: sa.Connection, product_db: sa.Connection, trans_id: str) -> Settled:
    """Sweep 2's act on one freeze, and transaction 3: if there is no order, give the stock back.

    "No order" must stay true, also while a slow transaction 2 is about to commit. So the question is asked by writing,
    in a transaction on the primary: the mark *never* is inserted where transaction 2 inserts *placed*, and one of the
    two stands. The insert waits for a transaction 2 that is still running; one that comes later fails on the mark.
    """
    with order_db.begin():
        insert_new(order_db, order_marks, trans_id=trans_id, mark=Mark.NEVER)
        look = sa.select(order_marks.c.mark).where(order_marks.c.trans_id == trans_id)
        mark = order_db.execute(look).scalar_one()
        reach("shop.fence-written")
    reach("shop.fenced")
    if mark == Mark.PLACED:
        return Settled.HAS_ORDER
    with product_db.begin():
        released = release(product_db, trans_id, Freeze.UNSOLD)
        reach("shop.orphan-written")
    reach("shop.orphan-released")
    return Settled.ORPHAN if released else Settled.NOT_DUE


def release(product_db: sa.Connection, trans_id: str, final: Freeze) -> bool:
    """Move the freezes of ``trans_id`` from frozen to ``final``, stock given back if that is unsold; False if they were
    there."""
    of_this = freezes.c.trans_id == trans_id
    found = product_db.execute(sa.select(freezes).where(of_this).with_for_update()).all()
    if {row.state for row in found} - {Freeze.FROZEN, final}:
        raise Inconsistent(f"{trans_id}: to be {final}, but its freeze is {found[0].state}")
    for row in sorted(found, key=lambda row: row.product_id):  # in transaction 1's order: no deadlock with it
        if row.state == Freeze.FROZEN and final == Freeze.UNSOLD:
            back = sa.update(products).where(products.c.product_id == row.product_id)
            product_db.execute(back.values(stock=products.c.stock + row.amount))
    changed = product_db.execute(
        sa.update(freezes).where(of_this, freezes.c.state == Freeze.FROZEN).values(state=final)
    )
    return changed.rowcount > 0


# Finding candidates. Plain reads: what they miss, the next sweep finds.


def orders_to_settle(order_db: sa.Connection, now_us: int) -> Iterator[str]:
    """Orders whose freeze is not released although they are paid, or unpaid past their time; the longest due first."""
    due = sa.or_(orders.c.state == Order.PAID, orders.c.pay_by_us <= now_us)
    found = sa.select(orders.c.pay_by_us, orders.c.trans_id).where(~orders.c.settled, due)
    yield from (row.trans_id for row in _pages(order_db, found, orders.c.pay_by_us, orders.c.trans_id))


def old_freezes(product_db: sa.Connection, now_us: int) -> Iterator[tuple[str, str]]:
    """(trans_id, user_id) of what has been frozen for too long; the oldest first."""
    old = sa.and_(freezes.c.state == Freeze.FROZEN, freezes.c.frozen_us <= now_us - ORPHAN_AGE_US)
    found = sa.select(freezes.c.frozen_us, freezes.c.trans_id, freezes.c.user_id).where(old).distinct()
    yield from (
        (row.trans_id, row.user_id) for row in _pages(product_db, found, freezes.c.frozen_us, freezes.c.trans_id)
    )


def _pages(connection: sa.Connection, query: sa.Select, *order: sa.Column) -> Iterator[sa.Row]:
    """All rows, a page at a time, by keys that do not change: what an act left as it was cannot block the rest."""
    after = sa.true()
    while True:
        with connection.begin():
            page = connection.execute(query.where(after).order_by(*order).limit(PAGE)).all()
        yield from page
        if len(page) < PAGE:
            return
        after = sa.tuple_(*order) > sa.tuple_(*page[-1][: len(order)])


# The loops

Connect = Callable[[], AbstractContextManager[sa.Connection]]


def sweep_orders(shards: Sequence[Connect], product_db: Connect, now_us: int) -> Counter[Settled]:
    """Sweep 1, every 15 minutes, over all shards. What fails is alerted, and tried again by the next sweep."""
    done: Counter[Settled] = Counter()
    for shard in shards:
        with shard() as finding, shard() as order_db, product_db() as stock:
            candidates = orders_to_settle(finding, now_us)
            done += _each(candidates, lambda name, o=order_db, p=stock: settle_order(o, p, name, now_us))
    return done


def sweep_freezes(shards: Sequence[Connect], product_db: Connect, now_us: int) -> Counter[Settled]:
    """Sweep 2, over all freezes that are older than 10 minutes. What fails is alerted, and tried again by the next
    sweep."""
    with ExitStack() as stack:
        finding, stock = stack.enter_context(product_db()), stack.enter_context(product_db())
        order_dbs = [stack.enter_context(shard()) for shard in shards]
        candidates = old_freezes(finding, now_us)
        return _each(
            candidates, lambda found: release_orphan(order_dbs[shard_of(found[1], len(shards))], stock, found[0])
        )


def _each(candidates: Iterable, act: Callable) -> Counter[Settled]:
    done: Counter[Settled] = Counter()
    for candidate in candidates:
        try:
            done[act(candidate)] += 1
        except (sa.exc.SQLAlchemyError, Inconsistent) as problem:
            done["failed"] += 1
            _log.error("ALERT: %s was not settled, the next sweep tries again: %s", candidate, problem)
    return done
