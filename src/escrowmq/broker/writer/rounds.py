"""The writer's request types, and how waiting requests are sorted and merged into commands for one round.

Requests that wait at the same moment are concurrent: any order of them is one that their callers may see. Only those of
one kind keep theirs, because a client pipelines within a kind. So a round runs control first, then half messages, plain
messages, decisions and acknowledgements, each kind in its order of arrival, and merges what it can; receives come last
and see all of it.

A run of neighbours that are all parcels, and few rows together, is offered to the ledger as rows; any other is one
batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.commands import (
    Command,
    End,
    EndRows,
    Prepare,
    PrepareRows,
    Receive,
    RowsCommand,
    Send,
    SendRows,
    Settle,
    SettleRows,
)
from escrowmq.model import DecidedBy
from escrowmq.wire import Exchange
from escrowmq.wire.parcels import Done, Parcel, Row, answer_of, batch_of, merged_batch

MERGE_BYTES = 6 << 20
"""What neighbours in a round may have together to become one command: copying a message costs less than the steps of
one more command do, as long as the copy stays within what the allocator keeps (8 MiB).
"""
MERGE_ROWS = 32_768
SMALLEST_REQUEST = 256
"""Bytes that any waiting request counts for at least."""
PLAIN_ROWS = 512
"""Rows of one kind in a round that are decided as rows at most: above, columns are faster
(docs/decisions/0029-rows-until-the-round.md).
"""

_ORDER: dict[type, int] = {Prepare: 1, Send: 2, End: 3, Settle: 4}
_KIND_ORDER = {Exchange.PREPARE: 1, Exchange.SEND: 2, Exchange.END: 3, Exchange.SETTLE: 4}

_WRITES = (_KIND_ORDER[Exchange.PREPARE], _KIND_ORDER[Exchange.SEND])

Lane = tuple[int, Any]
"""Requests of one lane that stand next to each other become one command; by the order of their kind."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """One waiting command and where its answer goes. ``early``: answered before it is durable (``flush="async"``).
    ``source``: the connection that brought it; None inside this process."""

    command: Command
    future: Future[Any] = field(default_factory=Future)
    early: bool = False
    source: Hashable = None
    size: int = field(init=False)
    """Bytes that it holds while it waits; counted once, because Arrow walks every buffer for it."""
    order: int = field(init=False)
    """Of its kind within a round."""
    writes: bool = field(init=False)
    """Whether it brings messages."""

    def __post_init__(self) -> None:
        batch = getattr(self.command, "batch", None)
        self.size = SMALLEST_REQUEST if batch is None else SMALLEST_REQUEST + int(batch.nbytes)
        self.order = _ORDER.get(type(self.command), 0)
        self.writes = self.order in _WRITES

    @property
    def count(self) -> int:
        """Its rows; 0 of a command without a batch."""
        batch = getattr(self.command, "batch", None)
        return 0 if batch is None else int(batch.num_rows)

    @property
    def lane(self) -> Lane | None:
        """See :data:`Lane`; None: it runs alone."""
        match self.command:
            case Prepare(replace=replace):
                # What replaces runs alone: each sees what the one before it left.
                return None if replace else (self.order, False)
            case Send():
                return self.order, self.early
            case End(by=by):
                return self.order, by
            case Settle(group=group):
                return self.order, group
        return None

    @property
    def withdrawn(self) -> bool:
        """Whether the caller is gone."""
        return self.future.cancelled()

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
    """A query: ``look`` runs on the writer; its answer waits for the round's sync like all others."""

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


class Terms(NamedTuple):
    """The checked options of a parcel: how it is worked on. Made once for all parcels with the same options."""

    kind: Exchange
    order: int
    lane: Lane | None
    session: int
    early: bool

    @classmethod
    def of(cls, kind: Exchange, options: Any) -> Terms:
        """From options that are checked (``wire.OPTIONS[kind]``)."""
        order, session, early = _KIND_ORDER[kind], options.get("session", 0), options.get("flush") == "async"
        detail: Any = early
        if kind is Exchange.END:
            detail = DecidedBy(options.get("by", DecidedBy.PRODUCER))
        elif kind is Exchange.SETTLE:
            detail = options["group"]
        lane = None if options.get("replace") else (order, detail)
        return cls(kind, order, lane, session, early)


class ParcelRequest:
    """A waiting request of a few rows, answered once by its callback. Its rows are sound: ``requests.check_parcel`` saw
    them."""

    __slots__ = (
        "_done",
        "count",
        "early",
        "first_id",
        "lane",
        "order",
        "rows",
        "session",
        "size",
        "source",
        "terms",
        "writes",
    )

    def __init__(self, parcel: Parcel, terms: Terms, size: int, done: Done, source: Hashable = None) -> None:
        self.rows: Sequence[Row] = parcel.rows
        self.first_id = parcel.first_id
        self.terms = terms
        self.order, self.lane, self.session, self.early = terms.order, terms.lane, terms.session, terms.early
        self.source = source
        self.writes = terms.order in _WRITES
        self.count = len(parcel.rows)
        self.size = SMALLEST_REQUEST + size
        self._done = [done]

    withdrawn = False
    """A parcel cannot be taken back."""

    def batch(self) -> pa.RecordBatch:
        """Its rows as columns. Rejected(BAD_BATCH) if they are none."""
        return _columns(lambda: batch_of(Parcel(self.terms.kind, self.rows, {}, self.first_id)))

    @property
    def command(self) -> Command:
        """The same as columns. Rejected(BAD_BATCH)."""
        return _command([self], self.batch())

    def answer(self, value: Any) -> None:
        """Give the caller its answer (rows, or the batch that has the same), or an error if ``value`` is one. Any
        thread; what comes after the first is passed over."""
        try:
            done = self._done.pop()
        except IndexError:
            return
        try:
            done(answer_of(self.terms.kind, value) if isinstance(value, pa.RecordBatch) else value)
        except Exception:  # one caller's mistake must not keep the others from their answers
            logger.exception("the callback of a parcel raised")


AnyRequest = Request | ParcelRequest


@dataclass(slots=True)
class Work:
    """Requests that become one command, row ranges in order."""

    requests: list[AnyRequest]
    few: bool = False
    """Whether all of them are parcels, and few rows: to be offered to the ledger as rows."""

    @property
    def command(self) -> Command:
        """The command, of columns. Rejected(BAD_BATCH): a parcel among them is none."""
        first = self.requests[0]
        if len(self.requests) == 1:
            return first.command
        if parcels := _parcels(self.requests):
            return _command(self.requests, _columns(lambda: _merge(parcels)))
        batches = [r.batch() if isinstance(r, ParcelRequest) else r.command.batch for r in self.requests]  # type: ignore[union-attr]  # only what has a batch has a lane
        return _command(self.requests, pa.concat_batches(batches))

    @property
    def rows_command(self) -> RowsCommand:
        """The command, of rows, of a work of few."""
        parts = _parcels(self.requests)
        first = parts[0]
        match first.terms.kind:
            case Exchange.PREPARE:
                return PrepareRows(parts)
            case Exchange.SEND:
                return SendRows(parts)
            case Exchange.END:
                return EndRows(parts, first.lane[1])  # type: ignore[index]  # few have a lane
        return SettleRows(first.lane[1], parts)  # type: ignore[index]

    def alone(self) -> list[Work]:
        """Each request as a work of its own."""
        return [Work([request], self.few) for request in self.requests]

    def answers(self, answer: Any) -> list[Any]:
        """Return the part of ``answer`` that belongs to each request."""
        if len(self.requests) == 1:
            return [answer]
        parts, start = [], 0
        for request in self.requests:
            end = start + request.count
            parts.append(answer[start:end] if isinstance(answer, list | bytes) else answer.slice(start, request.count))
            start = end
        return parts


def arrange(requests: Sequence[AnyRequest]) -> list[Work]:
    """Return the round's commands in the order in which they run."""
    works: list[Work] = []
    run: list[AnyRequest] = []
    lane: Lane | None = None
    size = rows = 0
    for request in sorted(requests, key=_order):
        own, count = request.lane, request.count
        bytes_ = request.size if count else 0
        if run and own is not None and own == lane and size + bytes_ <= MERGE_BYTES and rows + count <= MERGE_ROWS:
            run.append(request)
            size, rows = size + bytes_, rows + count
            continue
        if run:
            works.append(Work(run, _few(run, lane, rows)))
        run, lane, size, rows = [request], own, bytes_, count
    if run:
        works.append(Work(run, _few(run, lane, rows)))
    return works


def least_first(pairs: list[tuple[AnyRequest, Any]]) -> list[tuple[AnyRequest, Any]]:
    """Order requests and their answers for a busy round: first those of connections with few requests, because an
    answer may wait for the processor, and those behind it with it; receives last, because their messages are read
    then. Those of one connection keep their order."""
    several = Counter(request.source for request, _ in pairs if request.source is not None)

    def order(pair: tuple[AnyRequest, Any]) -> tuple[bool, int]:
        request = pair[0]
        return isinstance(request, WaitingReceive), several.get(request.source, 0)

    return sorted(pairs, key=order)


def _order(request: AnyRequest) -> int:
    return request.order


def _few(run: list[AnyRequest], lane: Lane | None, rows: int) -> bool:
    return lane is not None and rows <= PLAIN_ROWS and bool(_parcels(run))


def _parcels(requests: list[AnyRequest]) -> list[ParcelRequest]:
    """Return the requests if they are all parcels, else none."""
    parcels = [request for request in requests if type(request) is ParcelRequest]
    return parcels if len(parcels) == len(requests) else []


def _merge(parcels: Sequence[ParcelRequest]) -> pa.RecordBatch:
    kind = parcels[0].terms.kind
    return merged_batch(kind, [(parcel.rows, parcel.first_id) for parcel in parcels])


def _columns(make: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
    """Build columns from rows with ``make``; convert its errors. Each value has its type, but may be out of range,
    or text that is not Unicode."""
    try:
        return make()
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as problem:
        raise error(Code.BAD_BATCH, f"the rows of a parcel make no batch: {problem!r:.300}") from None


def _command(requests: Sequence[AnyRequest], batch: pa.RecordBatch) -> Command:
    """One command with the rows of several requests of one lane (or of one parcel)."""
    first = requests[0]
    detail: Any = first.lane[1] if first.lane is not None else None
    if first.order == _KIND_ORDER[Exchange.SETTLE]:
        return Settle(detail, batch)
    sessions = np.concatenate([_sessions(request) for request in requests])
    if first.order == _KIND_ORDER[Exchange.END]:
        return End(batch, sessions, detail)
    if first.order == _KIND_ORDER[Exchange.SEND]:
        return Send(batch, sessions)
    return Prepare(batch, sessions, replace=first.lane is None)


def _sessions(request: AnyRequest) -> np.ndarray[Any, Any]:
    if isinstance(request, ParcelRequest):
        return np.full(request.count, request.session, np.int64)
    sessions: np.ndarray[Any, Any] = request.command.sessions  # type: ignore[union-attr]  # of what has a lane
    return sessions
