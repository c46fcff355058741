"""The interface between clients and brokers: a :class:`Link` is one broker, over any transport.

Four shapes:

- *exchanges* carry batches both ways, pipelined, answered row for row; the answer's rows match the request's;
- *parcels* are exchanges of a few rows, which stay rows;
- *actions* are small questions and admin acts, JSON both ways (:mod:`escrowmq.wire.actions`);
- *reads* stream batches out: browsing topics and the system views.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, cast, runtime_checkable

import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.wire.actions.action import Answer, Call
from escrowmq.wire.exchanges import Exchange, ExchangeOptions, ReadRequest
from escrowmq.wire.packing import Json
from escrowmq.wire.parcels import Done, Parcel


class CheckStream(Protocol):
    """A live check-back subscription; closing it takes the member off the list of those to ask."""

    def close(self) -> None: ...

    @property
    def broken(self) -> bool:
        """Whether the carrier lost it (the client should open another)."""
        ...

    @property
    def problem(self) -> EscrowError | None:
        """Why, if it is known."""
        ...


class Link(Protocol):
    """One broker, as a client sees it. Thread-safe. All errors are EscrowError."""

    @property
    def address(self) -> str: ...

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``, or raises EscrowError.

        Requests of one kind on one link keep their order. Unknown(DISCONNECTED) if the carrier broke after the request
        may have left; the link then reconnects by itself, with back-off, when it is used again.
        """
        ...

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """Start a request of a few rows, answered as :meth:`exchange` would answer the same batch
        (:mod:`escrowmq.wire.parcels`).

        ``done`` is called once, on any thread. Parcels and exchanges of one kind on one link keep their order.
        """
        ...

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """One JSON question; raises EscrowError, Unknown(TIMED_OUT) after ``timeout`` seconds. :func:`ask` has the
        types."""
        ...

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Browse a topic, a system view or dead letters. Columns that are not asked for are not read.

        Rejected(RANGE_PURGED) if a range has partly left the log, at once or in the middle of the stream.
        """
        ...

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """Be a member to ask: ``on_checks`` gets batches of schema CHECKS, on a thread of the link, until closed.

        Answers go back through ``exchange(Exchange.END, ..., {"session": s, "by": DecidedBy.CHECK})``.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class LoopLink(Protocol):
    """A link that an event loop can drive itself."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to this loop from now on; called once, before the first request. Then ``parcel`` and ``exchange``
        never block, and what they are answered comes on the loop where that is possible."""
        ...


@runtime_checkable
class ReturningLink(Protocol):
    """A link whose connection may be lost."""

    @property
    def there(self) -> bool:
        """Whether it has a connection, as far as is known."""
        ...

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        """Look for a connection, and call ``call`` once, on a thread that others need, when there is one (at once if
        there is), or when the link is closed. Returns what takes that back."""
        ...


def ask(link: Link, call: Call[Answer], timeout: float) -> Answer:
    """Return the answer of one action, typed: ``ask(link, topics.LIST({}), 5.0)``. Raises as :meth:`Link.action`."""
    return cast(Answer, link.action(call.name, call.request, timeout))
