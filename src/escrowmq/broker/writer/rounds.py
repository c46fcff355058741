"""The writer's request types, and how waiting requests are sorted and merged into commands for one round.

Requests that wait at the same moment are concurrent, so any order of them is valid. Only requests of one kind keep
their order, because a client pipelines within a kind. A round runs control commands first, then half messages, plain
messages, decisions and acknowledgements, each kind in its order of arrival, and merges what it can. Receives come last
and see the results of all others.

Neighbouring parcels with few rows together are offered to the ledger as rows; all other neighbours become one batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger import commands
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import Command, End, Prepare, Receive, RowsCommand, Send, Settle
from escrowmq.model import DecidedBy
from escrowmq.wire import Exchange
from escrowmq.wire.parcels import Done, Parcel, Row, answer_of, merged_batch

MERGE_BYTES = 6 << 20  # of neighbours that become one command: a copy costs less, up to the allocator's limit (8 MiB)
MERGE_ROWS = 32_768
SMALLEST_REQUEST = 256  # bytes that any waiting request counts for at least
PLAIN_ROWS = 512  # the most rows decided as rows: above, columns are faster (decisions/0029-rows-until-the-round.md)

_ORDER: dict[type, int] = {Prepare: 1, Send: 2, End: 3, Settle: 4, type(None): 5}  # looks have no command
_KIND_ORDER = {Exchange.PREPARE: 1, Exchange.SEND: 2, Exchange.END: 3, Exchange.SETTLE: 4}
_WRITES = (_KIND_ORDER[Exchange.PREPARE], _KIND_ORDER[Exchange.SEND])

Lane = tuple[int, Any]  # the order of a kind, and a detail: neighbours of one lane become one command
CHECK_ANSWERS: Lane = (_KIND_ORDER[Exchange.END], DecidedBy.CHECK)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """One waiting command and where its answer goes. ``early``: answered before it is durable (``flush="async"``).
    ``source``: the connection that brought it; None inside this process."""

    command: Command
    future: Future[Any] = field(default_factory=Future)
    early: bool = False
    source: Hashable = None
    count: int = field(init=False)  # its rows; 0 without a batch
    size: int = field(init=False)  # bytes held while it waits
    order: int = field(init=False)  # of its kind within a round
    writes: bool = field(init=False)  # whether it brings messages

    def __post_init__(self) -> None:
        batch = getattr(self.command, "batch", None)
        self.count = 0 if batch is None else int(batch.num_rows)
        self.size = SMALLEST_REQUEST + (0 if batch is None else int(pa.ipc.get_record_batch_size(batch)))
        self.order = _ORDER.get(type(self.command), 0)
        self.writes = self.order in _WRITES

    @property
    def lane(self) -> Lane | None:
        """The lane whose neighbouring requests become one command; None: the request runs alone."""
        match self.command:
            case Prepare(replace=False):  # a replacing one runs alone: it must see what the one before it left
                return self.order, False
            case Send():
                return self.order, self.early
            case End(by=by):
                return self.order, by
            case Settle(group=group):
                return self.order, group
        return None

    @property
    def withdrawn(self) -> bool:
        """Return whether the caller has cancelled the request."""
        return self.future.cancelled()

    def answer(self, value: Any) -> None:
        """Set the caller's future to ``value``, a result or an error; does nothing if it was cancelled."""
        with suppress(InvalidStateError):
            if isinstance(value, BaseException):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)


@dataclass(slots=True, eq=False)
class Look(Request):
    """A query: ``look`` runs on the writer; its answer waits for the round's sync like all others."""

    command: Any = None
    look: Callable[[], Any] = field(kw_only=True)


@dataclass(slots=True, eq=False)
class WaitingLook(Look):
    """A look that waits up to ``wait_us`` for an answer other than None; run again when messages became visible."""

    wait_us: int = 0
    until_us: int = 0  # by broker time; set by the round that takes it


@dataclass(slots=True, eq=False)
class WaitingReceive(Request):
    """A receive that waits for messages, up to ``wait_us`` or until it is cancelled."""

    command: Receive
    wait_us: int = 0
    until_us: int = 0  # by broker time; set by the round that takes it


class Terms(NamedTuple):
    """The checked options of a request."""

    kind: Exchange
    order: int
    lane: Lane | None
    session: int
    early: bool

    @classmethod
    def of(cls, kind: Exchange, options: Any) -> Terms:
        """Make terms from checked options (``wire.OPTIONS[kind]``). Rejected(UNKNOWN_SESSION) for decisions without a
        session."""
        order, session, early = _KIND_ORDER[kind], options.get("session", 0), options.get("flush") == "async"
        detail: Any = early
        if kind is Exchange.END and not session:
            text = "decisions come from a producer session"
            raise error(Code.UNKNOWN_SESSION, text, "transactions.settle is for operators")
        if kind is Exchange.END:
            detail = DecidedBy(options.get("by", DecidedBy.PRODUCER))
        elif kind is Exchange.SETTLE:
            detail = options["group"]
        return cls(kind, order, None if options.get("replace") else (order, detail), session, early)

    def command(self, batch: pa.RecordBatch, sessions: Int64s | None = None) -> Command:
        """Return the ledger's command for the rows of ``batch``. ``sessions``: one per row; None: the session of the
        terms."""
        sessions = np.full(batch.num_rows, self.session, np.int64) if sessions is None else sessions
        if self.kind is Exchange.SEND:
            return Send(batch, sessions)
        if self.lane is None or self.kind is Exchange.PREPARE:
            return Prepare(batch, sessions, replace=self.lane is None)
        detail = self.lane[1]
        return End(batch, sessions, detail) if self.kind is Exchange.END else Settle(detail, batch)


class ParcelRequest:
    """A waiting request of a few rows that ``requests.check_parcel`` has validated, answered once by its callback."""

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
    withdrawn = False  # a parcel cannot be cancelled

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

    @property
    def command(self) -> Command:
        """The request as a command of columns. Raises Rejected(BAD_BATCH) if its rows make no batch."""
        return _command([self])

    def answer(self, value: Any) -> None:
        """Pass the answer, rows or a batch that is converted to rows, or an error to the caller's callback. Any thread;
        only the first call counts."""
        try:
            done = self._done.pop()
        except IndexError:
            return
        try:
            done(answer_of(self.terms.kind, value) if isinstance(value, pa.RecordBatch) else value)
        except Exception:  # one caller's mistake must not keep the others from their answers
            logger.exception("the callback of a parcel raised")


AnyRequest = Request | ParcelRequest
Pairs = list[tuple[AnyRequest, Any]]  # with their answers, or the EscrowError, to be given once they are durable


@dataclass(slots=True)
class Work:
    """Requests that become one command, row ranges in order."""

    requests: list[AnyRequest]
    rows: int

    @property
    def few(self) -> bool:
        """Return whether the requests are all parcels, with so few rows that the ledger decides them as rows."""
        return self.rows <= PLAIN_ROWS and self.requests[0].lane is not None and bool(_parcels(self.requests))

    @property
    def command(self) -> Command:
        """The requests as one command of columns. Raises Rejected(BAD_BATCH) if the rows of a parcel make no batch."""
        return self.requests[0].command if len(self.requests) == 1 else _command(self.requests)

    @property
    def rows_command(self) -> RowsCommand:
        """The requests as one command of rows; only if :attr:`few`."""
        parts = _parcels(self.requests)
        detail = parts[0].lane[1]  # type: ignore[index]  # few have a lane
        kind = parts[0].terms.kind
        if kind is Exchange.END:
            return commands.EndRows(parts, detail)
        if kind is Exchange.SETTLE:
            return commands.SettleRows(detail, parts)
        return commands.PrepareRows(parts) if kind is Exchange.PREPARE else commands.SendRows(parts)

    def answers(self, answer: Any) -> list[Any]:
        """Split the answer to the merged command. Returns the part for each request, in order."""
        if len(self.requests) == 1:
            return [answer]
        parts, start = [], 0
        for request in self.requests:
            end = start + request.count
            parts.append(answer[start:end] if isinstance(answer, list | bytes) else answer.slice(start, request.count))
            start = end
        return parts


def arrange(requests: Sequence[AnyRequest]) -> list[Work]:
    """Sort the requests of a round by kind, and merge neighbours of one lane. Returns the works in the order in which
    they run."""
    works: list[Work] = []
    lane: Lane | None = None
    size = 0
    for request in sorted(requests, key=attrgetter("order")):
        own, count = request.lane, request.count
        size += request.size if count else 0
        if own is None or own != lane or size > MERGE_BYTES or works[-1].rows + count > MERGE_ROWS:
            works.append(Work([request], count))
            lane, size = own, request.size if count else 0
        else:
            works[-1].requests.append(request)
            works[-1].rows += count
    return works


def least_first(pairs: Pairs) -> Pairs:
    """Order the answers of a busy round: connections with few requests first, because an answer may wait for the
    processor; receives last, because their messages are read then. Each connection's order is kept."""
    several = Counter(request.source for request, _ in pairs if request.source is not None)
    return sorted(pairs, key=lambda pair: (isinstance(pair[0], WaitingReceive), several.get(pair[0].source, 0)))


def _parcels(requests: list[AnyRequest]) -> list[ParcelRequest]:
    """Return the requests if they are all parcels, else an empty list."""
    parcels = [request for request in requests if type(request) is ParcelRequest]
    return parcels if len(parcels) == len(requests) else []


def _batch(requests: list[AnyRequest]) -> pa.RecordBatch:
    """Return the rows of requests of one lane as columns. Rejected(BAD_BATCH): out of range, or not Unicode."""
    try:
        if parcels := _parcels(requests):
            return merged_batch(parcels[0].terms.kind, [(parcel.rows, parcel.first_id) for parcel in parcels])
        each: list[Any] = requests  # only what has a batch has a lane
        return pa.concat_batches(_batch([r]) if isinstance(r, ParcelRequest) else r.command.batch for r in each)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as problem:
        raise error(Code.BAD_BATCH, f"the rows of a parcel make no batch: {problem!r:.300}") from None


def _command(requests: list[AnyRequest]) -> Command:
    """Return one command with the rows of several requests of one lane, or of one parcel."""
    each: list[Any] = requests  # only what has a batch has a lane
    first, batch = each[0], _batch(requests)
    more: Any = {}
    if first.order != _KIND_ORDER[Exchange.SETTLE]:
        sessions = [np.full(r.count, r.session) if isinstance(r, ParcelRequest) else r.command.sessions for r in each]
        more["sessions"] = np.concatenate(sessions, dtype=np.int64)
    if isinstance(first, ParcelRequest):
        parcel: Command = first.terms.command(batch, **more)
        return parcel
    command: Command = replace(first.command, batch=batch, **more)
    return command
