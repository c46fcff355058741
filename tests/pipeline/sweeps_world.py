"""A small shop as examples/shop makes it, with an order of every kind, and what it looks like after one clean run of
the plain sweeps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.engines import open_locking
from escrowmq.outbox.tables import trans_message
from escrowmq.pipeline.sweeps import Act, Books, Databases, release_orphan, settle_order

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "shop"))

import paying
import placing
import shop_account
import shop_databases
import sweeps
from placing import MINUTE_US
from shop_tables import Basket, order_tables, product_tables

START = 1_000_000 * MINUTE_US
NOW = START + 15 * MINUTE_US
"""Of the sweeps: what was placed at START is over, and what was frozen then is old."""
SHARDS = 2
STOCK = {"book": 1000, "pen": 1000}
BOOKS = Books(shard_by="user_id", events=placing.EVENTS, event_columns=("units",))
EVERYWHERE = Books(events=placing.EVENTS, event_columns=("units",))
"""Not told how orders are sharded."""
KINDS = ("paid", "unpaid", "not over", "orphan", "young orphan", "fenced")


class World:
    """The databases of the shop."""

    def __init__(self, urls: Sequence[str], stack: ExitStack) -> None:
        self.urls = list(urls)
        engines = [open_locking(url) for url in urls]
        for engine in engines:
            stack.callback(engine.dispose)
        self.shop = shop_databases.Databases(engines[0], engines[1], engines[2:])
        self.databases = Databases(tuple(urls[2:]), urls[0])

    def fill(self, each: int = 2) -> None:
        """``each`` orders of every kind."""
        with self.shop.products.begin() as connection:
            for table in product_tables.tables.values():
                connection.execute(sa.delete(table))
            rows = [{"product_id": name, "initial": pieces, "stock": pieces} for name, pieces in STOCK.items()]
            connection.execute(sa.insert(product_tables.tables["products"]), rows)
        for shard in self.shop.shards:
            with shard.begin() as connection:
                for table in [*order_tables.tables.values(), trans_message]:
                    connection.execute(sa.delete(table))
        for number in range(each * len(KINDS)):
            self._buy(
                f"t-{number:04}", KINDS[number % len(KINDS)], Basket(f"user {number}", {"book": 1, "pen": 2}, 300)
            )

    def _buy(self, trans_id: str, kind: str, basket: Basket) -> None:
        with self.shop.shard(basket.user_id).connect() as order_db, self.shop.products.connect() as product_db:
            at = START + 10 * MINUTE_US if kind in ("not over", "young orphan") else START
            placing.take_stock(product_db, trans_id, basket, at)
            if kind in ("paid", "unpaid", "not over"):
                placing.place_order(order_db, trans_id, basket, at)
            if kind == "paid":
                paying.pay(order_db, product_db, trans_id)
            if kind == "fenced":  # by a sweep that died
                with order_db.begin():
                    order_db.execute(
                        sa.insert(order_tables.tables["order_marks"]).values(trans_id=trans_id, mark="never")
                    )

    def plain_sweeps(self) -> None:
        """What examples/shop does."""
        shards = [shard.connect for shard in self.shop.shards]
        assert not sweeps.sweep_orders(shards, self.shop.products.connect, NOW)["failed"]
        assert not sweeps.sweep_freezes(shards, self.shop.products.connect, NOW)["failed"]

    def act_on_all(self, books: Books = BOOKS, each: int = 2) -> list[Act]:
        """The two acts on every trans_id, without looking for candidates."""
        done = []
        with ExitStack() as stack:
            product_db = stack.enter_context(self.shop.products.connect())
            order_dbs = [stack.enter_context(shard.connect()) for shard in self.shop.shards]
            for number in range(each * len(KINDS)):
                trans_id, user = f"t-{number:04}", f"user {number}"
                order_db = order_dbs[self.shop.shards.index(self.shop.shard(user))]
                done.append(settle_order(order_db, product_db, trans_id, NOW, books))
                if KINDS[number % len(KINDS)] != "young orphan":
                    done.append(release_orphan([order_db], product_db, trans_id, books))
        return done

    def content(self, marks: bool = True) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table; of messages, their bodies."""
        engines = [self.shop.products, *self.shop.shards]
        tables = [product_tables, *[order_tables] * len(self.shop.shards)]
        found: dict[str, list[tuple[Any, ...]]] = {}
        for number, (engine, metadata) in enumerate(zip(engines, tables, strict=True)):
            with engine.begin() as connection:
                for table in metadata.sorted_tables:
                    if marks or table.name != "order_marks":
                        rows = connection.execute(sa.select(table)).all()
                        found[f"{table.name} {number}"] = sorted(tuple(row) for row in rows)
                if number:
                    bodies = connection.execute(sa.select(trans_message.c.body)).all()
                    found[f"messages {number}"] = sorted(tuple(row) for row in bodies)
        return found

    def problems(self) -> list[str]:
        """What examples/shop's own auditor says."""
        with self.shop.products.begin() as connection:
            wrong = shop_account.stock_problems(connection)
        return wrong + shop_account.order_problems(self.shop, NOW)


@contextmanager
def world(urls: Sequence[str], *, there: bool = False) -> Iterator[World]:
    """Tables made, nothing in them; or the shop that is ``there``."""
    with ExitStack() as stack:
        made = World(urls, stack)
        if not there:
            shop_databases.create(made.shop, STOCK)
        yield made
