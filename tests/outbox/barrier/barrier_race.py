"""The race of one local transaction with checkers, step by step, in any order, against a real database.

The local transaction's steps: begin, bind, end (by commit, rollback, or the death of its connection); its business row
is written with the first or the last of them. A checker's steps: look (what is committed already), close (insert
ROLLED_BACK), read (and answer). Every step that a checker takes returns at once, also where a transaction in flight
holds the row: so one thread can play everybody, and each order is played exactly.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

import escrowmq as mq
from escrowmq.model import Outcome, TransactionId
from escrowmq.outbox import AsyncBarrier, Barrier, bind_tx
from escrowmq.outbox.barrier.columns import COMMITTED, ROLLED_BACK
from escrowmq.outbox.barrier.marks import marks_of

orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True, autoincrement=False))
ENDS = ("commit", "rollback", "kill")


class Later(Barrier):
    """A checker that knows nothing before ``may_answer`` is set: on a slow machine the broker may ask about a
    transaction before it is bound, and the answer would be ROLLBACK."""

    def __init__(self, *engines: sa.Engine, **options: Any) -> None:
        super().__init__(*engines, **options)
        self.may_answer = threading.Event()

    def decide_ids(self, ids: Any) -> Any:
        return super().decide_ids(ids) if self.may_answer.is_set() else np.zeros(len(ids), np.uint8)


class AsyncLater(AsyncBarrier):
    """The same to await."""

    def __init__(self, *engines: Any, **options: Any) -> None:
        super().__init__(*engines, **options)
        self.may_answer = threading.Event()

    async def decide_ids(self, ids: Any) -> Any:
        return await super().decide_ids(ids) if self.may_answer.is_set() else np.zeros(len(ids), np.uint8)


class Wrong(AssertionError):
    """An answer that does not agree with what became of the local transaction."""


class Local:
    """The local transaction."""

    def __init__(self, engine: sa.Engine, number: int, end: str, write_first: bool) -> None:
        self.identity = TransactionId(1, 1, number)
        self._engine, self._number, self._end, self._write_first = engine, number, end, write_first
        self._connection: Any = None
        self.dead = False

    def steps(self) -> list[Callable[[], None]]:
        return [self.begin, self.bind, self.end]

    def begin(self) -> None:
        self._connection = self._engine.connect()
        self._connection.begin()
        if self._write_first:
            self._write()

    def bind(self) -> None:
        try:
            bind_tx(self._connection, self.identity)
        except (mq.Fenced, DBAPIError):
            self.dead = True  # and goes on as if nothing had happened: it must not be able to commit

    def end(self) -> None:
        try:
            if not self._write_first:
                self._write()
            if self._end == "commit":
                self._connection.commit()
            elif self._end == "rollback":
                self._connection.rollback()
            else:
                kill(self._engine, self._connection)
        except sa.exc.SQLAlchemyError:
            if not self.dead:
                raise
        finally:
            self._connection.close()

    def _write(self) -> None:
        if not self.dead:
            self._connection.execute(orders.insert(), {"id": self._number})

    def committed(self) -> bool:
        """What became of it, once it has ended."""
        with self._engine.connect() as connection:
            return connection.scalar(sa.select(orders.c.id).where(orders.c.id == self._number)) is not None


class Checker:
    """One checker, taken apart into its steps."""

    def __init__(self, engine: sa.Engine, identity: TransactionId, looks: bool = True) -> None:
        self._marks = marks_of(engine, "", 0.0)
        self._ids = np.array([bytes(identity)], "S16")
        self._looks = looks
        self.answer = mq.UNKNOWN

    def steps(self) -> list[Callable[[], None]]:
        return [self.look, self.close, self.read][not self._looks :]

    def look(self) -> None:
        self._conclude()

    def close(self) -> None:
        if self.answer is mq.UNKNOWN:
            self._marks.insert_free(self._ids, 0.0)

    def read(self) -> None:
        if self.answer is mq.UNKNOWN:
            self._conclude()

    def _conclude(self) -> None:
        found = int(self._marks.read(self._ids)[0])
        self.answer = {COMMITTED: mq.COMMIT, ROLLED_BACK: mq.ROLLBACK}.get(found, mq.UNKNOWN)


def kill(engine: sa.Engine, connection: sa.Connection) -> None:
    """Kill the server's side of a connection, or (SQLite) let go of the file as a dying process would."""
    if engine.dialect.name == "sqlite":
        connection.connection.driver_connection.close()
        connection.invalidate()
        return
    postgres = engine.dialect.name == "postgresql"
    number = connection.connection.driver_connection
    pid = number.info.backend_pid if postgres else number.thread_id()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})" if postgres else f"KILL {pid}")
    connection.invalidate()


def play(
    engine: sa.Engine,
    number: int,
    order: Iterable[int],
    end: str,
    write_first: bool,
    make: Callable[[sa.Engine, TransactionId], Any],
) -> tuple[bool, list[Outcome]]:
    """Play one order (0 is the local transaction, 1 and up are checkers) and judge it; (committed, answers)."""
    order = list(order)
    local = Local(engine, number, end, write_first)
    checkers = [make(engine, local.identity) for _ in range(max(order))]
    turns: list[Iterator[Callable[[], None]]] = [iter(local.steps()), *(iter(c.steps()) for c in checkers)]
    for who in order:
        next(turns[who])()
    last, deadline = mq.UNKNOWN, time.monotonic() + 60.0
    barrier = Barrier(engine)
    while last is mq.UNKNOWN:  # a killed connection's locks end when the server notices
        last = barrier.decide(local.identity)
        assert time.monotonic() < deadline, "nobody holds it, and it is not decided"
    committed, answers = local.committed(), [checker.answer for checker in checkers]
    truth = mq.COMMIT if committed else mq.ROLLBACK
    if wrong := [answer for answer in [*answers, last] if answer not in (truth, mq.UNKNOWN)]:
        raise Wrong(f"{order} ending in {end}: committed {committed}, but told {wrong[0].name}")
    if end == "commit" and not local.dead and not committed:
        raise Wrong(f"{order}: a commit that succeeded is gone")
    return committed, answers


def all_orders(checkers: int, steps: int) -> list[tuple[int, ...]]:
    """All orders of the local transaction's three steps and those of alike checkers (told apart by who begins
    first)."""
    multiset = [0] * 3 + [who for who in range(1, checkers + 1) for _ in range(steps)]
    found = set()
    for order in set(itertools.permutations(multiset)) if len(multiset) < 8 else _permuted(multiset):
        firsts = [order.index(who) for who in range(1, checkers + 1)]
        if firsts == sorted(firsts):
            found.add(order)
    return sorted(found)


def _permuted(multiset: list[int]) -> Iterator[tuple[int, ...]]:
    """Distinct permutations, without going through the equal ones."""
    if not multiset:
        yield ()
        return
    for one in sorted(set(multiset)):
        rest = list(multiset)
        rest.remove(one)
        for tail in _permuted(rest):
            yield (one, *tail)
