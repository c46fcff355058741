"""The checker: answers checks from the marks in the database."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from escrowmq.errors import Code, Misuse
from escrowmq.message.ids import id_bytes, id_column
from escrowmq.model import Check, Outcome, TransactionId
from escrowmq.outbox.awaiting import awaited
from escrowmq.outbox.barrier.columns import CHUNK, COMMITTED, ROLLED_BACK, Ids, as_ids
from escrowmq.outbox.barrier.marks import marks_of
from escrowmq.outbox.dialects import in_a_line
from escrowmq.outbox.purging import age_of, delete_older
from escrowmq.outbox.tables import trans_barrier
from escrowmq.platform.backoff import Backoff
from escrowmq.settings import BrokerSettings

_log = logging.getLogger(__name__)
AWAY = (OperationalError, InterfaceError, DisconnectionError, PoolTimeout)
"""The errors of a database that is away or locked, or of an exhausted pool."""
FIRST_REPEAT, LAST_REPEAT = 1.0, 300.0
"""Seconds between two log lines about a database that cannot be read: at first, and at most."""
RETENTION = BrokerSettings().retention
Outcomes = npt.NDArray[np.uint8]
_OUTCOME = np.zeros(3, np.uint8)
_OUTCOME[COMMITTED], _OUTCOME[ROLLED_BACK] = Outcome.COMMIT, Outcome.ROLLBACK


class Barrier:
    """A producer's checker that needs no code: ``bus.producer("orders", checker=outbox.Barrier(engine))``.

    ``engines`` are those of the database in which transactions are bound (:func:`~escrowmq.outbox.bind_tx`): the
    *primary*. With several (shards), each transaction is bound in one: COMMIT if it is marked as committed in any,
    ROLLBACK if it can no longer be in any. ``branch`` as in ``bind_tx``. ``wait`` is the total time (s) that one batch
    may wait for transactions in flight; after that they are UNKNOWN, and the broker repeats the check.

    It uses a connection of the engine's pool for each statement. Thread-safe. Raises Misuse(BAD_ARGUMENT) for an engine
    with a single connection (SQLite in memory): the checker would read inside the transaction that it checks.
    """

    def __init__(self, *engines: sa.Engine, branch: str = "", wait: float = 0.5) -> None:
        if not engines:
            raise Misuse(Code.BAD_ARGUMENT, "a barrier needs an engine")
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < 1e6:
            raise Misuse(Code.BAD_ARGUMENT, f"wait = {wait!r}: a number of seconds")
        self._databases = [marks_of(need_engine(engine), need_branch(branch), float(wait)) for engine in engines]
        self._wait = float(wait)
        self._logged = Backoff(FIRST_REPEAT, LAST_REPEAT)

    def decide_ids(self, ids: pa.FixedSizeBinaryArray) -> Outcomes:
        """Decide transactions by their barrier rows; return one :class:`~escrowmq.model.Outcome` each, as uint8. A
        transaction without a row, and not in flight, gets the row ROLLED_BACK: it can commit no more.

        ``ids``: a column, or any argument of :meth:`Producer.end_batch`. COMMIT and ROLLBACK are final and durable.
        UNKNOWN: in flight, null, or the database is away or locked, with occasional lines in the log. Raises
        Misuse(NO_TABLES) without the tables.
        """
        column = id_column(ids)
        known = np.flatnonzero(np.asarray(column.is_valid()))
        outcomes = np.zeros(len(column), np.uint8)
        if len(known):
            distinct, where = np.unique(as_ids(column.take(pa.array(known))), return_inverse=True)
            deadline = time.monotonic() + self._wait
            parts = [self._decide(distinct[at : at + CHUNK], deadline) for at in range(0, len(distinct), CHUNK)]
            outcomes[known] = np.concatenate(parts)[where]
        return outcomes

    def decide(self, transaction_id: TransactionId | str | bytes) -> Outcome:
        """Return the outcome of one transaction, as :meth:`decide_ids`; may write ROLLED_BACK as it does."""
        return Outcome(int(self.decide_ids(pa.array([id_bytes(transaction_id)], pa.binary(16)))[0]))

    def __call__(self, check: Check) -> Outcome:
        """Return the outcome of the checked transaction, as :meth:`decide`."""
        return self.decide(check.transaction_id)

    def purge(
        self, older_than: float | timedelta, *, keep: object = (), retention: float = RETENTION, chunk: int = 10_000
    ) -> int:
        """Delete marks older than ``older_than`` seconds, about ``chunk`` rows per transaction. Returns how many.

        A mark must outlive the broker's checks, because without it the barrier answers ROLLBACK. So less than the
        broker's ``retention`` (seconds; pass yours if it is not the default) raises Misuse(BAD_ARGUMENT). A parked
        transaction can be older still, as the log drops whole segments only: pass the ids that are undecided at the
        broker as ``keep`` (``[t["id"] for t in bus.admin.transactions(state="parked")]``).
        """
        age = age_of(older_than)
        if age < retention:
            text = f"marks younger than the broker's retention ({retention:g} s) are still needed"
            hint = "without a mark the barrier answers ROLLBACK, even for a transaction that committed;"
            raise Misuse(
                Code.BAD_ARGUMENT, text, f"{hint} purge later, or pass the retention that your brokers really have"
            )
        if not isinstance(chunk, int) or chunk < 1:
            raise Misuse(Code.BAD_ARGUMENT, f"chunk = {chunk!r}: at least 1")
        kept = id_column([keep] if isinstance(keep, str | bytes | TransactionId) else keep).drop_null().to_pylist()
        mark = trans_barrier.c
        others = mark.transaction_id.not_in(kept)
        return sum(delete_older(each.engine, mark.decided_us, age, chunk, others) for each in self._databases)

    def _decide(self, ids: Ids, deadline: float) -> Outcomes:
        """Return the outcomes (uint8) of a chunk of sorted, distinct ids, as :meth:`decide_ids`; all UNKNOWN, with a
        line in the log, if a database is away. Ids blocked after ``deadline`` (monotonic seconds) are UNKNOWN."""
        try:
            outcomes = self._decide_within(ids, deadline)
        except AWAY as problem:
            if not self._logged.left():
                text = "%s: the barrier cannot read its database (%s); %d transactions stay undecided"
                _log.warning(text, Code.DISCONNECTED.name, in_a_line(problem), len(ids))
                self._logged.failed()
            return np.zeros(len(ids), np.uint8)
        if self._logged.worked():
            _log.info("the barrier can read its database again")
        return outcomes

    def _decide_within(self, ids: Ids, deadline: float) -> Outcomes:
        found = np.zeros(len(ids), np.uint8)
        for database in self._databases:
            found = np.maximum(found, database.read(ids) == COMMITTED)
        left = np.flatnonzero(found != COMMITTED)
        if len(left):
            found[left] = _combine([database.close(ids[left], deadline) for database in self._databases])
        return _OUTCOME[found]


def _barrier_of(barrier: AsyncBarrier) -> Barrier:
    return barrier._barrier


class AsyncBarrier:
    """A :class:`Barrier` over asynchronous engines, for a producer of :func:`escrowmq.aconnect`."""

    def __init__(self, *engines: AsyncEngine, branch: str = "", wait: float = 0.5) -> None:
        if wrong := [type(engine).__name__ for engine in engines if not isinstance(engine, AsyncEngine)]:
            hint = "a SQLAlchemy AsyncEngine; for an Engine outbox.Barrier, which serves asynchronous producers too"
            raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]} is not an asynchronous engine", hint)
        self._barrier = Barrier(*(engine.sync_engine for engine in engines), branch=branch, wait=wait)

    decide_ids = awaited(Barrier.decide_ids, _barrier_of)
    decide = awaited(Barrier.decide, _barrier_of)
    __call__ = awaited(Barrier.__call__, _barrier_of)
    purge = awaited(Barrier.purge, _barrier_of)


def _combine(found: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Return one reason per id from those in each database: COMMITTED in any, ROLLED_BACK in all, else 0 (unknown)."""
    marks = np.stack(found)
    rolled_back = np.where((marks == ROLLED_BACK).all(axis=0), ROLLED_BACK, 0)
    return np.where((marks == COMMITTED).any(axis=0), COMMITTED, rolled_back).astype(np.uint8)


def need_engine(engine: object) -> sa.Engine:
    """Return the engine. Raises Misuse(BAD_ARGUMENT) unless it is a SQLAlchemy engine whose pool can open a connection
    for the checker alone."""
    if not isinstance(engine, sa.Engine):
        hint = "a SQLAlchemy Engine; for an AsyncEngine outbox.AsyncBarrier"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not an engine", hint)
    if isinstance(engine.pool, StaticPool | SingletonThreadPool):
        text = "this engine has one connection only: a checker would read inside the transaction that it asks about"
        raise Misuse(Code.BAD_ARGUMENT, text, "use a database file instead of one in memory")
    return engine


def need_branch(branch: object) -> str:
    """Return the name of a branch. Raises Misuse(BAD_ARGUMENT) unless it is a text of at most 127 characters."""
    if not isinstance(branch, str) or len(branch) > 127:
        raise Misuse(Code.BAD_ARGUMENT, f"branch = {branch!r:.200}: a text of at most 127 characters")
    return branch
