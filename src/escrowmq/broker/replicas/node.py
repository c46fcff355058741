"""One node of a shard: standby → leader → standby, in one process, on a thread of its own.

Each *term* begins with opening the replica in the folder and folding its ledger. The node follows until it may claim
(``candidate.py``), takes over with its warm ledger, and leads until its shard stops, because another node claimed the
log, the log failed, it steps down, or the process ends. Events that the ledger of a leader has applied and the log did
not accept are discarded with it: the next term folds the log again.

A permanent error (a folder of something else, a damaged log) ends the node: :attr:`Node.failure`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.metadata import version
from math import inf

from escrowmq.broker.calls import Calls
from escrowmq.broker.reads.lookups import warm_up
from escrowmq.broker.recording import resolve
from escrowmq.broker.replicas.candidate import Candidate, Step
from escrowmq.broker.replicas.door import Door, Followed
from escrowmq.broker.replicas.proof import LeaderProof
from escrowmq.broker.replicas.warm import WarmLedger
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, Corrupt, Denied, EscrowError, Misuse, error
from escrowmq.log.seam import Replica, ReplicatedLog
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.platform.failpoints import reach
from escrowmq.platform.logs import tell
from escrowmq.settings import BrokerSettings

LOOK_SECONDS = 0.05  # poll interval of the node's thread for orders and the state of the log
PAUSE_SECONDS = 0.5  # after a term that ended by a fault
DOUBT = 1.25  # age of a proof, in silences, at which a leader disconnects clients: the longest wait of a standby
HOLDS_BACK = 3.0  # silences for which a node that stepped down claims nothing, unless another one leads before
BEGIN_SECONDS = 5.0  # how long a start waits for the folder to be opened; only the node itself waits for Kafka
AWAY = "Kafka does not answer: no broker can claim the log"
LEAST_SILENCE = 1.0  # leaders send a heartbeat every half second

logger = logging.getLogger(__name__)


class Node:
    """A node over a folder. ``opening`` opens its replica; ``door`` receives its calls. ``give_up``, from another
    thread, ends the waiting of the replica, or of its opening."""

    def __init__(
        self,
        opening: Callable[[], Replica],
        door: Door,
        settings: BrokerSettings,
        *,
        silence: float,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        if not silence >= LEAST_SILENCE:
            raise error(Code.BAD_SETTING, f"silence is {silence:g} s; it must be at least {LEAST_SILENCE:g} s")
        self._opening, self._give_up = opening, give_up
        self._door = door
        self._settings = settings
        self._silence = silence
        self._clock = clock or SystemClock()
        self._random = rng or random.Random()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._steps_down = False
        self._holds_back = 0.0
        self._logged_silence = 0.0
        self._leading = False
        self._followed = False  # whether it has followed the log in this process, so its settings are right
        self._logged = ""  # the last problem that was logged
        self._thread = threading.Thread(target=self._work, name="escrowmq-node", daemon=True)
        self._begun = threading.Event()
        self.failure: BaseException | None = None  # why it ended by itself
        door.on_step_down = self._step_down

    # Control

    def start(self) -> None:
        """Start the thread that opens the folder and follows the log. Waits up to ``BEGIN_SECONDS`` for the folder;
        raises its error if opening it failed for good."""
        self._thread.start()
        self._begun.wait(BEGIN_SECONDS)
        if isinstance(self.failure, EscrowError):
            self._thread.join()
            raise self.failure

    def stop(self) -> None:
        """Stop leading or following, and wait for the node's thread; a leader releases the log."""
        self._stopping.set()
        self._wake.set()
        if not self._leading:
            self._give_up()  # of waiting for Kafka
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def ended(self) -> bool:
        """Return whether the node ended by itself, by a permanent error."""
        return self.failure is not None

    def _step_down(self) -> None:
        self._steps_down = True
        self._wake.set()

    # Terms

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._term()
                except EscrowError as problem:
                    if not self._stopping.is_set():
                        if not passes(problem, self._followed):
                            raise
                        text = f"it cannot follow the log, and tries again: {problem}"
                        self._log_trouble("term", text)
                        self._door.begin_following(Followed(problem=text))
                        self._begun.set()
                        self._stopping.wait(PAUSE_SECONDS)
        except BaseException as problem:
            self.failure = problem
            if not isinstance(problem, EscrowError):  # its process raises an EscrowError
                logger.error("the node ended: %s", problem, exc_info=True)
            self._door.begin_following(Followed(problem=f"the node ended: {problem}"))
        finally:
            self._begun.set()

    def _log_trouble(self, event: str, what: str = "") -> None:
        """Log the problem ``what`` as a warning, unless it was logged last; without one, log that the last problem is
        over."""
        if what and what != self._logged:
            tell(logging.WARNING, event, what, cause=what)
        elif self._logged and not what:
            tell(logging.WARNING, "over", "it follows the log again")
        self._logged = what

    def _term(self) -> None:
        replica = self._opening()
        with ExitStack() as unclaimed:
            unclaimed.callback(replica.close)
            with closing(WarmLedger(replica, self._settings.snapshot_bytes)) as warm:
                self._report(replica, warm)
                self._log_trouble("term")
                self._followed = True
                self._begun.set()
                if not self._follow(replica, warm):
                    return
                self._report(replica, warm)
                log = replica.take_over(version("escrowmq"), self._silence)
                unclaimed.pop_all()  # the log closes the replica
                self._leading = True
                try:
                    self._lead(log, warm)
                finally:
                    self._leading = False

    def _follow(self, replica: Replica, warm: WarmLedger) -> bool:
        """Follow the log and apply its frames to the ledger. Returns True when it is time to claim the log, False to
        stop."""
        candidate = Candidate(self._silence, self._random, time.monotonic(), self._holds_back)
        self._holds_back = 0.0
        away, leader = False, replica.leader
        while not self._stopping.is_set():
            self._report(replica, warm, away)
            silent_for, silence = replica.silent_for(), replica.leaders_silence
            leader = replica.leader or leader  # one that released the log does not claim it
            self._check_silence(leader, silence)
            if replica.leader not in (None, self._door.url):
                candidate.another_leads()
            step, seconds = candidate.next(silent_for, time.monotonic(), silence, self._door.rank(leader))
            if step is Step.CLAIM:
                why = "it was released" if silent_for == inf else f"no record for {silent_for:.2f} s"
                tell(logging.INFO, "claims", f"claims the log: {why}", silent_for=silent_for)
                return True
            if step is Step.ASK:
                behind = replica.is_behind()
                away = behind is None
                self._log_trouble("away", AWAY if away else "")
                candidate.answered(behind, time.monotonic())
            else:
                warm.take(replica.follow(min(seconds, LOOK_SECONDS)))
                warm.keep()
        return False

    def _check_silence(self, leader: str | None, silence: float) -> None:
        """Log a warning, once, if the leader's ``--silence`` (seconds; 0: unknown) differs from this node's: the longer
        one applies."""
        if silence not in (0.0, self._silence, self._logged_silence):
            own = f"{self._silence:g}"
            text = f"{leader} was started with --silence {silence:g}, this broker with {own}: the longer one applies"
            tell(logging.WARNING, "silence", text, leader=leader, its=silence, own=self._silence)
        self._logged_silence = silence

    def _report(self, replica: Replica, warm: WarmLedger, away: bool = False) -> None:
        log, now_us, silent = replica.log, self._clock.now_us(), replica.silent_for()
        leader = replica.leader if replica.leader != self._door.url else None  # an earlier run of this node
        self._door.begin_following(Followed(leader, log.shard, log.epoch, warm.position, now_us, silent, away))

    # Leading

    def _lead(self, log: ReplicatedLog, warm: WarmLedger) -> None:
        """Lead from the claim of the log to the end of this term: start an engine, forward calls to it, and stop it."""
        try:
            folded = warm.lead(log)
            reach("node.claimed")
            proof = LeaderProof(log, self._silence)
            engine = Engine(log, self._clock, self._settings, folded, proof)
            resolve(log.acts, engine.shard.ledger, engine.clock.now_us())
        except BaseException:
            log.close(clean=False)
            raise
        calls = Calls(engine)
        engine.start()
        self._door.begin_leading(calls)
        facts = {"shard": log.shard, "epoch": log.epoch, "position": log.next_position}
        tell(logging.INFO, "leads", f"leads: shard {log.shard:08x}, epoch {log.epoch}", **facts)
        try:
            warm_up(engine)
            self._watch(engine, log, proof)
        finally:
            self._end(engine, calls, log)

    def _watch(self, engine: Engine, log: ReplicatedLog, proof: LeaderProof) -> None:
        """Wait until this term of leading must end. Meanwhile reject calls whenever the last proof of leading is too
        old."""
        while not (self._stopping.is_set() or self._steps_down or log.ended or engine.shard.failure is not None):
            self._door.set_doubt(proof.age > DOUBT * self._silence)
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()

    def _end(self, engine: Engine, calls: Calls, log: ReplicatedLog) -> None:
        """End a term of leading: reject calls, answer those in progress, and close the log; it is released unless it
        has failed."""
        self._door.begin_following(Followed(None, log.shard, log.epoch, log.next_position, self._clock.now_us()))
        if log.fenced and engine.shard.failure is None:
            engine.shard.stop(error(Code.LOG_FAILED, "another broker leads the shard now"))
        elif (ended := log.ended) is not None and engine.shard.failure is None:
            engine.shard.stop(ended)  # found by a heartbeat
        failed = engine.shard.failure
        if failed is None:
            calls.give_back()
        engine.stop()
        calls.close()
        if self._steps_down:
            self._steps_down, self._holds_back = False, HOLDS_BACK * self._silence
        if failed is not None:
            cause = "another broker leads" if log.fenced else failed.message
            tell(logging.WARNING, "follows", f"stopped leading, and follows: {cause}", cause=cause)
            if not log.fenced:
                self._stopping.wait(PAUSE_SECONDS)


def passes(problem: EscrowError, followed: bool) -> bool:
    """Return whether the error that ended a term may be temporary, so that the node begins another one. If it has
    ``followed`` the log, a denied or missing topic was changed at Kafka, and may be changed back."""
    if problem.code in (Code.DENIED, Code.UNKNOWN_TOPIC):
        return followed
    if isinstance(problem, Misuse | Denied):
        return False
    return not isinstance(problem, Corrupt) or problem.code is Code.LOG_FAILED
