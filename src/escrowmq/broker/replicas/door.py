"""The calls of a node: to its engine while it leads; refused, with who leads, while it does not.

Carriers keep one door for as long as the process runs. ``hello``, ``health`` and ``stats`` are answered in every role.
Everything else is refused by NOT_LEADER while the node follows: surely not applied, and the hint is the leader's URL,
if it is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from escrowmq.broker.actions.brokers import described
from escrowmq.broker.calls import Calls
from escrowmq.broker.failures import answer
from escrowmq.broker.reads.deliveries import Allowance
from escrowmq.broker.recording import recorded
from escrowmq.broker.replicas.asked import Asked
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

RETRY_SECONDS = 0.2  # when a caller who was refused may ask again
HAND_OVER_SECONDS = 10.0  # how long the answer to `step_down` waits for another leader
LEADER, STANDBY = "leader", "standby"


@dataclass(frozen=True, slots=True)
class Followed:
    """The knowledge of a standby. ``time_us``: its clock, then; ``away``: Kafka does not answer."""

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
        self._asked = Asked()

    # The node

    def rank(self, leader: str | None) -> int | None:
        """Return this node's place among the followers of a leader."""
        return rank_of(self.url, self._replicas, leader)

    def leads(self, calls: Calls) -> None:
        """From now on calls are taken, by these."""
        with self._lock:
            if self._carrier is not None:
                calls.engine.run_rounds_here(self._carrier)
            calls.beside = self.beside
            self.take_overs += 1
            self._led, self._in_doubt = calls, False
            self._lock.notify_all()

    def follows(self, followed: Followed) -> None:
        """From now on calls are refused; what is known meanwhile."""
        with self._lock:
            self._led, self._followed = None, followed
            self._lock.notify_all()

    def doubts(self, in_doubt: bool) -> None:
        """Whether it is too long ago that this node surely led. Then another one may lead: calls are refused, and
        clients whose answers will not come are released, to look for it. The engine stays: if nobody else leads, it
        goes on."""
        with self._lock:
            led, new = self._led, in_doubt and not self._in_doubt
            if led is not None and new:
                log = led.engine.log
                text = "it does not know any more whether it leads: Kafka does not answer"
                self._followed = Followed(
                    None, log.shard, log.epoch, log.next_position, led.engine.clock.now_us(), 0.0, True, text
                )
            self._in_doubt = in_doubt
        if new:
            self.on_doubt()

    @property
    def _calls(self) -> Calls | None:
        """The calls of the engine, while they are taken."""
        return None if self._in_doubt else self._led

    @property
    def engine(self) -> Engine | None:
        """The engine of a node that leads."""
        calls = self._calls
        return calls.engine if calls is not None else None

    def wait_for_leader(self, timeout: float) -> str | None:
        """Return the URL of who leads, when somebody does; None after ``timeout`` seconds."""
        with self._lock:
            self._lock.wait_for(lambda: self._leader() is not None, timeout)
            return self._leader()

    def _leader(self) -> str | None:
        return self.url if self._calls is not None else self._followed.leader

    # What carriers call

    @property
    def identity(self) -> tuple[int, int]:
        """Number of the shard and how often its log was opened, as far as this node has followed it."""
        calls, followed = self._calls, self._followed
        return calls.identity if calls is not None else (followed.shard, followed.epoch)

    def refused(self, code: Code) -> None:
        """Count a call that the server refused with this code."""
        calls = self._calls
        (calls.refused if calls is not None else self._refusals.saw)(code)

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.broker.calls.Calls.exchange`."""
        calls = self._calls
        if calls is None:
            return answer(Future(), self._refusal())
        return calls.exchange(kind, batch, options, source, allowance)

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.parcel`."""
        calls = self._calls
        if calls is None:
            done(self._refusal())
        else:
            calls.parcel(parcel, done, sound_bytes, source)

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """One JSON question."""
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
        """Remove a check-back subscription whose connection is gone; a stopped engine has closed its own."""
        calls = self._led
        if calls is not None:
            calls.leave(listener)
        else:
            listener.close()

    def give_back_unseen(self, group: str, delivery: pa.RecordBatch) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.give_back_unseen`. The leases are in the log: the leader now knows
        them, and their time ends them."""
        calls = self._led
        if calls is not None:
            calls.give_back_unseen(group, delivery)

    def run_rounds_here(self) -> None:
        """Mark the calling thread as one of the server's own."""
        with self._lock:
            self._carrier = threading.get_ident()
            if self._led is not None:
                self._led.engine.run_rounds_here(self._carrier)

    def run(self) -> None:
        """See that what the carrier's thread submitted is worked on."""
        calls = self._led
        if calls is not None:
            calls.run()

    # Answers of its own

    def _leading(self) -> Calls:
        calls = self._calls
        if calls is None:
            raise self._refusal()
        return calls

    def _refusal(self) -> EscrowError:
        leader = self._followed.leader
        if leader is None:
            return error(Code.NOT_LEADER, "this broker follows, and nobody leads just now", retry_after=RETRY_SECONDS)
        return error(Code.NOT_LEADER, f"this broker follows; {leader} leads", leader, RETRY_SECONDS)

    def _step_down(self, request: Mapping[str, object]) -> Json:
        asked = checked(brokers.STEP_DOWN.request, request)
        calls = self._leading()
        epoch = calls.engine.log.epoch
        if asked["epoch"] != epoch:
            text = f"the log was opened again: this is epoch {epoch}, not {asked['epoch']}"
            raise error(Code.BAD_REQUEST, text, "it was handed over already; ask `hello` who leads")
        with recorded(calls.engine, brokers.STEP_DOWN, asked, url=self.url) as done:
            with self._lock:
                if self._calls is not calls:
                    raise self._refusal()
                self._led, self._followed = None, self._stood(calls)
            done.ended = {"epoch": epoch, "stepped_down": True}
        began = time.monotonic()
        self.on_step_down()
        leader = self.wait_for_leader(HAND_OVER_SECONDS)
        said: Json = {"epoch": epoch, "seconds": time.monotonic() - began}
        return said if leader is None else {**said, "leader": leader}

    def _stood(self, calls: Calls) -> Followed:
        log = calls.engine.log
        return Followed(None, log.shard, log.epoch, log.next_position, calls.engine.clock.now_us())

    def _hello(self) -> Json:
        known = self._followed
        if not known.shard:
            raise error(Code.NOT_LEADER, "this broker has not yet read the beginning of the log", "", RETRY_SECONDS)
        said: Json = dict(described(self.settings, known.shard, known.epoch, known.time_us))
        with self._lock:
            again_ms = self._asked.again_ms(time.monotonic())
        return {**said, "again_ms": again_ms} if again_ms else said

    def _role(self) -> Json:
        leading, leader = self._calls is not None, self._leader()
        said: Json = {"role": LEADER if leading else STANDBY, "replicas": self.replicas}
        return said if leader is None else {**said, "leader": leader}

    @property
    def replicas(self) -> list[str]:
        """URLs of the nodes: those that were configured, this one, and the one that leads."""
        leader = self._leader()
        return list(dict.fromkeys([*self._replicas, self.url, *([leader] if leader is not None else [])]))

    def _health(self) -> Json:
        known = self._followed
        if known.problem:
            return {"status": STANDBY, "reason": known.problem}
        who = f"{known.leader} leads" if known.leader is not None else "nobody leads just now"
        away = "; Kafka does not answer" if known.away else ""
        return {"status": STANDBY, "reason": f"{who}; followed to position {known.position:,}{away}"}

    def _stats(self) -> Json:
        known = self._followed
        return {
            "log_position": known.position,
            "log_epoch": known.epoch,
            "log_silent_seconds": known.silent_for if known.silent_for < 1e9 else -1.0,
        }

    def _numbers(self) -> Json:
        calls = self._calls
        said: Json = {"leads": float(calls is not None), "take_overs_total": self.take_overs}
        if calls is not None:
            said |= {"log_epoch": calls.engine.log.epoch, "log_silent_seconds": 0.0}
        return said


_ANSWERED: dict[str, tuple[Callable[[Door], Json], Callable[[Door], Json]]] = {
    brokers.HELLO.name: (Door._hello, Door._role),
    brokers.HEALTH.name: (Door._health, lambda _: {}),
    brokers.STATS.name: (Door._stats, Door._numbers),
}
"""By the action's name: the answer of a node that follows, and what is added in every role."""
