"""Converts a blocking outbox function to a coroutine function, run by SQLAlchemy over an asynchronous driver.

``awaited(sending.send_tx, session_of)`` is the awaitable ``send_tx``: the same arguments and documentation, except that
the first argument is asynchronous. Nothing blocks the event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.util import greenlet_spawn

from escrowmq.errors import Code, Misuse

AnyAsyncSession = AsyncSession | async_scoped_session[Any] | AsyncConnection
"""The argument of ``_tx`` calls: the ORM's asynchronous session (scoped or not) or Core's asynchronous connection."""

First = TypeVar("First")
P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    act: Callable[Concatenate[Any, P], T], blocking: Callable[[First], Any]
) -> Callable[Concatenate[First, P], Coroutine[Any, Any, T]]:
    """Return ``act`` as a coroutine function, run by SQLAlchemy without blocking the event loop. ``blocking`` converts
    its first argument from the asynchronous one."""
    signature = inspect.signature(act)
    own, *others = signature.parameters.values()
    (converted,) = inspect.signature(blocking).parameters.values()

    @wraps(act)
    async def awaiting(*args: Any, **options: Any) -> T:
        first, *rest = args or (options.pop(own.name),)
        result: T = await greenlet_spawn(act, blocking(first), *rest, **options)
        return result

    parameters = [own.replace(annotation=converted.annotation), *others]
    awaiting.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return awaiting


def session_of(session: AnyAsyncSession) -> Any:
    """Return the blocking session or connection inside an asynchronous one. Raises Misuse: BAD_ARGUMENT for another
    type, NO_TRANSACTION for a connection that was not started."""
    if isinstance(session, async_scoped_session):
        session = session()
    if isinstance(session, AsyncSession):
        return session.sync_session
    if not isinstance(session, AsyncConnection):
        hint = "an AsyncSession, async_scoped_session or AsyncConnection; blocking ones are in escrowmq.outbox"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(session).__name__} is not an asynchronous session", hint)
    if session.sync_connection is None:
        raise Misuse(Code.NO_TRANSACTION, "the connection was not started", "async with engine.connect() as connection")
    return session.sync_connection


def engine_of(engine: AsyncEngine) -> Any:
    """Return the blocking engine inside an asynchronous one. Raises Misuse(BAD_ARGUMENT) for another type."""
    if not isinstance(engine, AsyncEngine):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not an AsyncEngine")
    return engine.sync_engine


def engine_or_connection_of(engine: AsyncEngine | AsyncConnection) -> Any:
    """Return the blocking engine or connection inside an asynchronous one. Raises Misuse(BAD_ARGUMENT) for another
    type, Misuse(NO_TRANSACTION) for a connection that was not started."""
    return session_of(engine) if isinstance(engine, AsyncConnection) else engine_of(engine)
