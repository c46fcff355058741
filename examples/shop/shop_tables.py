"""The shop's tables: products in one database; orders and users, sharded by user, over several others.

No database knows another: what ties an order to the stock that is kept for it is ``trans_id``, and nothing else.
"""

import zlib
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa


class Freeze(StrEnum):
    """What became of the stock that a freeze record took."""

    FROZEN = "frozen"
    SOLD = "released sold"
    UNSOLD = "released unsold"  # the stock was given back


class Order(StrEnum):
    """Where an order stands."""

    UNPAID = "unpaid"
    PAID = "paid"
    TIMED_OUT = "timed out"


class Mark(StrEnum):
    """Whether a ``trans_id`` has an order: the first word stands for ever, whoever says it."""

    PLACED = "placed"
    NEVER = "never"  # a fence: an order under this trans_id that comes later fails


NAME = sa.String(64)
STATE = sa.String(16)
TIME = sa.BigInteger()  # microseconds since 1970

product_tables = sa.MetaData()

products = sa.Table(
    "products",
    product_tables,
    sa.Column("product_id", NAME, primary_key=True),
    sa.Column("initial", sa.BigInteger, nullable=False),
    sa.Column("stock", sa.BigInteger, nullable=False),
    sa.CheckConstraint("stock >= 0", name="stock_is_not_negative"),
)

freezes = sa.Table(
    "freezes",
    product_tables,
    sa.Column("trans_id", NAME, primary_key=True),
    sa.Column("product_id", NAME, primary_key=True),
    sa.Column("user_id", NAME, nullable=False),  # says in which shard the order is, if there is one
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("frozen_us", TIME, nullable=False),
    sa.Index("freezes_by_age", "state", "frozen_us", "trans_id"),
)

order_tables = sa.MetaData()

orders = sa.Table(
    "orders",
    order_tables,
    sa.Column("trans_id", NAME, primary_key=True),
    sa.Column("user_id", NAME, nullable=False),
    sa.Column("units", sa.BigInteger, nullable=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("pay_by_us", TIME, nullable=False),
    sa.Column("settled", sa.Boolean, nullable=False),  # its freeze was released, as sold or as unsold
    sa.Index("orders_to_settle", "settled", "pay_by_us"),
)

order_marks = sa.Table(
    "order_marks",
    order_tables,
    sa.Column("trans_id", NAME, primary_key=True),
    sa.Column("mark", STATE, nullable=False),
)

users = sa.Table(
    "users",
    order_tables,
    sa.Column("user_id", NAME, primary_key=True),
    sa.Column("spent_cents", sa.BigInteger, nullable=False),
)

warehouse_tables = sa.MetaData()

parcels = sa.Table(
    "parcels",
    warehouse_tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("trans_id", NAME, nullable=False),  # not unique: that it comes once is the receive log's work
    sa.Column("units", sa.BigInteger, nullable=False),
)


@dataclass(frozen=True)
class Basket:
    """What a user wants to buy: pieces by product, and what they cost together."""

    user_id: str
    lines: dict[str, int]
    cents: int

    @property
    def units(self) -> int:
        return sum(self.lines.values())


def shard_of(user_id: str, shards: int) -> int:
    """The number of the database in which a user and all of the user's orders are."""
    return zlib.crc32(user_id.encode()) % shards


def insert_new(connection: sa.Connection, table: sa.Table, **values: object) -> bool:
    """Insert a row unless its primary key is taken; whether it was inserted.

    Waits while a transaction that is still running has inserted the same key.
    """
    try:
        with connection.begin_nested():
            connection.execute(sa.insert(table).values(**values))
    except sa.exc.IntegrityError:
        return False
    return True
