"""The engine: the one writer of a shard, its queue of waiting requests, and everything that happens by the clock.

Each :meth:`Engine.step` is one round: pending work, what is due by broker time, check-backs, waiting receives, one
sync, then the answers. Without :meth:`start` there is no thread, and a test calls ``step`` itself.

Rounds run one at a time on the writer's thread; a lone request of a carrier whose thread belongs to the broker runs on
that thread (:meth:`Engine.run`). The threads of callers never run a round, because a signal or an exit within it would
stop the shard for all callers. They may read the ledger between rounds (:meth:`Engine.glance`).

Bounds: up to ``max_waiting_bytes`` of requests are queued, then QUEUE_FULL; an eighth is reserved for requests without
messages. One connection may queue as many bytes of messages as are left to the others, and no more than the disk writes
of them in some seconds (``pace.py``). If more is queued than a round takes, connections take turns (``line.py``), and
requests without messages go first. Waiting receives are bounded by their connections and their waiting time;
check-backs by windows (``checkback.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from escrowmq.broker.failures import answer
from escrowmq.broker.writer.checkback import Asks, Listener, Listeners
from escrowmq.broker.writer.committer import Committer
from escrowmq.broker.writer.consumers import Consumers
from escrowmq.broker.writer.line import Line
from escrowmq.broker.writer.pace import SEEN_BYTES, Pace
from escrowmq.broker.writer.recovery import Folded
from escrowmq.broker.writer.rounds import (
    AnyRequest,
    Look,
    Pairs,
    ParcelRequest,
    Request,
    WaitingLook,
    WaitingReceive,
    least_first,
)
from escrowmq.broker.writer.shard import Proof, Shard
from escrowmq.broker.writer.telling import Refusals
from escrowmq.broker.writer.upkeep import Upkeep
from escrowmq.broker.writer.waiting import WaitingLooks, WaitingReceives
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Command, Park, Receive, Tick, nothing_leased
from escrowmq.ledger.events import Event
from escrowmq.log.seam import CommitLog
from escrowmq.platform.clock import Clock
from escrowmq.settings import BrokerSettings

TICK_ROWS = 20_000
PAUSE_US = 1_000_000  # retry interval of an internal command that was refused (a full disk)
ROUND_BYTES = 64 << 20
LONE_BYTES = 1 << 20  # larger requests never run on the thread of a carrier
LATE_BYTES = 256 << 10  # of requests that join a round during the sync before it; little: the disk is idle meanwhile
MESSAGES = 7 / 8  # the share of the queue that messages may fill: acknowledgements and decisions need the rest
LONGEST_SLEEP = 60.0

logger = logging.getLogger(__name__)
R = TypeVar("R", Request, ParcelRequest)


class Engine:
    """One running shard. ``submit`` and ``look`` from any thread; an answer is durable when it is given."""

    def __init__(
        self,
        log: CommitLog,
        clock: Clock,
        settings: BrokerSettings,
        folded: Folded | None = None,
        proof: Proof | None = None,
    ) -> None:
        self.log = log
        self.settings = settings
        self.shard = Shard(log, clock, settings, folded, proof)
        self.clock: Clock = self.shard.clock
        self.shard.observers.append(self._on_event)
        self.listeners = Listeners(settings.checks_in_flight, self.shard, self.poke, lambda at: self.submit(Park(at)))
        self.upkeep = Upkeep(self.shard, self.poke, self.listeners.sessions)
        self._committer = Committer()
        self._pause_us = 0
        self._running: list[AnyRequest] = []  # this round's requests, in case the writer dies
        self._lock = threading.RLock()  # guards what follows: the queue, and the signals to the writer
        self._end = threading.Condition(self._lock)  # notified when the writer's thread has ended
        self._has_ended = False
        self._bell = threading.Lock()  # the writer sleeps by acquiring it a second time; releasing it wakes the writer
        self._bell.acquire()
        self._asleep = False
        self._asleep_until_us = 0
        self._carrier: int | None = None  # the thread that runs rounds, too: see run_rounds_here
        self._at_work = threading.RLock()  # around each round; a signal's handler may glance within a glance
        self._queue: deque[AnyRequest] = deque()
        self._line = Line()  # earlier messages for which the last round had no room
        self._queued_bytes = 0
        self._of_source: Counter[Hashable] = Counter()  # queued bytes of messages, by connection
        self._pace = Pace(ROUND_BYTES)
        self.refusals = Refusals()
        self._poked = True
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._receives = WaitingReceives(self.shard)
        self._looks = WaitingLooks()
        self.consumers = Consumers()
        self.rounds = 0

    # Requests

    def submit(self, command: Command, *, early: bool = False, source: Hashable = None) -> Future[Any]:
        """Queue a command for the writer. Returns a future of its answer, given once it is durable (``early``: before),
        or of an EscrowError: QUEUE_FULL at once if too much is queued, in total or of its ``source``."""
        return self._enter(Request(command, early=early, source=source)).future

    def receive(self, command: Receive, wait_us: int) -> Future[Any]:
        """Queue a request for a lease, which waits up to ``wait_us`` for the first message. The future's result is the
        leased messages, empty if none came. Cancelling it withdraws the request."""
        return self._enter(WaitingReceive(command, wait_us=wait_us)).future

    def look(self, look: Callable[[], Any]) -> Future[Any]:
        """Run ``look`` on the writer, where the ledger may be read. The future is done when what it read is durable."""
        return self._enter(Look(look=look)).future

    def glance(self, look: Callable[[], Any]) -> Future[Any]:
        """As :meth:`look`, for a query that changes nothing, derived data included. It runs on the calling thread if
        the writer sleeps and everything is durable, because two thread switches cost more than most queries."""
        if self._asleep:
            with self._at_work:  # not a timed or tried acquire: a signal could separate that from its release
                shard = self.shard
                is_durable = self.log.durable_sequence >= self.log.next_sequence
                if self._asleep and shard.failure is None and is_durable and shard.is_proved:
                    return answer(Future(), self.shard.attempt(look))
        return self.look(look)

    def wait_for(self, look: Callable[[], Any], wait_us: int) -> Future[Any]:
        """As :meth:`look`, again whenever messages became visible, until it is not None; None after ``wait_us``."""
        return self._enter(WaitingLook(look=look, wait_us=wait_us)).future

    def submit_parcel(self, request: ParcelRequest) -> None:
        """Queue a request of a few rows for the writer. Its callback gets the answer or the error; QUEUE_FULL at once
        if too much is queued."""
        self._enter(request)

    def _enter(self, request: R) -> R:
        if (refusal := self._enqueue(request)) is not None:
            if refusal.code is Code.QUEUE_FULL:
                self.refusals.count(refusal.code)
            request.answer(refusal)
        return request

    def _enqueue(self, request: AnyRequest) -> EscrowError | None:
        """Queue a request for the next round. Returns the reason if it is refused, else None."""
        with self._lock:
            if self._stopping:
                return error(Code.SHARD_STOPPED, "the broker is stopping")
            waiting = self._queued_bytes + request.size
            if self._queued_bytes and not self._has_room(request, waiting):
                return error(Code.QUEUE_FULL, retry_after=0.1)
            if request.writes:
                self._of_source[request.source] += request.size
            if self._stopping:  # now: a signal's handler stopped the engine within this block
                return error(Code.SHARD_STOPPED, "the broker is stopping")
            self._queue.append(request)
            self._queued_bytes = waiting
            if threading.get_ident() != self._carrier:
                self._ring()
        return None

    def _has_room(self, request: AnyRequest, waiting: int) -> bool:
        """Return whether a request may be queued so that ``waiting`` bytes are queued: within the limit of all and, for
        messages, within the share of its connection. With the lock held."""
        if not request.writes:
            return waiting <= self.settings.max_waiting_bytes
        most, own = MESSAGES * self.settings.max_waiting_bytes, self._of_source[request.source]
        if waiting > most or not own or request.source is None:
            return waiting <= most
        own += request.size
        return own <= most - self._queued_bytes and own <= self._pace.share(len(self._of_source))

    def run_rounds_here(self, thread: int | None = None) -> None:
        """Mark the calling thread, or the one with the id ``thread``, as one of the server's own: its requests do not
        wake the writer until it calls :meth:`run`, which it must do soon, whatever happens."""
        self._carrier = threading.get_ident() if thread is None else thread

    def run(self) -> None:
        """Process what this thread of a carrier submitted. A lone request runs here if the writer sleeps and nothing is
        due by the clock: waking a thread would double its cost. Several are left to the writer, so that the next are
        read during their sync; a large one, too, because all connections would wait for it."""
        if not self._queue:
            return
        is_lone = len(self._queue) == 1 and self._queued_bytes <= LONE_BYTES
        if is_lone and self._asleep and self._at_work.acquire(blocking=False):
            try:
                if self._asleep and self.clock.now_us() < self._asleep_until_us:
                    self._round()
                    if not self._queue and self.wake_us >= self._asleep_until_us and not self.upkeep.wants_snapshot:
                        return
            except BaseException as problem:
                self._die(problem)
            finally:
                self._at_work.release()
        self.poke()

    def _ring(self) -> None:
        """Wake the writer if it sleeps. With the lock held."""
        if self._asleep:
            self._asleep = False
            self._bell.release()

    def poke(self) -> None:
        """Make the writer run a round soon, although no request waits: a listener joined or left, or a snapshot was
        saved."""
        with self._lock:
            self._poked = True
            self._ring()

    def join(self, session: int) -> Listener:
        """Subscribe a producer session to the check-backs of its group. Rejected(UNKNOWN_SESSION), Fenced."""

        def group_of() -> str:
            ledger = self.shard.ledger
            return ledger.sessions.groups[ledger.sessions.group_of(session, ledger.rules)]

        return self.listeners.join(self.look(group_of).result(), session)

    @property
    def status(self) -> str:
        """ok, damaged, full, stopping or stopped."""
        status = self.shard.status
        return "stopping" if self._stopping and status != "stopped" else status

    @property
    def waiting(self) -> tuple[int, int]:
        """The number and bytes of the requests in the writer's queue."""
        with self._lock:
            return len(self._queue) + self._line.count, self._queued_bytes

    def receiving(self, group: str | None = None) -> int:
        """Return how many receives wait for messages, of one consumer group or of all."""
        return self._receives.count(group)

    # One round

    def step(self) -> None:
        """Run one round; then begin to save a snapshot if it is time for one."""
        self._round()
        if self.upkeep.wants_snapshot:
            self._committer.drain()
            self.upkeep.after_round()

    def _round(self) -> None:
        """Run one round: pending requests, and everything that is due. Small requests that arrive during the sync of
        the round before join it, so they never wait for more than two syncs."""
        self.rounds += 1
        self._running = []
        written = self.shard.log.bytes_written
        pairs, asks = self._decide(self._drain())
        if self._committer.wait() and (self._queue or self._line.count):
            late = self._decide(self._drain(late=True))
            pairs, asks = pairs + late[0], asks + late[1]
        if self._line.count:
            pairs = least_first(pairs)
        self._commit(*self.shard.finishing(pairs), asks, self.shard.log.bytes_written - written)
        if self.shard.failure is not None:
            self._fail_waiting()

    def _decide(self, requests: list[AnyRequest]) -> tuple[Pairs, Asks]:
        """Decide requests, and everything that is due by the clock: timers, check-backs, upkeep, waiting receives.
        Returns the requests with their answers, and the check-backs to hand over, both for after the sync."""
        self._running = [*self._running, *requests]
        shard, now = self.shard, self.shard.begin()
        receives = [request for request in requests if isinstance(request, WaitingReceive)]
        looks = [request for request in requests if isinstance(request, WaitingLook)]
        pairs = shard.run([request for request in requests if not isinstance(request, WaitingReceive | WaitingLook)])
        asks: Asks = []
        if shard.failure is None:
            if due := now >= self._clock_us():
                if shard.ledger.wake_us <= now:
                    self._own(lambda: shard.execute(Tick(TICK_ROWS)))
                self._own(lambda: asks.extend(self.listeners.ask(shard, now)))
                self._own(self.upkeep.within_round)
                self.refusals.settle()
            pairs += self._receives.serve(receives, now, due)
            pairs += self._looks.serve(looks, now, shard.attempt)
            self._running = [*self._running, *(request for request, _ in pairs)]
        else:
            pairs += [(request, shard.refusal()) for request in [*receives, *looks]]
        return pairs, asks

    def _commit(self, sync: Callable[[], bool], tell: Callable[[], bool], asks: Asks, size: int) -> None:
        """Sync the round, then answer it with ``tell`` and hand over check-backs: here if no request waits, else on
        other threads while the next round is decided. ``size``: bytes that the round appended."""
        beside = bool(self._queue or self._line.count) and self._thread is not None

        def answer_all() -> None:
            if tell():
                for listener, questions in asks:
                    listener.put(questions)
            elif beside:
                self.poke()  # the writer has receives to fail

        if beside:
            self._committer.put(lambda: self._time_sync(sync, size), answer_all)
        else:
            self._committer.drain()
            self._time_sync(sync, size)
            answer_all()

    def _time_sync(self, sync: Callable[[], bool], size: int) -> None:
        """Run ``sync``; if the round appended bytes (``size``), record its duration as the speed of the disk."""
        if not size:
            sync()
            return
        began = self.clock.now_us()
        if sync():
            with self._lock:
                self._pace.record(size, (self.clock.now_us() - began) / 1e6)

    def _drain(self, *, late: bool = False) -> list[AnyRequest]:
        """Take pending requests from the queue, as many as a round may have, without withdrawn ones; ``late``: as many
        as may join a round in progress."""
        with self._lock:
            self._poked = False
            requests = list(self._queue)
            self._queue.clear()
            if self._queued_bytes < min(SEEN_BYTES, ROUND_BYTES) and not self._line.count:
                self._queued_bytes = 0
                self._of_source.clear()
            else:
                requests = self._in_turn(requests, late)
        return [r for r in requests if not r.withdrawn]

    def _in_turn(self, arrived: list[AnyRequest], late: bool) -> list[AnyRequest]:
        """Return those of the requests that have just arrived, and of those in the fair queue, that the next round
        takes. With the lock held."""
        most = LATE_BYTES if late else min(self._pace.round(), ROUND_BYTES)
        if self._queued_bytes > most:
            self._line.put(request for request in arrived if request.writes)
            requests, taken = [], 0
            self._queue = deque(request for request in arrived if not request.writes)
            while self._queue and taken < (LATE_BYTES if late else ROUND_BYTES):
                requests.append(self._queue.popleft())
                taken += requests[-1].size
            requests += self._line.take(most, late=late)
        else:
            requests = [*self._line.clear(), *arrived]
        for request in requests:
            self._queued_bytes -= request.size
            if request.writes:
                self._of_source[request.source] -= request.size
                if not self._of_source[request.source]:
                    del self._of_source[request.source]
        return requests

    def _own(self, act: Callable[[], object]) -> None:
        """Run an internal command on the shard; if it is refused, pause internal commands for ``PAUSE_US``."""
        try:
            act()
        except EscrowError as problem:
            if self.shard.failure is None:
                logger.warning("an internal command was refused, and is retried: %s", problem)
                self._pause_us = self.shard.time_us + PAUSE_US

    def _on_event(self, event: Event) -> None:
        self._receives.on_event(event.kind)
        self._looks.on_event(event.kind)
        self.listeners.on_event(event)

    def _fail_waiting(self) -> None:
        self._receives.end(self.shard.refusal)
        self._looks.end(self.shard.refusal)

    # Time

    @property
    def wake_us(self) -> int:
        """The broker time before which no round is due without a request. A lower bound: a round that finds nothing to
        do moves it."""
        return min(self._clock_us(), self._receives.wake_us, self._looks.wake_us)

    def _clock_us(self) -> int:
        """Return the broker time before which no internal work (timers, check-backs, upkeep) is due."""
        wake_us = min(self.shard.ledger.wake_us, self.listeners.wake_us, self.upkeep.wake_us)
        return max(wake_us, self._pause_us)

    def start(self) -> None:
        """Start the writer's thread."""
        self._thread = threading.Thread(target=self._work, name="escrowmq-writer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self._sleep():
                with self._at_work:
                    self.step()
        except BaseException as problem:
            self._die(problem)
        finally:
            with self._lock:
                self._has_ended = True
                self._end.notify_all()

    def _die(self, problem: BaseException) -> None:
        """Stop the shard, because the writer failed with ``problem``, and fail all queued requests."""
        self.shard.stop(problem)
        logger.error("the writer died", exc_info=problem)
        with self._lock:
            self._stopping = True
            self._ring()
            left, self._queue = [*self._line.clear(), *self._queue], deque()
        for request in [*self._running, *left]:
            request.answer(error(Code.SHARD_STOPPED))
        self._fail_waiting()

    def _sleep(self) -> bool:
        """Wait until a round is due. Returns False if the engine stops and all is done."""
        if self._queue or self._poked or self._line.count:
            return True
        wake_us = self.wake_us if self.shard.failure is None else NEVER_US
        while True:
            with self._lock:
                if self._queue or self._poked or self._line.count:
                    return True
                if self._stopping:
                    return False
                seconds = (wake_us - self.clock.now_us()) / 1e6
                if seconds <= 0:
                    return True
                self._asleep, self._asleep_until_us = True, wake_us
            rung = self._bell.acquire(timeout=min(seconds, LONGEST_SLEEP))
            with self._lock:
                if not (rung or self._asleep):  # rung just after the time was over
                    self._bell.acquire()
                self._asleep = False

    def stop(self) -> None:
        """Refuse new requests, finish queued ones, save a snapshot, close the log. May be called again."""
        with self._lock:
            if self._stopping and self._thread is None:
                return
            self._stopping = True
            self._ring()
        self.listeners.close()
        if self._thread is not None:
            with self._lock:  # a signal's handler may run within a block that holds it: only wait_for releases it then
                self._end.wait_for(lambda: self._has_ended)
            self._thread.join()
            self._thread = None
            with self._at_work:  # a carrier's thread may be within its last round, or a glance: none begins any more
                pass
        else:
            while self._queue or self._line.count:
                self.step()
        self._committer.close()
        self._receives.end(nothing_leased)
        self._looks.end(lambda: None)
        clean = self.shard.failure is None
        if clean:
            self._end_log(self.log.release)  # first: another broker need not wait for the snapshot
        self.upkeep.finish(clean=clean)
        self.refusals.settle(last=True)
        self._end_log(lambda: self.log.close(clean=clean))

    def _end_log(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (EscrowError, OSError) as problem:
            logger.warning("closing the log: %s", problem)
