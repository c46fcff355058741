"""Hooks: your code before and after each send, prepare, decision, stored outbox row, relay step, handled message, and
settlement.

A hook is a function from a :class:`Call` to a context manager, which is entered before the operation and left after
it. What the operation raises is raised inside the context manager::

    @contextmanager
    def log(call: hooks.Call) -> Iterator[None]:
        begun = time.monotonic()
        yield
        print(call.operation, call.topic, call.count, time.monotonic() - begun)

    remove = hooks.add(log)

Hooks are of the whole process: blocking and asyncio clients, outbox and relay. They run in the caller's thread or task,
in the order in which they were added, and must not block. What a hook raises before the operation prevents it and is
raised to the caller. A process without hooks pays one test of a global variable per operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Hook", "add"]


@dataclass(slots=True)
class Call:
    """One operation. Fields that it does not have are None or empty."""

    operation: str
    """``send``, ``prepare``, ``end`` (commit or roll back), ``store`` (outbox rows), ``relay``, ``handle``, or
    ``settle`` (acknowledge, return or reject received messages; in the background unless the caller waits for it)."""
    topic: str | None = None
    """None for an end, and for messages of several topics."""
    count: int = 1
    """Messages (of an end: 1)."""
    messages: Sequence[Any] = ()
    """What is sent (:class:`~escrowmq.Message`), stored (rows of the outbox) or handled (received messages, or a
    received batch); empty for columns that are sent or relayed."""
    columns: Any = None
    """The Arrow batch of what is sent, relayed, settled, or handled as a batch of columns."""
    properties: list[Mapping[str, str] | None] | None = None
    """The properties of each of ``messages`` to send or store: a hook may replace entries before the operation."""
    max_properties_bytes: int = 0
    """The limit for names and values of one message's properties."""
    transaction_id: Any = None
    outcome: Any = None
    """The decision of an ``end``, the :class:`~escrowmq.model.Act` of a ``settle``."""
    result: Any = None
    """Set when the operation has succeeded: a receipt, receipts, or codes."""


Hook = Callable[[Call], AbstractContextManager[Any]]

installed: tuple[Hook, ...] = ()
"""The hooks of this process. Read it, and change it by :func:`add`."""
_lock = threading.Lock()


def add(hook: Hook) -> Callable[[], None]:
    """Call ``hook`` around every operation from now on. Returns a function that removes it (harmless if repeated)."""
    global installed
    entry: Hook = lambda call: hook(call)  # noqa: E731  # an object of its own: one hook may be added twice
    with _lock:
        installed = (*installed, entry)

    def remove() -> None:
        global installed
        with _lock:
            installed = tuple(one for one in installed if one is not entry)

    return remove


@contextmanager
def around(call: Call) -> Iterator[Call]:
    """Run the installed hooks around the block."""
    with ExitStack() as stack:
        for hook in installed:
            stack.enter_context(hook(call))
        yield call
