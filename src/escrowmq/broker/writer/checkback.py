"""Delivery of check-backs: which producers are connected, which of them is asked, and how many questions each has open.

1. The ledger decides *what* is due and counts the question durably; this file decides *whom* to ask: a *listener*, a
   connected producer session. Without a listener that has room in its window, no attempt is spent (I11).
2. The session that sent a half message is asked first, then the others of its group in rotation.
3. A listener has at most ``window`` open questions. A question is closed by any answer about its transaction, by its
   decision from any side, or after the group's ``interval_us``, when the ledger may ask again.
4. A waiting question is two numbers; bodies are read when it leaves, on the listener's own thread. So a slow listener
   costs no memory and delays no other, and a transaction that is decided meanwhile is not asked about (I10).
5. A transaction with a damaged half message is parked at once for an operator, because no checker could decide what it
   has not seen. The others of its batch are asked about.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import batch_of
from escrowmq.broker.writer.shard import Shard
from escrowmq.errors import DONE, Code, EscrowError, error, flags
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import AskChecks, Asked
from escrowmq.ledger.events import Event
from escrowmq.ledger.listings import messages_of
from escrowmq.message.ids import transaction_ids
from escrowmq.schemas import CHECKS, Kind

BATCH_BYTES = 2 << 20
ASK_ROWS = 10_000  # transactions taken from the ledger at a time for one group
_CLOSING = frozenset({Kind.DECIDED, Kind.BATCH_DECIDED, Kind.PARKED})  # events that close questions
KEPT_UNKNOWN = 10_000  # UNKNOWN answers that are kept for display
_FIRST_READ = 16
_LONGEST_READ = 4096

ANSWERED = np.frombuffer(flags(DONE), np.bool_)  # by code: whether an end with this result closes its question

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Questions:
    """Transactions to check, and the positions of their half messages (``owners`` indexes the first three)."""

    transactions: Int64s
    epochs: Int64s
    attempts: Int64s
    positions: Int64s
    owners: Int64s

    def take(self, rows: Int64s) -> Questions:
        """Return the questions about some of the transactions only (``rows``: indices, ascending)."""
        place = np.full(len(self.transactions), -1)
        place[rows] = np.arange(len(rows))
        kept = place[self.owners] >= 0
        transactions, epochs, attempts = self.transactions[rows], self.epochs[rows], self.attempts[rows]
        return Questions(transactions, epochs, attempts, self.positions[kept], place[self.owners[kept]])


class Listener:
    """One connected producer session. :meth:`batches` belongs to one thread of its carrier; a carrier without such a
    thread sets ``on_news`` and calls :meth:`take_now`. ``park`` parks a transaction that cannot be asked about."""

    def __init__(self, group: str, session: int, shard: Shard, park: Callable[[int], object]) -> None:
        self.group = group
        self.session = session
        self.open: set[int] = set()  # positions of the transactions asked about and not answered
        self._asked: deque[tuple[int, list[int]]] = deque()
        self._waiting: deque[Questions] = deque()
        self._changed = threading.Condition()
        self.closed = False  # whether there will be no more questions
        self.on_news: Callable[[], None] = lambda: None
        """Called when there are questions to take, or the listener is closed; neither blocks nor raises."""
        self.problem: EscrowError | None = None  # why the broker closed it
        self._read = shard.log.read
        self._shard = shard.log.shard
        self._park = park
        self._row_bytes = BATCH_BYTES // _FIRST_READ

    # The engine's side (under the directory's lock)

    def expire(self, before_us: int) -> None:
        """Close the questions that were asked at ``before_us`` or earlier, so that the listener has room again."""
        while self._asked and self._asked[0][0] <= before_us:
            self.open.difference_update(self._asked.popleft()[1])

    def reserve(self, transactions: Int64s, now_us: int) -> None:
        """Count questions about these transactions as open."""
        asked = transactions.tolist()
        self.open.update(asked)
        self._asked.append((now_us, asked))

    def put(self, questions: Questions) -> None:
        """Queue questions for the producer, after their check attempts became durable."""
        with self._changed:
            if not self.closed:
                self._waiting.append(questions)
                self._changed.notify()
        self.on_news()

    @property
    def waiting(self) -> int:
        """The number of questions that are queued and not taken yet."""
        with self._changed:
            return sum(len(questions.transactions) for questions in self._waiting)

    def close(self) -> None:
        """Drop all queued questions, and end :meth:`batches`."""
        with self._changed:
            self.closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self.on_news()

    # The carrier's side

    def take_now(self) -> Questions | None:
        """Return the next queued questions without waiting; None if there are none."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def take(self) -> Questions | None:
        """Wait for the next queued questions, and return them; None when the listener is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.closed)
            return self._waiting.popleft() if self._waiting else None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield check-backs for the producer as they come, in batches of schema CHECKS of about 2 MiB at most, until
        the listener is closed."""
        while (questions := self.take()) is not None:
            yield from self.batches_of(questions)

    def batches_of(self, questions: Questions) -> Iterator[pa.RecordBatch]:
        """Yield batches of schema CHECKS, with message bodies from the log, for those of the questions that are still
        open."""
        start = 0
        while start < len(questions.transactions) and not self.closed:
            count = int(np.clip(BATCH_BYTES // self._row_bytes, 1, _LONGEST_READ))
            rows = np.arange(start, min(start + count, len(questions.transactions)))
            start = int(rows[-1]) + 1
            yield from self._build(questions.take(rows))

    def _build(self, questions: Questions) -> Iterator[pa.RecordBatch]:
        questions = questions.take(np.flatnonzero([t in self.open for t in questions.transactions.tolist()]))
        count = len(questions.transactions)
        if not count:
            return
        try:
            stored = self._read(questions.positions)
        except EscrowError as problem:
            if count == 1:
                logger.error("cannot read the transaction at %d to check it: %s", questions.transactions[0], problem)
                if problem.code is Code.DAMAGED:
                    self._park(int(questions.transactions[0]))
                return
            for row in range(count):  # one bad record never stops the others
                yield from self._build(questions.take(np.array([row])))
            return
        self._row_bytes = max(int(stored.nbytes) // count, self._row_bytes // 4, 1)
        owners = questions.owners
        ids = transaction_ids(self._shard, questions.epochs[owners], questions.transactions[owners])
        attempts = pa.array(questions.attempts[owners].astype(np.int32))
        yield batch_of(CHECKS, {"transaction": ids, "attempt": attempts}, stored)


Asks = list[tuple[Listener, Questions]]  # to hand over once they are durable


class Listeners:
    """All listeners, by producer group. Joining and leaving come from carriers' threads, the rest from the writer."""

    def __init__(self, window: int, shard: Shard, poke: Callable[[], None], park: Callable[[int], object]) -> None:
        self._window = window
        self._shard = shard
        self._poke = poke
        self._park = park
        self._interval_us = shard.ledger.checkback.interval_us
        self._lock = threading.RLock()
        self._listeners: dict[str, list[Listener]] = {}
        self._turns: dict[str, int] = {}
        self._news = False  # a listener joined or left, or has room again
        self.answered_unknown = 0  # since the start
        self._unknown: dict[int, int] = {}  # when UNKNOWN was answered last, by transaction; the newest of them
        self._taken_over = False  # a session was opened: it may have fenced that of a listener
        self._wake_us = NEVER_US

    @property
    def wake_us(self) -> int:
        """The broker time before which :meth:`ask` has nothing to do."""
        return 0 if self._news else self._wake_us

    def join(self, group: str, session: int) -> Listener:
        """Add a listener for a producer session that was connected, and return it."""
        listener = Listener(group, session, self._shard, self._park)
        with self._lock:
            self._listeners.setdefault(group, []).append(listener)
            self._taken_over = self._news = True  # its session may have been fenced since it was checked
        self._poke()
        return listener

    def leave(self, listener: Listener) -> None:
        """Close and remove a listener; its unanswered questions become due again by themselves."""
        listener.close()
        with self._lock:
            listeners = self._listeners.get(listener.group, [])
            if listener in listeners:
                listeners.remove(listener)
            if not listeners:
                self._listeners.pop(listener.group, None)
                self._turns.pop(listener.group, None)
            self._news = True
        self._poke()

    def _all(self) -> list[Listener]:
        with self._lock:
            return [listener for group in self._listeners.values() for listener in group]

    def close(self) -> None:
        """Close and remove all listeners."""
        for listener in self._all():
            self.leave(listener)

    def groups(self) -> list[str]:
        """Return the producer groups with at least one connected session."""
        with self._lock:
            return list(self._listeners)

    def count(self, group: str) -> int:
        """Return how many sessions of a producer group are connected."""
        with self._lock:
            return len(self._listeners.get(group, ()))

    def sessions(self) -> Int64s:
        """Return the numbers of all connected producer sessions."""
        return np.array([m.session for m in self._all()], np.int64)

    @property
    def unanswered(self) -> int:
        """The number of open questions of all listeners."""
        return sum(len(m.open) for m in self._all())

    def note_unknown(self, transactions: Int64s, now_us: int) -> None:
        """Record that checks of these transactions were answered UNKNOWN at ``now_us``."""
        with self._lock:
            self.answered_unknown += len(transactions)
            for position in transactions[-KEPT_UNKNOWN:].tolist():
                self._unknown.pop(position, None)
                self._unknown[position] = now_us
            while len(self._unknown) > KEPT_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]

    def about(self, transaction: int) -> tuple[int | None, int | None]:
        """Return the session that is asked about a transaction now, and when UNKNOWN was last answered about it
        (microseconds); None for each if not known."""
        with self._lock:
            asked = next((one.session for one in self._all() if transaction in one.open), None)
            return asked, self._unknown.get(transaction)

    def room(self, group: str, now_us: int) -> int:
        """Return how many questions the listeners of a group can take now. Closes those that were open for too long."""
        with self._lock:
            room = 0
            for listener in self._listeners.get(group, ()):
                listener.expire(now_us - self._interval_us(group))
                room += self._window - len(listener.open)
            return room

    def on_event(self, event: Event) -> None:
        """Handle an event that the ledger applied: a decision closes questions; others may make transactions due."""
        kind, rows = event.kind, event.rows
        if kind in (Kind.REOPENED, Kind.RULES, Kind.PRODUCERS):
            self._news = True
        elif not self._listeners:
            return
        elif kind in _CLOSING:
            self.settled(event.batch.column("transaction").to_numpy() if rows is None else [row[0] for row in rows])
        elif kind == Kind.HALF:
            due_us = event.batch.column("due_us").to_numpy().min() if rows is None else min(rows.halves.due_us)
            self._wake_us = min(self._wake_us, int(due_us))
        elif kind == Kind.SESSION:
            self._taken_over = self._news = True

    def settled(self, transactions: Int64s | Sequence[int]) -> None:
        """Close the open questions about these transactions."""
        with self._lock:
            busy = [m for m in self._all() if m.open]
            if busy:
                positions = transactions.tolist() if isinstance(transactions, np.ndarray) else transactions
                for listener in busy:
                    before = len(listener.open)
                    listener.open.difference_update(positions)
                    if len(listener.open) < before:
                        self._news = True

    def ask(self, shard: Shard, now_us: int) -> Iterator[tuple[Listener, Questions]]:
        """Take due transactions of every group that has a listener with room from the ledger. Yields each listener with
        its questions, to be handed over once they are durable. Closes the listeners of fenced sessions."""
        if now_us < self.wake_us:
            return
        self._news = False
        if self._taken_over:  # close fenced sessions: each question would be counted, and its answer refused
            self._taken_over, listeners = False, self._all()
            sessions = np.array([listener.session for listener in listeners], np.int64)
            for at in np.flatnonzero(shard.ledger.sessions.fenced(sessions)).tolist():
                listeners[at].problem = error(Code.FENCED)
                self.leave(listeners[at])
        self._wake_us = 0  # until this is done: it may be refused
        ledger, wake_us = shard.ledger, NEVER_US
        for group in self.groups():
            if ledger.checkback.ask_us(group) <= now_us and (room := min(self.room(group, now_us), ASK_ROWS)) > 0:
                asked: Asked = shard.execute(AskChecks(group, room))
                if len(asked.transactions):
                    positions, owners = messages_of(ledger, asked.transactions)
                    questions = Questions(asked.transactions, asked.epochs, asked.attempts, positions, owners)
                    for listener, rows in self.assign(group, asked, now_us):
                        yield listener, questions.take(rows)
            wake_us = min(wake_us, max(ledger.checkback.ask_us(group), self._next_room_us(group)))
        self._wake_us = wake_us

    def _next_room_us(self, group: str) -> int:
        """Return the time before which no listener of a group has room: 0 if one has, else when the oldest question
        expires."""
        with self._lock:
            listeners = self._listeners.get(group, ())
            if any(len(m.open) < self._window for m in listeners):
                return 0
            oldest = min((m._asked[0][0] for m in listeners if m._asked and m.open), default=NEVER_US)
            return oldest + self._interval_us(group)

    def assign(self, group: str, asked: Asked, now_us: int) -> list[tuple[Listener, Int64s]]:
        """Divide the transactions to check among the group's listeners, and count them as open there. Returns each
        listener with the row numbers of ``asked`` that it gets."""
        with self._lock:
            listeners = list(self._listeners.get(group, ()))
            if not listeners:
                return []
            free = np.array([self._window - len(m.open) for m in listeners])
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            shares = _share(listeners, free, asked.epochs, turn)
            given = [(m, np.sort(rows)) for m, rows in zip(listeners, shares, strict=True) if len(rows)]
            for listener, rows in given:
                listener.reserve(asked.transactions[rows], now_us)
            return given


def _share(listeners: list[Listener], free: Int64s, epochs: Int64s, turn: int) -> list[Int64s]:
    """Return for each listener the rows (of ``epochs``, the sessions that sent them) that it is asked about, at most
    its ``free`` room: those of its own session first, the others in rotation from ``turn``."""
    shares: list[list[Int64s]] = [[] for _ in listeners]
    left = np.ones(len(epochs), bool)

    def give(to: int, rows: Int64s) -> int:
        taken = rows[: max(int(free[to]), 0)]
        shares[to].append(taken)
        free[to] -= len(taken)
        left[taken] = False
        return len(taken)

    for session in {m.session for m in listeners} & set(np.unique(epochs).tolist()):
        rows = np.flatnonzero(epochs == session)
        for to, listener in enumerate(listeners):
            if listener.session == session:
                rows = rows[give(to, rows) :]
    while left.any() and (free > 0).any():
        able = np.flatnonzero(free > 0)
        able = np.roll(able, -(turn % len(able)))
        for to, part in zip(able.tolist(), np.array_split(np.flatnonzero(left), len(able)), strict=True):
            give(to, part)
        turn += 1
    return [np.concatenate([np.empty(0, np.int64), *parts]) for parts in shares]
