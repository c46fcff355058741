"""Writes the barrier row of a message transaction inside the local database transaction."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import scoped_session
from sqlalchemy.util import greenlet_spawn

from escrowmq.client.producing.transaction import AsyncTransaction, Transaction
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.ids import id_bytes, id_column
from escrowmq.model import Outcome, TransactionId
from escrowmq.outbox.barrier import columns
from escrowmq.outbox.barrier.checking import Barrier, need_branch
from escrowmq.outbox.barrier.columns import CHUNK, COMMITTED, ROLLED_BACK, Ids, as_ids
from escrowmq.outbox.barrier.marks import MARKED, lock_keys, marks_of
from escrowmq.outbox.dialects import is_duplicate
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import trans_barrier
from escrowmq.platform import failpoints

AnyTransaction = Transaction | AsyncTransaction | TransactionId | str


def bind_tx(session: AnySession, txn: AnyTransaction, *, branch: str = "") -> None:
    """Inside your transaction: let ``txn`` stand and fall with it.

    ``txn`` is the transaction after its first ``send``, or its id; ``branch`` (at most 127 characters) tells apart
    several local transactions about one id in one database. A transaction object is bound for good: however its block
    is left, it then ends as the database says (:meth:`Transaction.settle_by`), and an exception is no rollback if the
    database had committed.

    Raises Fenced(LATE_COMMIT) if the check-back has already answered that it rolled back: then this database
    transaction (or its innermost savepoint) can commit no more. PostgreSQL itself refuses it; elsewhere it is rolled
    back here. Let the exception pass, and do the work again in a new transaction. Rejected(ALREADY_EXISTS) if a
    transaction that committed was bound to this id. Misuse(NO_TRANSACTION) if the session cannot hold anything
    (AUTOCOMMIT, failed), Misuse(BAD_ARGUMENT) if ``txn`` has no messages yet, Misuse(NO_TABLES),
    Misuse(SCHEMA_VERSION).
    """
    identity = _identity(txn)
    need_branch(branch)
    with transaction_of(session, trans_barrier) as connection:
        if isinstance(txn, Transaction | AsyncTransaction):
            _settle(txn, connection, branch)
        _insert(session, connection, as_ids(pa.array([identity], pa.binary(16))), branch)
    failpoints.reach("barrier.bound")


def bind_batch_tx(session: AnySession, transaction_ids: Any, *, branch: str = "") -> None:
    """As :func:`bind_tx`, for many ids at once: an Arrow column (``receipts.transactions``; nulls are passed over), or
    an iterable of ids. All are bound, or the transaction can commit no more."""
    need_branch(branch)
    ids = np.unique(as_ids(id_column(transaction_ids).drop_null()))
    with transaction_of(session, trans_barrier) as connection:
        for start in range(0, len(ids), CHUNK):
            _insert(session, connection, ids[start : start + CHUNK], branch)
    failpoints.reach("barrier.bound")


def _identity(txn: Any) -> bytes:
    if not isinstance(txn, Transaction | AsyncTransaction):
        return id_bytes(txn)
    if txn.id is None:
        hint = "send its first message before you bind it: the id comes from the broker"
        raise Misuse(Code.BAD_ARGUMENT, "the transaction has no messages yet, so it has no id", hint)
    return bytes(txn.id)


def _settle(txn: Transaction | AsyncTransaction, connection: sa.Connection, branch: str) -> None:
    """From now on ``txn`` asks this database before it ends."""
    barrier = Barrier(_engine(connection), branch=branch)
    waits = connection.dialect.is_async
    if isinstance(txn, Transaction):
        if waits:
            hint = "take the producer of mq.aconnect, or bind its id: bind_tx(session, txn.id)"
            raise Misuse(Code.BAD_ARGUMENT, "a blocking transaction cannot await the answer of this database", hint)
        txn.settle_by(barrier.decide)
        return

    async def ask(transaction_id: TransactionId) -> Outcome:
        if waits:
            return await greenlet_spawn(barrier.decide, transaction_id)
        return await asyncio.to_thread(barrier.decide, transaction_id)

    txn.settle_by(ask)


def _engine(connection: sa.Connection) -> sa.Engine:
    """Return the connection's engine, seeing the same tables."""
    names = connection.get_execution_options().get("schema_translate_map")
    return connection.engine.execution_options(schema_translate_map=names) if names else connection.engine


def _insert(session: AnySession, connection: sa.Connection, ids: Ids, branch: str) -> None:
    dialect = connection.dialect.name
    try:
        if dialect == "postgresql" and len(ids) <= MARKED:
            # seen by the checker, which then does not wait for this transaction
            locks = sa.text("SELECT count(pg_advisory_xact_lock(key)) FROM unnest(CAST(:keys AS bigint[])) AS key")
            connection.execute(locks, {"keys": lock_keys(ids, branch).tolist()})
        columns.insert(connection, ids, branch, COMMITTED, strict=True)
    except DBAPIError as problem:
        refusal = _refusal(connection, ids, branch) if is_duplicate(problem) else None
        _end(session, dialect)
        if refusal is None:
            raise
        raise refusal from problem


def _refusal(connection: sa.Connection, ids: Ids, branch: str) -> EscrowError:
    """Return why there is a row already; on another connection, as this one may be dead or see old rows."""
    try:
        found = marks_of(_engine(connection), branch, 1.0).read(ids)
    except SQLAlchemyError:
        return error(Code.LATE_COMMIT)  # the likeliest; the caller's way out is the same
    if (found == ROLLED_BACK).any():
        return error(Code.LATE_COMMIT)
    if (found == COMMITTED).any():
        return Rejected(
            Code.ALREADY_EXISTS,
            "a database transaction that committed was bound to this id",
            "the work is done: roll this one back, and commit the messages",
        )
    return Misuse(
        Code.BAD_ARGUMENT, "this database transaction is bound to this id already", "bind once, or name a branch"
    )


def _end(session: AnySession, dialect: str) -> None:
    """Make sure that what failed cannot commit, also where the exception is swallowed: the innermost savepoint, else
    the whole transaction. PostgreSQL has done so itself, and refuses all that follows."""
    if dialect == "postgresql":
        return
    holder: Any = session() if isinstance(session, scoped_session) else session
    for transaction in (holder.get_nested_transaction(), holder.get_transaction()):
        if transaction is not None:
            with suppress(DBAPIError):  # the database rolled back on its own: after a deadlock no savepoint is left
                transaction.rollback()
                return
