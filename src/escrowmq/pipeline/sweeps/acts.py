"""The database changes of a sweep for one order or one stock freeze, under row locks, without Spark.

Each change is idempotent: it may be killed anywhere and run again, or run several times at once, and stock and orders
end as after one clean run. Connections must have no open transaction, and come from engines of
:func:`~escrowmq.outbox.engines.open_locking`. A candidate is only a hint: its state is checked again, under lock.

Locks are always taken in this order: an order, then its freezes, then products by id. So two changes cannot deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox import send_tx
from escrowmq.pipeline.sweeps.books import Books, table
from escrowmq.platform.failpoints import reach


class Act(StrEnum):
    """The result for one candidate."""

    SOLD = "released as sold"
    TIMED_OUT = "timed out, stock given back"
    ORPHAN = "no order, stock given back"
    HAS_ORDER = "has an order"
    NOT_DUE = "nothing to do"
    BUSY = "somebody else has it"
    FAILED = "failed"


class Inconsistent(Exception):
    """An order and its freeze contradict each other, or an order has no freeze. An operator must investigate."""


def settle_order(
    order_db: sa.Connection, product_db: sa.Connection, trans_id: str, over_ticks: int, books: Books = Books()
) -> Act:
    """Settle one order (sweep 1). Unpaid and due at ``over_ticks`` or before: TIMED_OUT, and its stock is released.
    Paid: SOLD. Otherwise nothing is done: NOT_DUE, or BUSY if its row is locked or gone. The order row is locked from
    the first read to the end, so no payment can intervene. The freeze is released first: a crash in between leaves an
    unpaid order without a freeze, which no payment accepts and the next run finishes. Raises Inconsistent, and
    SQLAlchemy's errors; then nothing was changed, or the next run finishes it."""
    orders = table(books.orders, books.order_trans_id, books.order_state, books.order_settled, books.order_pay_by)
    this = orders.c[books.order_trans_id] == trans_id
    wanted = (books.order_state, books.order_settled, books.order_pay_by, *books.event_columns)
    with order_db.begin():
        look = _select_columns(*wanted).select_from(orders).where(this)
        order = order_db.execute(look.with_for_update(skip_locked=True)).one_or_none()
        if order is None:
            return Act.BUSY
        state, settled, pay_by, *more = tuple(order)
        expired = state == books.unpaid and pay_by <= over_ticks
        if settled or not (expired or state == books.paid):
            return Act.NOT_DUE
        reach("sweep.locked")
        with product_db.begin():
            if release(product_db, trans_id, books.unsold if expired else books.sold, books) is None:
                raise Inconsistent(f"order {trans_id} is {state}, but there is no freeze of it")
            # Only now, with the freeze locked, is the order written: had its lock been lost meanwhile (a session that
            # the server ended), this fails, and the release is rolled back.
            done = {books.order_state: books.timed_out if expired else books.paid, books.order_settled: True}
            order_db.execute(sa.update(orders).where(this).values(done))
            if expired and books.events is not None:
                columns = dict(zip(books.event_columns, more, strict=True))
                body = json.dumps({"trans_id": trans_id, "event": books.timed_out, **columns})
                send_tx(order_db, books.events, body.encode(), key=trans_id)
            reach("sweep.freeze-written")
        reach("sweep.released")
    reach("sweep.settled")
    return Act.TIMED_OUT if expired else Act.SOLD


def release_orphan(
    order_dbs: Sequence[sa.Connection], product_db: sa.Connection, trans_id: str, books: Books = Books()
) -> Act:
    """Fence and release a freeze without an order (sweep 2), as unsold: ORPHAN; HAS_ORDER if there is one, NOT_DUE if
    it was released before. ``order_dbs`` are all shards in which its order could be. The absence of an order must be
    permanent, even if a slow transaction is about to commit one. So the check is a write: it inserts the mark *never*
    under the key where the order's transaction inserts *placed*, and the first of the two wins. The insert waits for a
    running transaction; a later transaction fails on the mark. Raises as :func:`settle_order`."""
    for order_db in order_dbs:
        with order_db.begin():
            word = _fence(order_db, trans_id, books)
            reach("sweep.fence-written")
        if word != books.never:
            return Act.HAS_ORDER
        reach("sweep.fenced")
    with product_db.begin():
        released = release(product_db, trans_id, books.unsold, books)
        reach("sweep.orphan-written")
    reach("sweep.orphan-released")
    return Act.ORPHAN if released else Act.NOT_DUE


def release(product_db: sa.Connection, trans_id: str, final: str, books: Books = Books()) -> bool | None:
    """Move the freezes of ``trans_id`` that are still frozen to ``final``; if that is unsold, restore the stock. Runs
    inside the caller's transaction. Returns False if all were moved before, None if there are none. Raises Inconsistent
    if one has any other state, or its product is missing."""
    freezes = table(books.freezes, books.freeze_trans_id, books.freeze_state)
    products = table(books.products, books.product_id, books.product_stock)
    of_this = freezes.c[books.freeze_trans_id] == trans_id
    wanted = (books.freeze_product_id, books.freeze_amount, books.freeze_state)
    look = _select_columns(*wanted).select_from(freezes).where(of_this)
    found = product_db.execute(look.with_for_update()).all()
    if other := {str(state) for _, _, state in found} - {books.frozen, final}:
        raise Inconsistent(f"{trans_id} is to be {final!r}, but its freeze is {', '.join(sorted(other))!r}")
    frozen = sorted((product, amount) for product, amount, state in found if state == books.frozen)
    if not frozen:
        return False if found else None
    if final == books.unsold:
        stock = products.c[books.product_stock]
        for product, amount in frozen:
            back = sa.update(products).where(products.c[books.product_id] == product)
            if product_db.execute(back.values({books.product_stock: stock + amount})).rowcount != 1:
                raise Inconsistent(f"{trans_id} froze pieces of {product!r}, and there is no such product")
    still = freezes.c[books.freeze_state] == books.frozen
    product_db.execute(sa.update(freezes).where(of_this, still).values({books.freeze_state: final}))
    return True


def _select_columns(*names: str) -> sa.Select[Any]:
    chosen: list[sa.ColumnClause[Any]] = [sa.column(name) for name in names]
    return sa.select(*chosen)


def _fence(order_db: sa.Connection, trans_id: str, books: Books) -> str:
    """Insert the mark ``never`` (there is no order) for ``trans_id``, unless there is a mark. Returns the mark that is
    stored."""
    marks = table(books.marks, books.mark_trans_id, books.mark_word)
    try:
        with order_db.begin_nested():
            row = {books.mark_trans_id: trans_id, books.mark_word: books.never}
            order_db.execute(sa.insert(marks).values(row))
    except sa.exc.IntegrityError:
        look = sa.select(marks.c[books.mark_word]).where(marks.c[books.mark_trans_id] == trans_id)
        return str(order_db.execute(look).scalar_one())
    return books.never
