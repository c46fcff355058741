"""The interface between clients and brokers: a :class:`Link` is one broker, over any transport.

It has four kinds of calls:

- *exchanges* carry batches in both directions, pipelined; the answer's rows match the request's;
- *parcels* are exchanges of a few rows, which stay rows;
- *actions* are small queries and operations with JSON in both directions (:mod:`escrowmq.wire.actions`);
- *reads* stream batches to the client: topics and system views.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast, runtime_checkable

import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.wire.actions.action import Answer, Call
from escrowmq.wire.batches import BatchStream
from escrowmq.wire.exchanges import Exchange, ExchangeOptions, ReadRequest
from escrowmq.wire.packing import Json
from escrowmq.wire.parcels import Done, Parcel


class CheckStream(Protocol):
    """A live check-back subscription; closing it removes the member from check-backs."""

    def close(self) -> None: ...

    @property
    def broken(self) -> bool:
        """Return whether the connection was lost; the client should open another subscription."""
        ...

    @property
    def problem(self) -> EscrowError | None:
        """The cause, if known."""
        ...


class Link(Protocol):
    """Client interface of one broker. Thread-safe. All errors are EscrowError."""

    @property
    def address(self) -> str: ...

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``, or raises EscrowError.

        Requests of one kind on one link keep their order. Unknown(DISCONNECTED) if the connection broke after the
        request may have been sent; the link then reconnects with back-off on its next use.
        """
        ...

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """Start a request of a few rows; the answer equals that of :meth:`exchange` (:mod:`escrowmq.wire.parcels`).

        ``done`` is called once, on any thread. Parcels and exchanges of one kind on one link keep their order.
        """
        ...

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """Send one JSON query. Raises EscrowError, Unknown(TIMED_OUT) after ``timeout`` seconds. :func:`ask` adds
        types."""
        ...

    def read(self, request: ReadRequest) -> BatchStream:
        """Read a topic, a system view or dead letters; columns that are not requested are not read.

        Rejected(RANGE_PURGED) if retention removed part of a range, at once or in the middle of the stream.
        """
        ...

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """Subscribe to check-backs, and return when the broker sends them: ``on_checks`` gets batches of schema CHECKS,
        on a thread of the link, until closed. Raises EscrowError if the broker refuses.

        Answers are sent by ``exchange(Exchange.END, ..., {"session": s, "by": DecidedBy.CHECK})``."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class LoopLink(Protocol):
    """Additional interface of a link that an event loop can drive."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the link to this loop; called once, before the first request. Then ``parcel`` and ``exchange`` never
        block, and answers arrive on the loop where possible."""
        ...


class Phase(StrEnum):
    """The state of a link's connection."""

    AWAY = "away"
    """There is no connection."""
    PROBING = "probing"
    """The link is trying to connect."""
    UP = "up"
    """There is a connection."""
    DRAINING = "draining"
    """The connection accepts no new requests; those in flight are still answered."""


@dataclass(slots=True)
class BrokerState:
    """The state of a link's broker, which everything above the link reads: its phase, the start of it, the reason if it
    is not UP, and the time of the next probe (monotonic seconds). Only the link writes it. ``several``: its shard has
    several known brokers."""

    phase: Phase = Phase.AWAY
    since: float = 0.0
    reason: str = ""
    next_probe: float = 0.0
    several: bool = False

    @property
    def is_there(self) -> bool:
        """Return whether there is a connection, as far as is known."""
        return self.phase in (Phase.UP, Phase.DRAINING)

    def enter(self, phase: Phase, now: float, reason: str = "") -> None:
        """Change the phase."""
        if phase is not self.phase:
            self.phase, self.since = phase, now
        self.reason = reason


@runtime_checkable
class ReturningLink(Protocol):
    """Additional interface of a link that may lose its connection."""

    state: BrokerState

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call ``call`` once when the link is connected or closed, at once if it is now; starts connecting if needed.
        The call is on the I/O thread: it must not block. Returns a function that cancels it."""
        ...


_ALWAYS_UP = BrokerState(Phase.UP)


def state_of(link: Link) -> BrokerState:
    """Return the state of a link's broker; of one without a connection, which is a broker in this process: UP."""
    return link.state if isinstance(link, ReturningLink) else _ALWAYS_UP


def ask(link: Link, call: Call[Answer], timeout: float) -> Answer:
    """Send one action, with types: ``ask(link, topics.LIST({}), 5.0)``. Raises as :meth:`Link.action`."""
    return cast(Answer, link.action(call.name, call.request, timeout))
