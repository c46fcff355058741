"""One order of the shop and several actors on it, taken step by step in an order that the test chooses, on real
databases.

A step is what an act does between two of its ``reach`` calls. Locks are the databases' own, but nobody waits for one:
who meets a lock gives up, rolls back and begins again when it is its turn, which is what a wait comes to when the other
acts first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import paying
import placing
import pytest
import sqlalchemy as sa
import sweeps
from placing import MINUTE_US, OrderFenced
from shop_account import final_problems, order_problems, stock_problems
from shop_databases import Databases, create
from shop_tables import Basket, order_tables, product_tables

from escrowmq.outbox.tables import trans_message
from escrowmq_lab.databases import open_engine, snapshot

START = 1_000_000 * MINUTE_US
BASKET = Basket("ann", {"book": 2, "pen": 5}, 3100)
NAME = "t-1"
PATIENCE = 60.0

Act = Callable[[sa.Connection, sa.Connection], Any]


class Killed(BaseException):
    """The process is gone: nothing more is committed."""


def impatient(url: str) -> sa.Engine:
    """An engine of whose locks nobody waits."""
    options = {
        "sqlite": {"timeout": 0.0},
        "postgresql": {"options": "-c lock_timeout=1"},
        "mysql": {"init_command": "SET SESSION innodb_lock_wait_timeout = 0"},
    }[sa.make_url(url).get_backend_name()]
    return open_engine(url, connect_args=options)


class Actor:
    """One act in a thread of its own that runs only while it is told to."""

    def __init__(self, name: str, act: Act, databases: Databases) -> None:
        self.name = name
        self.result: Any = None
        self.done = False
        self._act = act
        self._databases = databases
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._killed = False
        self._connections: list[sa.Connection] = []

    def step(self) -> None:
        """Until the next ``reach``, or the end, or a lock."""
        if self.done:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
        else:
            self._go.release()
        assert self._paused.acquire(timeout=PATIENCE)

    def run(self) -> None:
        """Until the end, or a lock."""
        if isinstance(self.result, sa.exc.SQLAlchemyError):
            time.sleep(0.001)  # a server frees the locks of a session that it ended in its own time
        self.step()
        while self._thread is not None:
            self.step()

    def kill(self) -> None:
        """End it where it stands."""
        if self._thread is not None:
            self._killed = True
            self.step()
        self.done = True

    def cut(self) -> None:
        """Its session with the order database is ended, and it is not told."""
        if self._thread is None or not self._connections:
            return
        raw = self._connections[0].connection.driver_connection
        shard = self._databases.shards[0]
        if shard.dialect.name == "sqlite":
            raw.close()
            return
        with shard.connect() as killer, contextlib.suppress(sa.exc.DBAPIError):  # it may be gone already
            if shard.dialect.name == "postgresql":
                killer.exec_driver_sql(f"SELECT pg_terminate_backend({raw.info.backend_pid})")
            else:
                killer.exec_driver_sql(f"KILL {raw.thread_id()}")

    def pause(self, _: str) -> None:
        self._paused.release()
        assert self._go.acquire(timeout=PATIENCE)
        if self._killed:
            raise Killed

    def _run(self) -> None:
        _running.actor = self
        try:
            with self._databases.shards[0].connect() as order_db, self._databases.products.connect() as product_db:
                self._connections = [order_db, product_db]
                self.result = self._act(order_db, product_db)
            self.done = True
        except (paying.PaymentRefused, OrderFenced, sweeps.Inconsistent) as refused:
            self.result, self.done = refused, True
        except sa.exc.SQLAlchemyError as problem:  # a lock, a deadlock, a lost session: all is rolled back, again later
            self.result = problem
        except Killed:
            self.done = True
        finally:
            self._connections = []
            self._thread = None
            self._paused.release()


_running = threading.local()


def _step(name: str) -> None:
    actor = getattr(_running, "actor", None)
    if actor is not None:
        actor.pause(name)


class World:
    """The databases, the order, and what is wrong with them."""

    def __init__(self, urls: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = START
        engines = [open_engine(url) for url in urls]
        self.databases = Databases(engines[0], engines[1], engines[2:])
        rushed = [impatient(url) for url in urls]
        for engine in [*engines, *rushed]:
            if engine.dialect.name == "sqlite":  # what these tests write need not outlive them
                sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
        self._commits = 0
        for engine in rushed:
            sa.event.listen(engine, "commit", self._committed)
        self.impatient = Databases(rushed[0], rushed[1], rushed[2:])
        create(self.databases, {"book": 10, "pen": 10})
        for module in (placing, paying, sweeps):
            monkeypatch.setattr(module, "reach", _step)

    def close(self) -> None:
        for some in (self.databases, self.impatient):
            for engine in [some.products, some.warehouse, *some.shards]:
                engine.dispose()

    def begin(self, *, ordered: bool, age_us: int) -> None:
        """A new order, placed or only frozen, of this age."""
        _running.actor = None
        self.now_us = START + age_us
        with self.databases.products.begin() as connection:
            connection.execute(sa.delete(product_tables.tables["freezes"]))
            connection.execute(sa.update(product_tables.tables["products"]).values(stock=10))
        with self.databases.shards[0].begin() as connection:
            for table in [*order_tables.tables.values(), trans_message]:
                connection.execute(sa.delete(table))
        with self.databases.shards[0].connect() as order_db, self.databases.products.connect() as product_db:
            placing.take_stock(product_db, NAME, BASKET, START)
            if ordered:
                placing.place_order(order_db, NAME, BASKET, START)

    def actor(self, name: str, act: Act) -> Actor:
        return Actor(name, act, self.impatient)

    def play(self, actors: Sequence[Actor], script: Sequence[tuple[str, int]]) -> list[str]:
        """Take the steps of ``script`` ("step", "kill" or "cut", and whose), then let all go on to their ends; what was
        ever wrong on the way, or is at the end."""
        try:
            for what, whose in script:
                getattr(actors[whose], what)()
                if problems := self._new_problems():
                    return problems
            deadline = time.monotonic() + PATIENCE
            while not all(actor.done for actor in actors) and time.monotonic() < deadline:
                for actor in actors:
                    actor.run()
                if problems := self._new_problems():
                    return problems
            return [f"{actor.name} never ended: {actor.result}" for actor in actors if not actor.done]
        finally:
            for actor in actors:
                if not actor.done:
                    actor.kill()

    def _committed(self, _: sa.Connection) -> None:
        self._commits += 1

    def _new_problems(self) -> list[str]:
        """What is wrong now, if anything was committed since the last look."""
        commits, self._commits = self._commits, 0
        return self.problems() if commits else []

    def problems(self) -> list[str]:
        """What is wrong now."""
        with snapshot(self.databases.products) as connection:
            wrong = stock_problems(connection)
        return wrong + order_problems(self.databases, self.now_us)

    def sweep_freezes(self) -> list[str]:
        """Sweep 2, now; what is wrong after it."""
        _running.actor = None
        sweeps.sweep_freezes(self._shards, self.databases.products.connect, self.now_us)
        return self.problems()

    def sweep(self) -> list[str]:
        """Both sweeps, as long after as they need; what is wrong after them, for good."""
        self.now_us += 60 * MINUTE_US
        wrong = self.sweep_freezes()
        sweeps.sweep_orders(self._shards, self.databases.products.connect, self.now_us)
        return wrong or self.problems() + final_problems(self.databases)

    @property
    def _shards(self) -> list[sweeps.Connect]:
        return [shard.connect for shard in self.databases.shards]
