"""The same to await: binding through asynchronous sessions, and a checker over asynchronous engines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.util import greenlet_spawn

from escrowmq.errors import Code, Misuse
from escrowmq.model import Check, Outcome, TransactionId
from escrowmq.outbox.barrier import binding
from escrowmq.outbox.barrier.checking import Barrier, Outcomes

AnyAsyncSession = AsyncSession | async_scoped_session[Any] | AsyncConnection
"""What these calls take: the ORM's asynchronous session (scoped or not) or Core's asynchronous connection."""


async def bind_tx(session: AnyAsyncSession, txn: binding.AnyTransaction, *, branch: str = "") -> None:
    """As :func:`escrowmq.outbox.bind_tx`."""
    await _inside(session).run_sync(lambda inner: binding.bind_tx(inner, txn, branch=branch))


async def bind_batch_tx(session: AnyAsyncSession, transaction_ids: Any, *, branch: str = "") -> None:
    """As :func:`escrowmq.outbox.bind_batch_tx`."""
    await _inside(session).run_sync(lambda inner: binding.bind_batch_tx(inner, transaction_ids, branch=branch))


class AsyncBarrier:
    """As :class:`~escrowmq.outbox.Barrier`, over asynchronous engines, for a producer of :func:`escrowmq.aconnect`."""

    def __init__(self, *engines: AsyncEngine, branch: str = "", wait: float = 0.5) -> None:
        if wrong := [type(engine).__name__ for engine in engines if not isinstance(engine, AsyncEngine)]:
            hint = "a SQLAlchemy AsyncEngine; for an Engine outbox.Barrier, which serves asynchronous producers too"
            raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]} is not an asynchronous engine", hint)
        self._barrier = Barrier(*(engine.sync_engine for engine in engines), branch=branch, wait=wait)

    async def decide_ids(self, ids: pa.FixedSizeBinaryArray) -> Outcomes:
        """As :meth:`Barrier.decide_ids`."""
        return await greenlet_spawn(self._barrier.decide_ids, ids)

    async def decide(self, transaction_id: TransactionId | str | bytes) -> Outcome:
        """As :meth:`Barrier.decide`."""
        return await greenlet_spawn(self._barrier.decide, transaction_id)

    async def __call__(self, check: Check) -> Outcome:
        """A barrier is a checker of single questions too."""
        return await self.decide(check.transaction_id)

    async def purge(self, older_than: float | timedelta, **options: Any) -> int:
        """As :meth:`Barrier.purge`."""
        return await greenlet_spawn(self._barrier.purge, older_than, **options)


def _inside(session: Any) -> Any:
    if isinstance(session, AsyncSession | AsyncConnection):
        return session
    if isinstance(session, async_scoped_session):
        return session()
    hint = "an AsyncSession, an async_scoped_session or an AsyncConnection"
    raise Misuse(Code.BAD_ARGUMENT, f"{type(session).__name__} is not an asynchronous session", hint)
