"""A business database for outbox tests: orders beside the outbox, what each holds, and the same database to await."""

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import escrowmq as mq
from escrowmq.outbox.tables import trans_message

BOTH = (b"", b"\x00\xff'\"\\%s:x", "ключ 😀".encode())


class Base(DeclarativeBase):
    pass


class Order(Base):
    """A business row; ``number`` is unique so that a flush can be made to fail."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int | None] = mapped_column(unique=True)
    __table_args__ = {"mysql_engine": "InnoDB"}


orders = Order.__table__


def business_and_outbox(engine: sa.Engine) -> tuple[set[str], list[str]]:
    """Ids of the orders that exist, and keys of the outbox rows that exist."""
    with engine.connect() as connection:
        business = {str(i) for i in connection.scalars(sa.select(orders.c.id))}
        keys = sorted(connection.scalars(sa.select(trans_message.c.key)), key=lambda key: (len(key), key))
    return business, keys


def agree(engine: sa.Engine) -> set[str]:
    """I37: each order has exactly one message and each message its order; their ids."""
    business, keys = business_and_outbox(engine)
    assert sorted(keys) == sorted(business)
    return business


def unsettled(bus: mq.Bus, group: str) -> bool:
    """Whether a consumer group has something left to take or to settle."""
    [found] = [one for one in bus.admin.groups() if one["name"] == group]
    return any(queue["waiting"] + queue["leased"] + queue["retrying"] for queue in found["queues"])


def until_settled(bus: mq.Bus, group: str, consume: Callable[[], int]) -> int:
    """Consume until the group has nothing left, however long the machine is idle in between; what it makes together."""
    total = consume()
    while unsettled(bus, group):
        total += consume()
    return total


def patience(url: sa.URL) -> dict[str, dict[str, float]]:
    """What an engine is made with, so that it waits for SQLite's lock however slow the machine is."""
    return {"connect_args": {"timeout": 60.0}} if url.drivername.startswith("sqlite") else {}


def to_await(url: str) -> str:
    """The same database by an asynchronous driver."""
    for driver, other in (("sqlite:", "sqlite+aiosqlite:"), ("mysql+pymysql:", "mysql+aiomysql:")):
        url = url.replace(driver, other)
    return url.replace("&ssl_disabled=1", "")  # which aiomysql does not know: it asks for no TLS
