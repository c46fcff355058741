"""Two sets in a SQL database: SQLite, which needs no server, PostgreSQL, MariaDB or MySQL.

The row of ``escrow_set_store`` is the lock of all calls that move ids between runs: it is locked first, so these calls
run one after the other. Announcements and entries take no such lock. Each call is one transaction; ``take`` is one per
thousand ids.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from escrowmq.compensation.sets.checks import STEP_IDS, CheckedSets, check_ids, check_time
from escrowmq.compensation.sets.durability import commits_late, state_of
from escrowmq.compensation.sets.failures import failure, is_missing, other_shape
from escrowmq.compensation.sets.seam import Run, Sizes
from escrowmq.compensation.sets.tables import commit_set, half_set, metadata, number_of, set_run, set_store, taken
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import Dialect, insert_if_absent, may_repeat
from escrowmq.outbox.session import AnySession
from escrowmq.platform.failpoints import reach

_TRIES = 6
"""Tries of a transaction that the database undoes because of concurrent ones."""
_PAUSE = 0.01
_MAKING = 0x65736372_6F777365
_T = TypeVar("_T")
_P = ParamSpec("_P")


def _in_transaction(
    work: Callable[Concatenate[SqlSets, sa.Connection, _P], _T],
) -> Callable[Concatenate[SqlSets, _P], _T]:
    """Run a method in a transaction of the store, which provides its connection."""

    @wraps(work)
    def run(self: SqlSets, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._transact(lambda connection: work(self, connection, *args, **kwargs))

    return run


class SqlSets(CheckedSets):
    """One pair of sets in the database of ``engine``; see :class:`escrowmq.compensation.sets.seam.SetStore`."""

    def __init__(self, engine: sa.Engine, name: str, *, own: bool = False) -> None:
        """Store the settings; does not connect yet: the first call creates the tables. ``own``: :meth:`close` disposes
        of the engine. Raises Misuse(BAD_ARGUMENT) for anything but an engine of a known database,
        Rejected(BAD_GROUP_NAME)."""
        super().__init__(name)
        self._dialect = Dialect(engine)
        self._store = number_of(name)
        self._engine = engine
        self._own = own
        self._process = os.getpid()
        self._ready = False
        self._commits_late = False

    @property
    def engine(self) -> sa.Engine:
        """Engine of the database that holds the store."""
        return self._engine

    @property
    def keeps(self) -> str:
        """Description of the point in time at which entries are safe."""
        return "when a call returns, its transaction is durable as the database's settings have it"

    def add_commits_tx(self, session: AnySession, ids: Sequence[bytes], now_us: int) -> None:
        """Do :meth:`add_commits` inside your transaction of this store's database: effect, mark and entry are then one
        step. Errors of the database pass through unchanged. Raises Misuse(NO_TABLES) if no other call has created the
        tables yet: call :meth:`epoch` once before."""
        check_ids(ids)
        check_time(now_us)
        connection = session.connection() if isinstance(session, Session | scoped_session) else session
        if not self._ready and not sa.inspect(connection).has_table(commit_set.name):
            hint = "call epoch() once before the first transaction"
            raise Misuse(Code.NO_TABLES, "the set store has no tables yet", hint)
        if ids:
            self._insert_commits(connection, ids, now_us)

    def close(self) -> None:
        super().close()
        if self._own:
            self._engine.dispose()

    # One transaction each

    def _transact(self, work: Callable[[sa.Connection], _T]) -> _T:
        """Run ``work`` in a transaction, again if the database undid it because of others."""
        self._check_open()
        if self._own and self._process != os.getpid():
            self._engine.dispose(close=False)  # after a fork: the connections belong to the parent
            self._process = os.getpid()
        for left in reversed(range(_TRIES)):
            try:
                if not self._ready:
                    self._create_tables()
                with self._dialect.transaction() as connection:
                    if self._commits_late:
                        connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                    return work(connection)
            except DBAPIError as problem:
                missing = is_missing(problem) and self._ready
                if missing:
                    self._ready = False  # dropped meanwhile: they are created again, with a new token
                if not left or not (missing or may_repeat(problem)):
                    raise failure(problem) from problem
            time.sleep(_PAUSE * (_TRIES - left) * (1 + secrets.randbelow(100) / 100))
        raise Misuse(Code.BAD_ARGUMENT, "no try was left")

    def _create_tables(self) -> None:
        with self._dialect.transaction() as connection:
            if self._dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MAKING)))
            metadata.create_all(connection)
            inspector = sa.inspect(connection)
            for table in metadata.sorted_tables:
                found = {column["name"] for column in inspector.get_columns(table.name)}
                keys = inspector.get_pk_constraint(table.name)["constrained_columns"]
                if found != set(table.columns.keys()) or set(keys) != {column.name for column in table.primary_key}:
                    raise other_shape(f"{table.name} has the columns {', '.join(sorted(found))}")
            self._commits_late = commits_late(connection, self._dialect.name)
        self._ready = True

    def _lock(self, connection: sa.Connection) -> str:
        """Lock the row of the store, after all other calls that move ids; return the token."""
        is_own = set_store.c.store == self._store
        locked = sa.select(set_store.c.token).where(is_own).with_for_update()
        token = connection.scalar(locked)
        if token is None:
            row = {"store": self._store, "name": self._name, "token": secrets.token_hex(16)}
            connection.execute(insert_if_absent(self._dialect.name, set_store), row)
            token = connection.scalar(locked)
        return str(token)

    @_in_transaction
    def epoch(self, connection: sa.Connection) -> str:
        """Return a token generated with the store's row, and the result of :func:`.durability.state_of`."""
        token = connection.scalar(sa.select(set_store.c.token).where(set_store.c.store == self._store))
        token = self._lock(connection) if token is None else token
        return f"{token}{state_of(connection, self._dialect.name)}"

    @_in_transaction
    def _add_halves(self, connection: sa.Connection, earliest: dict[bytes, int]) -> None:
        rows = [{"store": self._store, "id": identity, "announced_us": us} for identity, us in earliest.items()]
        if self._dialect.name == "mysql":
            insert = mysql.insert(half_set)
            sooner = sa.func.least(half_set.c.announced_us, insert.inserted.announced_us)
            connection.execute(insert.on_duplicate_key_update(announced_us=sooner), rows)
            return
        if self._dialect.name == "sqlite":
            lite = sqlite.insert(half_set)
            earlier = lite.excluded.announced_us < half_set.c.announced_us
            set_ = {"announced_us": lite.excluded.announced_us}
            upsert = lite.on_conflict_do_update(index_elements=["store", "id"], set_=set_, where=earlier)
            connection.execute(upsert, rows)
            return
        times = sa.bindparam(None, list(earliest.values()), postgresql.ARRAY(sa.BigInteger))
        columns = sa.func.unnest(_ids(earliest)), sa.func.unnest(times)
        rows_of = sa.select(sa.literal(self._store, sa.BigInteger), *columns)
        post = postgresql.insert(half_set).from_select(["store", "id", "announced_us"], rows_of)
        earlier = post.excluded.announced_us < half_set.c.announced_us
        set_ = {"announced_us": post.excluded.announced_us}
        connection.execute(post.on_conflict_do_update(index_elements=["store", "id"], set_=set_, where=earlier))

    @_in_transaction
    def _add_commits(self, connection: sa.Connection, ids: Sequence[bytes], now_us: int) -> None:
        self._insert_commits(connection, ids, now_us)

    def _insert_commits(self, connection: sa.Connection, ids: Sequence[bytes], now_us: int) -> None:
        wanted = sorted(set(ids))  # the same order in all calls: overlapping ones wait instead of deadlocking
        if self._dialect.name == "postgresql":
            store, entered_us = sa.literal(self._store, sa.BigInteger), sa.literal(now_us, sa.BigInteger)
            found = sa.select(store, sa.func.unnest(_ids(wanted)), entered_us)
            post = postgresql.insert(commit_set).from_select(["store", "id", "entered_us"], found)
            connection.execute(post.on_conflict_do_nothing())
            return
        rows = [{"store": self._store, "id": identity, "entered_us": now_us} for identity in wanted]
        connection.execute(insert_if_absent(self._dialect.name, commit_set), rows)

    @_in_transaction
    def _take(
        self, connection: sa.Connection, run: str, before_us: int, most: int, duration_us: int
    ) -> tuple[int, list[bytes]]:
        self._lock(connection)
        h = half_set.c
        early = sa.select(h.id, h.announced_us).where(h.store == self._store, h.announced_us < before_us)
        early = early.order_by(h.announced_us, h.id).limit(most).with_for_update()
        times = {bytes(identity): us for identity, us in connection.execute(early)}
        if not times:
            return 0, []
        committed, others = (
            set(map(bytes, connection.scalars(sa.select(table.c.id).where(*self._where_ids(table, times)))))
            for table in (commit_set, taken)
        )
        kept = [identity for identity in times if identity not in committed | others]
        connection.execute(sa.delete(half_set).where(*self._where_ids(half_set, times)))
        if committed:
            connection.execute(sa.delete(commit_set).where(*self._where_ids(commit_set, committed)))
        reach("sets.taking")
        if kept:
            rows = [{"store": self._store, "id": i, "run": run, "announced_us": times[i]} for i in kept]
            connection.execute(sa.insert(taken).inline(), rows)
            self._lease(connection, run, duration_us)
        return len(times), kept

    def _drop(self, run: str) -> None: ...

    def _lease(self, connection: sa.Connection, run: str, duration_us: int) -> None:
        if not self._extend(connection, run, duration_us):
            until = self._dialect.now_us + duration_us
            connection.execute(sa.insert(set_run).values(store=self._store, run=run, leased_until_us=until))

    def _extend(self, connection: sa.Connection, run: str, duration_us: int) -> bool:
        of_run = (set_run.c.store == self._store, set_run.c.run == run)
        until = sa.update(set_run).where(*of_run).values(leased_until_us=self._dialect.now_us + duration_us)
        return bool(connection.execute(until).rowcount)

    _renew = _in_transaction(_extend)

    @_in_transaction
    def _adopt(self, connection: sa.Connection, duration_us: int, limit: int) -> Run | None:
        self._lock(connection)
        r = set_run.c
        expired = sa.select(r.run).where(r.store == self._store, r.leased_until_us <= self._dialect.now_us)
        for run in connection.scalars(expired.order_by(r.leased_until_us)).all():
            if ids := self._select_left(connection, run, limit):
                self._lease(connection, run, duration_us)
                return Run(run, ids)
            connection.execute(sa.delete(set_run).where(r.store == self._store, r.run == run))
        return None

    def _select_left(self, connection: sa.Connection, run: str, limit: int) -> tuple[bytes, ...]:
        ids = sa.select(taken.c.id).where(taken.c.store == self._store, taken.c.run == run)
        return tuple(map(bytes, connection.scalars(ids.order_by(taken.c.announced_us, taken.c.id).limit(limit))))

    _left = _in_transaction(_select_left)

    def _settle(self, run: str, ids: Sequence[bytes]) -> None:
        self._remove_taken(run, ids)
        reach("sets.settled")

    @_in_transaction
    def _remove_taken(self, connection: sa.Connection, run: str, ids: Sequence[bytes]) -> None:
        self._lock(connection)
        for at in range(0, len(ids), STEP_IDS):
            part = ids[at : at + STEP_IDS]
            connection.execute(sa.delete(taken).where(*self._where_ids(taken, part), taken.c.run == run))
        if not self._select_left(connection, run, 1):
            connection.execute(sa.delete(set_run).where(set_run.c.store == self._store, set_run.c.run == run))

    def _forget_commits(self, before_us: int) -> int:
        forgotten = 0
        while count := self._forget_some(before_us):
            forgotten += count
        return forgotten

    @_in_transaction
    def _forget_some(self, connection: sa.Connection, before_us: int) -> int:
        c = commit_set.c
        announced = sa.exists().where(half_set.c.store == self._store, half_set.c.id == c.id)
        old = sa.select(c.id).where(c.store == self._store, c.entered_us < before_us, ~announced)
        ids = connection.scalars(old.order_by(c.entered_us).limit(STEP_IDS)).all()
        if ids:
            connection.execute(sa.delete(commit_set).where(*self._where_ids(commit_set, ids)))
        return len(ids)

    @_in_transaction
    def sizes(self, connection: sa.Connection) -> Sizes:
        """See the interface. Counting reads all rows."""
        # The half set before the runs: an id taken between the two reads is counted twice, never missed.
        half, oldest = self._count(connection, half_set, half_set.c.announced_us)
        in_runs, oldest_taken = self._count(connection, taken, taken.c.announced_us)
        commits, _ = self._count(connection, commit_set, commit_set.c.entered_us)
        runs, _ = self._count(connection, set_run, set_run.c.leased_until_us)
        times = [us for us in (oldest, oldest_taken) if us is not None]
        return Sizes(half, commits, in_runs, runs, min(times, default=None))

    def _count(self, connection: sa.Connection, table: sa.Table, time_us: sa.Column[int]) -> tuple[int, int | None]:
        is_own = table.c.store == self._store
        # the earliest first, so that an id taken between the two statements is still counted as waiting
        oldest = connection.scalar(sa.select(sa.func.min(time_us)).where(is_own))
        return int(connection.scalar(sa.select(sa.func.count()).select_from(table).where(is_own)) or 0), oldest

    def _where_ids(self, table: sa.Table, ids: Iterable[bytes]) -> tuple[sa.ColumnElement[bool], ...]:
        """Return WHERE conditions: this store's rows of these ids."""
        column = table.c.id
        known = column == sa.any_(_ids(ids)) if self._dialect.name == "postgresql" else column.in_(list(ids))
        return table.c.store == self._store, known


def _ids(ids: Iterable[bytes]) -> sa.BindParameter[Any]:
    return sa.bindparam(None, list(ids), postgresql.ARRAY(postgresql.BYTEA))
