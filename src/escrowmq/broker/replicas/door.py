"""Entry point of a replica: forwards calls to the engine while leading, otherwise rejects them with the leader's URL.

A server keeps one door for the life of the process. ``hello``, ``health`` and ``stats`` are answered in every role.
All other calls to a standby are rejected with NOT_LEADER: they were not applied, and the hint is the leader's URL, if
it is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from escrowmq.broker.actions.brokers import described
from escrowmq.broker.calls import Calls
from escrowmq.broker.failures import answer
from escrowmq.broker.reads.deliveries import Allowance
from escrowmq.broker.recording import recorded
from escrowmq.broker.replicas.candidate import rank_of
from escrowmq.broker.requests import checked
from escrowmq.broker.writer.checkback import Listener
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.telling import Refusals
from escrowmq.errors import Code, EscrowError, error
from escrowmq.settings import BrokerSettings
from escrowmq.wire import BatchStream, Exchange, Json, Parcel
from escrowmq.wire.actions import brokers
from escrowmq.wire.actions.action import Nothing
from escrowmq.wire.parcels import Done

RETRY_SECONDS = 0.2  # retry interval of rejected callers
HAND_OVER_SECONDS = 10.0  # how long the answer to `step_down` waits for another leader
LEADER, STANDBY = "leader", "standby"
PROBES_PER_SECOND = 500.0
USUAL_SECONDS = 0.15  # probe interval of clients without advice; shorter ones need no advice
LONGEST_SECONDS = 5.0  # the end of the schedule: later probes share its last slots


class ProbeLimit:
    """The interval that a standby advises to clients that probe it, so that thousands do not overload the node that is
    about to lead: each ``hello`` gets the next free slot, ``PROBES_PER_SECOND`` a second. One thread at a time."""

    def __init__(self) -> None:
        self._free = 0.0  # when the next free slot comes; seconds of a monotonic clock

    def again_ms(self, now: float) -> int:
        """Count one probe by a client. Returns after how many milliseconds this client may probe again; 0: at any
        time."""
        self._free = min(max(self._free, now) + 1 / PROBES_PER_SECOND, now + LONGEST_SECONDS)
        ahead = self._free - now
        return round(ahead * 1000) if ahead > USUAL_SECONDS else 0


@dataclass(frozen=True, slots=True)
class Followed:
    """The state of a standby. ``time_us``: its clock at that time; ``away``: Kafka does not answer."""

    leader: str | None = None
    shard: int = 0
    epoch: int = 0
    position: int = 0
    time_us: int = 0
    silent_for: float = 0.0
    away: bool = False
    problem: str = ""


class Door:
    """The calls of one node, from any thread; see :class:`escrowmq.broker.calls.Dispatcher`."""

    def __init__(self, settings: BrokerSettings, replicas: list[str], url: str = "") -> None:
        self.settings = settings
        self.url = url  # where clients reach this node
        self.beside: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self.take_overs = 0
        self.on_step_down: Callable[[], None] = lambda: None  # makes the node hand over
        self.on_doubt: Callable[[], None] = lambda: None  # breaks the connections of all clients
        self._replicas = replicas
        self._refusals = Refusals()
        self._lock = threading.Condition()
        self._led: Calls | None = None
        self._in_doubt = False
        self._followed = Followed(problem="it has not reached the log yet")
        self._carrier: int | None = None
        self._probes = ProbeLimit()

    # The node

    def rank(self, leader: str | None) -> int | None:
        """Return this node's index among the named replicas without the leader (see :func:`rank_of`); None if it is not
        named."""
        return rank_of(self.url, self._replicas, leader)

    def begin_leading(self, calls: Calls) -> None:
        """Forward all calls to ``calls`` from now on: this node leads."""
        with self._lock:
            if self._carrier is not None:
                calls.engine.run_rounds_here(self._carrier)
            calls.beside = self.beside
            self.take_overs += 1
            self._led, self._in_doubt = calls, False
            self._lock.notify_all()

    def begin_following(self, followed: Followed) -> None:
        """Reject calls from now on: this node does not lead. ``followed``: what it knows of the log, for the answers to
        ``hello``, ``health`` and ``stats``."""
        with self._lock:
            self._led, self._followed = None, followed
            self._lock.notify_all()

    def set_doubt(self, in_doubt: bool) -> None:
        """Set whether the last proof of leading is too old. Then another node may lead: calls are rejected, and waiting
        clients are disconnected, so that they look for it. The engine stays, and continues if no other node leads."""
        with self._lock:
            led, new = self._led, in_doubt and not self._in_doubt
            if led is not None and new:
                text = "it cannot prove that it still leads: Kafka does not answer"
                self._followed = replace(_last_state(led), away=True, problem=text)
            self._in_doubt = in_doubt
        if new:
            self.on_doubt()

    @property
    def _calls(self) -> Calls | None:
        """The calls of the engine; None while calls are rejected."""
        return None if self._in_doubt else self._led

    @property
    def engine(self) -> Engine | None:
        """The engine of a node that leads; None otherwise."""
        calls = self._calls
        return calls.engine if calls is not None else None

    def wait_for_leader(self, timeout: float) -> str | None:
        """Wait for a leader. Returns its URL, or None after ``timeout`` seconds."""
        with self._lock:
            self._lock.wait_for(lambda: self._leader() is not None, timeout)
            return self._leader()

    def _leader(self) -> str | None:
        return self.url if self._calls is not None else self._followed.leader

    # Calls of the server

    @property
    def identity(self) -> tuple[int, int]:
        """Number of the shard and how often its log was opened, as far as this node has followed it."""
        calls, followed = self._calls, self._followed
        return calls.identity if calls is not None else (followed.shard, followed.epoch)

    def refused(self, code: Code) -> None:
        """Count a call that the server refused with this code."""
        calls = self._calls
        (calls.refused if calls is not None else self._refusals.count)(code)

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.broker.calls.Calls.exchange`."""
        if (calls := self._calls) is None:
            return answer(Future(), self._refusal())
        return calls.exchange(kind, batch, options, source, allowance)

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.parcel`."""
        if (calls := self._calls) is None:
            done(self._refusal())
        else:
            calls.parcel(parcel, done, sound_bytes, source)

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """See :meth:`escrowmq.broker.calls.Calls.action`."""
        calls = self._calls
        if name == brokers.STEP_DOWN.name:
            return self._step_down(request)
        if name not in _ANSWERED:
            return self._leading().action(name, request)
        if calls is not None:
            try:
                return {**calls.action(name, request), **_ANSWERED[name][1](self)}
            except EscrowError as problem:
                if problem.code not in (Code.SHARD_STOPPED, Code.NOT_LEADER):
                    raise
        checked(Nothing, request)
        more = self.beside.get(name)
        return {**_ANSWERED[name][0](self), **_ANSWERED[name][1](self), **(more() if more is not None else {})}

    def read(self, request: Mapping[str, object]) -> BatchStream:
        """See :meth:`escrowmq.broker.calls.Calls.read`."""
        return self._leading().read(request)

    def watch(self, session: object) -> Listener:
        """See :meth:`escrowmq.broker.calls.Calls.watch`."""
        return self._leading().watch(session)

    def leave(self, listener: Listener) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.leave`."""
        if (calls := self._led) is not None:
            calls.leave(listener)
        else:
            listener.close()

    def give_back_unseen(self, group: str, delivery: pa.RecordBatch) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.give_back_unseen`. Without leading, the leases just expire."""
        if (calls := self._led) is not None:
            calls.give_back_unseen(group, delivery)

    def run_rounds_here(self) -> None:
        """See :meth:`escrowmq.broker.writer.engine.Engine.run_rounds_here`."""
        with self._lock:
            self._carrier = threading.get_ident()
            if self._led is not None:
                self._led.engine.run_rounds_here(self._carrier)

    def run(self) -> None:
        """See :meth:`escrowmq.broker.writer.engine.Engine.run`."""
        if (calls := self._led) is not None:
            calls.run()

    # Answers of its own

    def _leading(self) -> Calls:
        if (calls := self._calls) is None:
            raise self._refusal()
        return calls

    def _refusal(self) -> EscrowError:
        leader = self._followed.leader
        if leader is None:
            return error(Code.NOT_LEADER, "this broker is a standby; no broker leads now", retry_after=RETRY_SECONDS)
        return error(Code.NOT_LEADER, f"this broker is a standby; {leader} leads", leader, RETRY_SECONDS)

    def _step_down(self, request: Mapping[str, object]) -> Json:
        given = checked(brokers.STEP_DOWN.request, request)
        calls = self._leading()
        epoch = calls.engine.log.epoch
        if given["epoch"] != epoch:
            text = f"the log was opened again: this is epoch {epoch}, not {given['epoch']}"
            raise error(Code.BAD_REQUEST, text, "it was handed over already; `hello` names the leader")
        with recorded(calls.engine, brokers.STEP_DOWN, given, url=self.url) as done:
            with self._lock:
                if self._calls is not calls:
                    raise self._refusal()
                self._led, self._followed = None, _last_state(calls)
            done.ended = {"epoch": epoch, "stepped_down": True}
        began = time.monotonic()
        self.on_step_down()
        leader = self.wait_for_leader(HAND_OVER_SECONDS)
        return {"epoch": epoch, "seconds": time.monotonic() - began} | _named(leader)

    def _hello(self) -> Json:
        known = self._followed
        if not known.shard:
            raise error(Code.NOT_LEADER, "this broker has not yet read the beginning of the log", "", RETRY_SECONDS)
        with self._lock:
            again_ms = self._probes.again_ms(time.monotonic())
        more = {"again_ms": again_ms} if again_ms else {}
        return {**described(self.settings, known.shard, known.epoch, known.time_us), **more}

    def _role(self) -> Json:
        role = LEADER if self._calls is not None else STANDBY
        return {"role": role, "replicas": self.replicas} | _named(self._leader())

    @property
    def replicas(self) -> list[str]:
        """URLs of the nodes: those in the configuration, this one, and the leader."""
        return [url for url in dict.fromkeys([*self._replicas, self.url, self._leader()]) if url is not None]

    def _health(self) -> Json:
        known = self._followed
        if known.problem:
            return {"status": STANDBY, "reason": known.problem}
        who = f"{known.leader} leads" if known.leader is not None else "no broker leads now"
        away = "; Kafka does not answer" if known.away else ""
        return {"status": STANDBY, "reason": f"{who}; followed to position {known.position:,}{away}"}

    def _stats(self) -> Json:
        known = self._followed
        silent = known.silent_for if known.silent_for < 1e9 else -1.0
        return {"log_position": known.position, "log_epoch": known.epoch, "log_silent_seconds": silent}

    def _numbers(self) -> Json:
        calls = self._calls
        more = {} if calls is None else {"log_epoch": calls.engine.log.epoch, "log_silent_seconds": 0.0}
        return {"leads": float(calls is not None), "take_overs_total": self.take_overs, **more}


def _last_state(led: Calls) -> Followed:
    """Return what a node that stopped leading knows of the log: shard, epoch, end and time, and no leader."""
    log = led.engine.log
    return Followed(None, log.shard, log.epoch, log.next_position, led.engine.clock.now_us())


def _named(leader: str | None) -> Json:
    return {} if leader is None else {"leader": leader}


_ANSWERED: dict[str, tuple[Callable[[Door], Json], Callable[[Door], Json]]] = {
    brokers.HELLO.name: (Door._hello, Door._role),
    brokers.HEALTH.name: (Door._health, lambda _: {}),
    brokers.STATS.name: (Door._stats, Door._numbers),
}
"""By the action's name: the answer of a standby, and the additions in every role."""
