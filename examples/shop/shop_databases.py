"""The shop's databases: one for products, one a shard for orders and users, one for the warehouse."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from shop_tables import order_tables, product_tables, products, shard_of, warehouse_tables

from escrowmq import outbox
from escrowmq_lab.databases import open_engine


def names(shards: int) -> list[str]:
    """What the databases are called."""
    return ["shop_products", "shop_warehouse", *(f"shop_orders_{number}" for number in range(shards))]


@dataclass(frozen=True)
class Databases:
    """Engines for all of them. ``shards[n]`` has the users of shard ``n`` and all of their orders."""

    products: sa.Engine
    warehouse: sa.Engine
    shards: Sequence[sa.Engine]

    def shard(self, user_id: str) -> sa.Engine:
        """Where a user's orders are."""
        return self.shards[shard_of(user_id, len(self.shards))]


@contextmanager
def opened(urls: Sequence[str]) -> Iterator[Databases]:
    """The databases at ``urls`` (in the order of :func:`names`)."""
    with ExitStack() as stack:
        engines = [open_engine(url) for url in urls]
        for engine in engines:
            stack.callback(engine.dispose)
        yield Databases(engines[0], engines[1], engines[2:])


def create(databases: Databases, stock: Mapping[str, int]) -> None:
    """Make the tables, EscrowMQ's included, and fill the shelves."""
    product_tables.create_all(databases.products)
    warehouse_tables.create_all(databases.warehouse)
    for shard in databases.shards:
        order_tables.create_all(shard)
        outbox.migrate(shard)
    outbox.migrate(databases.warehouse)
    with databases.products.begin() as connection:
        rows = [{"product_id": product, "initial": pieces, "stock": pieces} for product, pieces in stock.items()]
        connection.execute(sa.insert(products), rows)
