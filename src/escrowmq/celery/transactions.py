"""``atomic``: tasks that are sent if and only if the database transaction commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.signals import after_task_publish

from escrowmq.celery.transport import store
from escrowmq.errors import Code, Misuse
from escrowmq.model import Message
from escrowmq.outbox.sending import send_tx
from escrowmq.outbox.session import AnySession

_published: ContextVar[list[str] | None] = ContextVar("published", default=None)


@contextmanager
def atomic(session: AnySession) -> Iterator[None]:
    """Context manager: within it, ``delay`` and ``apply_async`` of any task write to the outbox, in the transaction of
    ``session`` (a Session, scoped_session or Connection). The relay sends these tasks if that transaction commits.

    It neither begins nor commits the transaction. It applies to this thread or asyncio task, and not to threads that
    are started within it. With an AsyncSession, use it in a function that its ``run_sync`` calls. The broker may be
    away. The tables are those of :func:`escrowmq.outbox.migrate`.

    ``delay`` raises what :func:`escrowmq.outbox.send_tx` raises. The end of the block raises Misuse(BAD_ARGUMENT) if a
    task was sent at once because the application has another broker than EscrowMQ.
    """
    with storing(lambda message: send_tx(session, message)):
        yield


@contextmanager
def storing(write: Callable[[Message], object]) -> Iterator[None]:
    """Context manager: tasks that are sent within it are passed to ``write``. Errors as of :func:`atomic`."""
    stored, published = 0, list[str]()

    def put(message: Message) -> None:
        nonlocal stored
        write(message)
        stored += 1

    tokens = store.set(put), _published.set(published)
    try:
        yield
    finally:
        store.reset(tokens[0])
        _published.reset(tokens[1])
    if len(published) > stored:
        text = f"{published[-1]} was sent at once, not with the transaction: its application has another broker"
        raise Misuse(Code.BAD_ARGUMENT, text, "set broker_url to escrow://HOST:PORT")


@after_task_publish.connect(weak=False)
def _on_publish(sender: Any = None, **_: Any) -> None:
    if (published := _published.get()) is not None:
        published.append(str(sender))
