"""The writer's request types, and how waiting requests are sorted and merged into commands for one round.

Requests that wait at the same moment are concurrent: any order of them is one that their callers may see. Only those of
one kind keep theirs, because a client pipelines within a kind. So a round runs control first, then half messages, plain
messages, decisions and acknowledgements, each kind in its order of arrival, and merges what it can; receives come last
and see all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import EscrowError
from escrowmq.ledger.commands import Command, End, Prepare, Receive, Send, Settle

MERGE_BYTES = 1 << 20
MERGE_ROWS = 32_768
SMALLEST_REQUEST = 256
"""Bytes that any waiting request counts for at least."""

_ORDER: dict[type, int] = {Prepare: 1, Send: 2, End: 3, Settle: 4}


@dataclass(slots=True, eq=False)
class Request:
    """One waiting command and where its answer goes. ``early``: answered before it is durable (``flush="async"``)."""

    command: Command
    future: Future[Any] = field(default_factory=Future)
    early: bool = False
    size: int = field(init=False)
    """Bytes that it holds while it waits; counted once, because Arrow walks every buffer for it."""

    def __post_init__(self) -> None:
        batch = getattr(self.command, "batch", None)
        self.size = SMALLEST_REQUEST if batch is None else SMALLEST_REQUEST + int(batch.nbytes)

    def answer(self, value: Any) -> None:
        """Give the caller its answer, or an error if ``value`` is one; a caller who is gone is no problem."""
        try:
            if isinstance(value, EscrowError):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)
        except InvalidStateError:
            pass  # cancelled: the caller is gone


@dataclass(slots=True, eq=False)
class Look(Request):
    """A question about the state: ``look`` runs on the writer, its answer waits for the round's sync like all others."""

    command: Any = None
    look: Callable[[], Any] = field(kw_only=True)


@dataclass(slots=True, eq=False)
class WaitingLook(Look):
    """A look that waits for an answer other than None, ``wait_us`` at most; run again when messages became visible."""

    wait_us: int = 0
    until_us: int = 0
    """By broker time; set by the round that takes it."""


@dataclass(slots=True, eq=False)
class WaitingReceive(Request):
    """A receive that may wait until there is something, ``wait_us`` have passed or the caller is gone."""

    wait_us: int = 0
    until_us: int = 0
    """By broker time; set by the round that takes it."""

    @property
    def group(self) -> str:
        """The consumer group that waits."""
        assert isinstance(self.command, Receive)  # Engine.receive is the only maker
        return self.command.group


@dataclass(slots=True)
class Work:
    """One command for the ledger and the requests that it answers, row ranges in order."""

    command: Command
    requests: list[Request]

    def answers(self, answer: Any) -> list[Any]:
        """The part of ``answer`` that belongs to each request."""
        if len(self.requests) == 1:
            return [answer]
        parts, start = [], 0
        for request in self.requests:
            rows = request.command.batch.num_rows  # type: ignore[union-attr]  # only commands with batches are merged
            parts.append(answer.slice(start, rows))
            start += rows
        return parts


def arrange(requests: Sequence[Request]) -> list[Work]:
    """The round's commands in the order in which they run."""
    ordered = sorted(requests, key=lambda r: _ORDER.get(type(r.command), 0))
    works: list[Work] = []
    run: list[Request] = []
    size = rows = 0
    for request in ordered:
        batch = getattr(request.command, "batch", None)
        bytes_, count = (request.size, batch.num_rows) if batch is not None else (0, 0)
        if run and _mergeable(run[-1], request) and size + bytes_ <= MERGE_BYTES and rows + count <= MERGE_ROWS:
            run.append(request)
            size, rows = size + bytes_, rows + count
            continue
        if run:
            works.append(_merge(run))
        run, size, rows = [request], bytes_, count
    if run:
        works.append(_merge(run))
    return works


def _mergeable(one: Request, other: Request) -> bool:
    a, b = one.command, other.command
    if type(a) is not type(b) or type(a) not in _ORDER or one.early != other.early:
        return False
    if isinstance(a, End) and isinstance(b, End):
        return a.by == b.by
    if isinstance(a, Settle) and isinstance(b, Settle):
        return a.group == b.group
    # What replaces runs alone: each sees what the one before it left.
    return not (isinstance(a, Prepare) and isinstance(b, Prepare) and (a.replace or b.replace))


def _merge(run: list[Request]) -> Work:
    first = run[0].command
    if len(run) == 1:
        return Work(first, run)
    batch = pa.concat_batches([r.command.batch for r in run])  # type: ignore[union-attr]  # see _mergeable
    if isinstance(first, Settle):
        return Work(Settle(first.group, batch), run)
    sessions = np.concatenate([r.command.sessions for r in run])  # type: ignore[union-attr]  # see _mergeable
    if isinstance(first, End):
        return Work(End(batch, sessions, first.by), run)
    return Work(type(first)(batch, sessions), run)  # type: ignore[call-arg,arg-type]  # Send or Prepare
