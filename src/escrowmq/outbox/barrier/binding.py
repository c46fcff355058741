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
    """Bind ``txn`` to your database transaction: both commit, or neither.

    ``txn`` is the transaction after its first ``send``, or its id; ``branch`` (at most 127 characters) distinguishes
    several local transactions of one id in one database. A transaction object stays bound: however its block is left,
    it ends as the database decided (:meth:`Transaction.settle_by`), and an exception is no rollback if the database had
    committed.

    Raises Fenced(LATE_COMMIT) if the check-back has already answered ROLLBACK: then this database transaction (or its
    innermost savepoint) can commit no more. PostgreSQL itself refuses it; elsewhere it is rolled back here. Let the
    exception pass, and repeat the work in a new transaction. Rejected(ALREADY_EXISTS) if a committed transaction was
    bound to this id. Misuse(NO_TRANSACTION) if the session cannot hold a row (AUTOCOMMIT, failed), Misuse(BAD_ARGUMENT)
    if ``txn`` has no messages yet, Misuse(NO_TABLES | SCHEMA_VERSION).
    """
    given = txn.id if isinstance(txn, Transaction | AsyncTransaction) else txn
    if given is None:
        hint = "send its first message before you bind it: the id comes from the broker"
        raise Misuse(Code.BAD_ARGUMENT, "the transaction has no messages yet, so it has no id", hint)
    ids = as_ids(pa.array([id_bytes(given)], pa.binary(16)))
    need_branch(branch)
    with transaction_of(session, trans_barrier) as connection:
        if isinstance(txn, Transaction | AsyncTransaction):
            _settle(txn, connection, branch)
        _insert(session, connection, ids, branch)
    failpoints.reach("barrier.bound")


def bind_batch_tx(session: AnySession, transaction_ids: Any, *, branch: str = "") -> None:
    """Bind many ids as :func:`bind_tx` does: an Arrow column (``receipts.transactions``; nulls are skipped), or an
    iterable of ids. All are bound, or the transaction can commit no more."""
    need_branch(branch)
    ids = np.unique(as_ids(id_column(transaction_ids).drop_null()))
    with transaction_of(session, trans_barrier) as connection:
        for start in range(0, len(ids), CHUNK):
            _insert(session, connection, ids[start : start + CHUNK], branch)
    failpoints.reach("barrier.bound")


def _settle(txn: Transaction | AsyncTransaction, connection: sa.Connection, branch: str) -> None:
    """Make the outcome of message transaction ``txn`` the one that the barrier reads from this database after the
    block."""
    barrier = Barrier(_engine(connection), branch=branch)
    is_async = connection.dialect.is_async
    if isinstance(txn, Transaction):
        if is_async:
            hint = "take the producer of mq.aconnect, or bind its id: bind_tx(session, txn.id)"
            raise Misuse(Code.BAD_ARGUMENT, "a blocking transaction cannot await the answer of this database", hint)
        txn.settle_by(barrier.decide)
        return

    async def decide(transaction_id: TransactionId) -> Outcome:
        return await (greenlet_spawn if is_async else asyncio.to_thread)(barrier.decide, transaction_id)

    txn.settle_by(decide)


def _engine(connection: sa.Connection) -> sa.Engine:
    """Return the connection's engine, with the connection's translation of schemas, so that it sees the same tables."""
    names = connection.get_execution_options().get("schema_translate_map")
    return connection.engine.execution_options(schema_translate_map=names) if names else connection.engine


def _insert(session: AnySession, connection: sa.Connection, ids: Ids, branch: str) -> None:
    dialect = connection.dialect.name
    try:
        if dialect == "postgresql" and len(ids) <= MARKED:
            # visible to the checker, which then does not wait for this transaction
            locks = sa.text("SELECT count(pg_advisory_xact_lock(key)) FROM unnest(CAST(:keys AS bigint[])) AS key")
            connection.execute(locks, {"keys": lock_keys(ids, branch).tolist()})
        columns.insert(connection, ids, branch, COMMITTED, strict=True)
    except DBAPIError as problem:
        refusal = _refusal(connection, ids, branch) if is_duplicate(problem) else None
        _roll_back(session, dialect)
        if refusal is None:
            raise
        raise refusal from problem


def _refusal(connection: sa.Connection, ids: Ids, branch: str) -> EscrowError:
    """Return the error to raise because one of these ids has a barrier row already: LATE_COMMIT, ALREADY_EXISTS, or
    BAD_ARGUMENT if this transaction wrote it. Reads on another connection, because this one may have failed or see old
    rows."""
    try:
        found = marks_of(_engine(connection), branch, 1.0).read(ids)
    except SQLAlchemyError:
        return error(Code.LATE_COMMIT)  # the likeliest; the caller has to do the same
    if (found == ROLLED_BACK).any():
        return error(Code.LATE_COMMIT)
    if (found == COMMITTED).any():
        hint = "the work is done: roll this one back, and commit the messages"
        return Rejected(Code.ALREADY_EXISTS, "a database transaction that committed was bound to this id", hint)
    text = "this database transaction is bound to this id already"
    return Misuse(Code.BAD_ARGUMENT, text, "bind once, or name a branch")


def _roll_back(session: AnySession, dialect: str) -> None:
    """Roll back the innermost savepoint, else the whole transaction, which must not commit even if the exception is
    caught. PostgreSQL refuses all further statements itself."""
    if dialect == "postgresql":
        return
    holder: Any = session() if isinstance(session, scoped_session) else session
    for transaction in (holder.get_nested_transaction(), holder.get_transaction()):
        if transaction is not None:
            with suppress(DBAPIError):  # after a deadlock the database has rolled everything back
                transaction.rollback()
                return
