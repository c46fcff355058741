"""The tables that the sweeps use: required columns, and configurable names of tables, columns and states.

Databases of orders (the *shards*) have two tables, the database of products two::

    orders       trans_id (key), state, pay_by_us, settled   unpaid → paid | timed out; settled: its freeze was released
    order_marks  trans_id (key), mark                          placed | never: the first mark stands
    products     product_id (key), stock
    freezes      trans_id, product_id (key), amount, state, frozen_us     frozen → released sold | released unsold

The program that places an order must insert the mark ``placed`` in the order's own transaction. That insert fails on
the mark ``never``, so no order can appear after its stock was released. The program that marks an order as paid must
lock its row and check, under that lock, that its freeze is still frozen. ``examples/shop`` does both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.sql.tables import check
from escrowmq.settings import nearest


@dataclass(frozen=True, slots=True)
class Books:
    """Names of tables, columns (``T.C``: of table T) and states."""

    orders: str = "orders"
    order_trans_id: str = "trans_id"
    order_state: str = "state"
    order_pay_by: str = "pay_by_us"
    order_settled: str = "settled"
    unpaid: str = "unpaid"
    paid: str = "paid"
    timed_out: str = "timed out"

    marks: str = "order_marks"
    mark_trans_id: str = "trans_id"
    mark_word: str = "mark"
    placed: str = "placed"
    never: str = "never"

    products: str = "products"
    product_id: str = "product_id"
    product_stock: str = "stock"

    freezes: str = "freezes"
    freeze_trans_id: str = "trans_id"
    freeze_product_id: str = "product_id"
    freeze_amount: str = "amount"
    freeze_state: str = "state"
    freeze_time: str = "frozen_us"
    frozen: str = "frozen"
    sold: str = "released sold"
    unsold: str = "released unsold"

    ticks_per_second: int = 1_000_000  # times are whole numbers of these since 1970
    shard_by: str | None = None  # column of freezes: its order can only be in shard crc32(text) modulo number of shards
    events: str | None = None  # outbox topic that gets an event for each order that timed out
    event_columns: tuple[str, ...] = ()  # columns of orders that its body has besides

    @classmethod
    def read(cls, path: Path) -> Books:
        """Read a JSON file with the names that differ from the defaults. Raises Misuse(BAD_SETTING) for an unknown
        name, and for a file that cannot be read or is not JSON."""
        try:
            given: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as problem:
            raise Misuse(Code.BAD_SETTING, f"{path}: {problem}") from None
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise Misuse(Code.BAD_SETTING, f"{path}: no name {name!r}", nearest(name, known) or ", ".join(known))
        if "event_columns" in given:
            given["event_columns"] = tuple(given["event_columns"])
        return cls(**given)

    def check(self, orders: tuple[str, ...], products: str) -> None:
        """Check that each database of orders (URLs) and the one of products (a URL) have all tables and columns of
        these names. Raises Misuse(BAD_ARGUMENT), naming what is missing."""
        of_orders = (self.order_trans_id, self.order_state, self.order_pay_by, self.order_settled, *self.event_columns)
        of_freezes = (self.freeze_trans_id, self.freeze_product_id, self.freeze_amount, self.freeze_state)
        for url in orders:
            check(url, self.orders, of_orders)
            check(url, self.marks, (self.mark_trans_id, self.mark_word))
        check(products, self.products, (self.product_id, self.product_stock))
        more = () if self.shard_by is None else (self.shard_by,)
        check(products, self.freezes, (*of_freezes, self.freeze_time, *more))

    def ticks(self, time_us: int) -> int:
        """Convert microseconds to the unit in which these tables store times (``ticks_per_second``)."""
        return time_us * self.ticks_per_second // 1_000_000


def table(name: str, *columns: str) -> sa.TableClause:
    """Return a SQLAlchemy table of this name with these columns, without reading its schema from the database."""
    return sa.table(name, *(sa.column(column) for column in columns))
