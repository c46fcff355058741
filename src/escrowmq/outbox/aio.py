"""The same names to await, for AsyncSession, async_scoped_session, AsyncConnection and AsyncEngine.

Thin: SQLAlchemy runs the blocking face over an asynchronous driver (psycopg, asyncpg, aiosqlite, aiomysql); nothing here blocks the loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import pyarrow as pa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.util import greenlet_spawn

from escrowmq.errors import Code, Misuse
from escrowmq.model import Message
from escrowmq.outbox import attention, callbacks, inbox, migrations, sending
from escrowmq.outbox.barrier.aio import bind_batch_tx as bind_batch_tx
from escrowmq.outbox.barrier.aio import bind_tx as bind_tx
from escrowmq.outbox.tables import State
from escrowmq.settings import BrokerSettings

AnyAsyncSession = AsyncSession | async_scoped_session[Any] | AsyncConnection
T = TypeVar("T")


async def send_tx(
    session: AnyAsyncSession,
    topic: str | Message,
    body: bytes | None = None,
    *,
    key: str | None = None,
    tag: str | None = None,
    properties: Mapping[str, str] | None = None,
    delay: float = 0.0,
    message_id: str | bytes | uuid.UUID | None = None,
    limits: BrokerSettings | None = None,
) -> bytes:
    """As :func:`escrowmq.outbox.send_tx`."""
    given: dict[str, Any] = {"key": key, "tag": tag, "properties": properties, "delay": delay}
    given |= {"message_id": message_id, "limits": limits}
    return await _inside(session, lambda sync: sending.send_tx(sync, topic, body, **given))


async def send_batch_tx(
    session: AnyAsyncSession,
    messages: Iterable[Message] | pa.RecordBatch | pa.Table,
    *,
    limits: BrokerSettings | None = None,
) -> list[bytes]:
    """As :func:`escrowmq.outbox.send_batch_tx`."""
    return await _inside(session, lambda sync: sending.send_batch_tx(sync, messages, limits=limits))


async def claim_tx(
    session: AnyAsyncSession,
    message: Any = None,
    *,
    group: str,
    message_id: str | bytes | uuid.UUID | None = None,
) -> bool:
    """As :func:`escrowmq.outbox.claim_tx`."""
    return await _inside(session, lambda sync: inbox.claim_tx(sync, message, group=group, message_id=message_id))


async def claim_batch_tx(session: AnyAsyncSession, messages: Iterable[Any], group: str) -> list[bool]:
    """As :func:`escrowmq.outbox.claim_batch_tx`."""
    return await _inside(session, lambda sync: inbox.claim_batch_tx(sync, messages, group))


async def confirm_tx(session: AnyAsyncSession, message: Any, to: str = callbacks.DEFAULT_TOPIC) -> None:
    """As :func:`escrowmq.outbox.confirm_tx`."""
    await _inside(session, lambda sync: callbacks.confirm_tx(sync, message, to))


async def confirm_batch_tx(
    session: AnyAsyncSession, messages: Iterable[Any], to: str = callbacks.DEFAULT_TOPIC
) -> None:
    """As :func:`escrowmq.outbox.confirm_batch_tx`."""
    await _inside(session, lambda sync: callbacks.confirm_batch_tx(sync, messages, to))


# With an engine, in transactions of their own


async def migrate(engine: AsyncEngine | AsyncConnection) -> int:
    """As :func:`escrowmq.outbox.migrate`."""
    if isinstance(engine, AsyncConnection):
        return await engine.run_sync(migrations.migrate)
    return await _with(engine, migrations.migrate)


async def check_schema(connection: AsyncConnection) -> None:
    """As :func:`escrowmq.outbox.check_schema`."""
    await connection.run_sync(migrations.check_schema)


async def mark_done(engine: AsyncEngine, ids: Iterable[Any]) -> int:
    """As :func:`escrowmq.outbox.mark_done`."""
    return await _with(engine, callbacks.mark_done, ids)


async def purge_seen(engine: AsyncEngine, older_than: float | timedelta, *, group: str | None = None) -> int:
    """As :func:`escrowmq.outbox.inbox.purge_seen`."""
    return await _with(engine, inbox.purge_seen, older_than, group=group)


async def list_messages(
    engine: AsyncEngine, *, state: State | None = State.WAITING, limit: int = 100, after: int = 0
) -> list[attention.Row]:
    """As :func:`escrowmq.outbox.attention.list_messages`."""
    return await _with(engine, attention.list_messages, state=state, limit=limit, after=after)


async def show(engine: AsyncEngine, message_id: str | bytes) -> attention.Row:
    """As :func:`escrowmq.outbox.attention.show`."""
    return await _with(engine, attention.show, message_id)


async def retry(engine: AsyncEngine, ids: Iterable[str | bytes], *, by: str | None = None) -> list[attention.Done]:
    """As :func:`escrowmq.outbox.attention.retry`."""
    return await _with(engine, attention.retry, ids, by=by)


async def discard(engine: AsyncEngine, ids: Iterable[str | bytes], *, by: str | None = None) -> list[attention.Done]:
    """As :func:`escrowmq.outbox.attention.discard`."""
    return await _with(engine, attention.discard, ids, by=by)


async def _inside(session: AnyAsyncSession, act: Callable[[Any], T]) -> T:
    """Run a blocking ``_tx`` call inside the session's transaction."""
    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession | AsyncConnection):
        hint = "an AsyncSession, async_scoped_session or AsyncConnection; blocking ones are in escrowmq.outbox"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(session).__name__} is not an asynchronous session", hint)
    if isinstance(session, AsyncConnection) and session.sync_connection is None:
        raise Misuse(Code.NO_TRANSACTION, "the connection was not started", "async with engine.connect() as connection")
    return await session.run_sync(act)


async def _with(engine: AsyncEngine, act: Callable[..., T], *args: Any, **given: Any) -> T:
    """Run a blocking call that makes its own transactions from an engine."""
    if not isinstance(engine, AsyncEngine):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not an AsyncEngine")
    result: T = await greenlet_spawn(act, engine.sync_engine, *args, **given)
    return result
