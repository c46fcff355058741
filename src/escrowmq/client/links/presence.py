"""Presence of several brokers: a caller that cannot reach one reports it, and a thread probes it until it answers
again.

A broker is quiet once it has not answered for ``AWAY_SECONDS``: calls that may go elsewhere do. It is away from then
on, too, unless its shard has several brokers: then another of them is about to lead, and it is away after
``TAKE_OVER_SECONDS``. No call waits for one that is away unless it must: what belongs to it fails with BROKER_AWAY or
waits, as its maker chose. One that is silent (it accepts, and says nothing) is noticed like one that refuses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, TypedDict

from escrowmq.client.lanes.returning import rest
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, Overloaded
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import tell_in_child
from escrowmq.wire import Link, ask
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.link import state_of

_log = logging.getLogger(__name__)

AWAY_SECONDS = 1.0
"""Without an answer for this long, a broker is away. Shorter than most restarts; a restart is worth waiting for where
one can."""
TAKE_OVER_SECONDS = 10.0
"""Without an answer for this long a shard of several brokers is away: twice as long as another of them takes to
lead."""
PROBE_SECONDS = 3.0
"""How long one question may remain unanswered."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 1.0


class Missing(TypedDict):
    """A broker that did not answer."""

    broker: Annotated[str, "address of the broker"]
    reason: Annotated[str, "what came of the last try"]


class Attendance:
    """Presence of one of several brokers, for calls to it."""

    def __init__(self, presence: Presence, number: int) -> None:
        self._presence, self._number = presence, number

    @property
    def away(self) -> bool:
        """Return whether the broker is away: nothing should wait for it without need."""
        return self._presence.away(self._number)

    @property
    def quiet(self) -> bool:
        """Return whether the broker has not answered for a while: calls that can go to another one should."""
        return self._presence.quiet(self._number)

    def suspect(self) -> None:
        """Probe the broker on a thread until it answers, because a call failed or is late."""
        self._presence.suspect(self._number)

    def refusal(self) -> Overloaded:
        """Return Overloaded(BROKER_AWAY) with the broker's address and the reason, for a call that was not sent."""
        return self._presence.refusal(self._number)


class Presence:
    """All brokers of one client. ``learn(number, shard)`` notes what a broker said of itself, and raises if that
    cannot be."""

    def __init__(self, links: Sequence[Link], learn: Callable[[int, int], None]) -> None:
        self._links = links
        self._learn = learn
        self._news = threading.Condition()
        self.known = False  # whether everybody was asked once, and one answered
        self._tried = [False] * len(links)  # whether a first question was answered, or came to nothing
        self._met = [False] * len(links)
        self._reasons: list[str | None] = [None] * len(links)  # why it is quiet; None while it is not
        self._silent_since = [0.0] * len(links)
        self._told = [False] * len(links)
        self._probing = [False] * len(links)
        self._waiting: list[list[Callable[[], None]]] = [[] for _ in links]
        self._wrong: EscrowError | None = None
        self._closed = threading.Event()
        tell_in_child(self)

    def on_fork(self) -> None:
        """Stop probing in a forked child: the threads and links are the parent's."""
        self._news, self._closed = threading.Condition(), threading.Event()
        self._closed.set()

    def away(self, number: int) -> bool:
        """Return whether broker ``number`` has not answered for so long that nothing should wait for it."""
        if self._reasons[number] is None:
            return False
        patience = TAKE_OVER_SECONDS if state_of(self._links[number]).several else AWAY_SECONDS
        return time.monotonic() - self._silent_since[number] >= patience or self._wrong is not None

    def quiet(self, number: int) -> bool:
        """Return whether broker ``number`` has not answered for a while: away, or in the middle of a take-over."""
        return self._reasons[number] is not None

    def there(self, number: int) -> bool:
        """Return whether broker ``number`` has answered and is not quiet."""
        return self._met[number] and self._reasons[number] is None

    def missing(self) -> list[Missing]:
        """Return the brokers that are away, each with the reason."""
        return [one for number, one in self._quiet() if self.away(number)]

    def _quiet(self) -> list[tuple[int, Missing]]:
        reasons = enumerate(self._reasons)
        return [(n, {"broker": self._links[n].address, "reason": why}) for n, why in reasons if why is not None]

    def refusal(self, number: int) -> Overloaded:
        """Return Overloaded(BROKER_AWAY) for a call that belongs to broker ``number`` and was not sent."""
        reason = self._reasons[number] or "it does not answer"
        return Overloaded(Code.BROKER_AWAY, f"{self._links[number].address} is away: {reason}")

    def suspect(self, number: int) -> None:
        """Probe broker ``number`` on a thread until it answers, because a call failed or is late. The broker becomes
        quiet only after ``AWAY_SECONDS`` of probes without an answer."""
        with self._news:
            if self._probing[number] or self._closed.is_set():
                return
            self._probing[number] = True
        threading.Thread(target=self._probe, args=(number,), name="escrowmq-presence", daemon=True).start()

    def when_back(self, number: int, call: Callable[[], None]) -> None:
        """Probe broker ``number``, and call ``call`` once, on a thread of its own, when it has answered."""
        with self._news:
            self._waiting[number].append(call)
        self.suspect(number)

    def meet(self, timeout: float) -> None:
        """Probe all brokers at the same time, unless that was done, and wait until each has answered or could not be
        reached, at most ``AWAY_SECONDS`` after the first answer.

        Raises Misuse(BAD_URL) if two addresses are one broker, Overloaded(BROKER_AWAY) if none answers within
        ``timeout``.
        """
        if self.known:
            return
        deadline = time.monotonic() + timeout
        for number, met in enumerate(self._met):
            if not met:
                self.suspect(number)
        with self._news:
            self._news.wait_for(lambda: any(self._met) or self._over(), timeout)
            rest = min(AWAY_SECONDS, deadline - time.monotonic())
            self._news.wait_for(lambda: all(self._tried) or self._over(), max(rest, 0.0))
            if self._wrong is not None:
                raise self._wrong
            self.known = any(self._met)
            if not self.known:
                reasons = "; ".join(f"{one['broker']}: {one['reason']}" for _, one in self._quiet())
                addresses = ", ".join(link.address for link in self._links)
                raise Overloaded(Code.BROKER_AWAY, f"none of {addresses} answers: {reasons or 'they are silent'}")

    def close(self) -> None:
        """Stop all probes."""
        self._closed.set()
        with self._news:
            self._news.notify_all()

    def _over(self) -> bool:
        return self._closed.is_set() or self._wrong is not None

    def _probe(self, number: int) -> None:
        """Send HELLO to broker ``number`` until it answers or refuses, then mark it as present. Marks it as quiet after
        ``AWAY_SECONDS`` without an answer."""
        link, backoff, since = self._links[number], Backoff(FIRST_BACKOFF, LAST_BACKOFF), time.monotonic()
        while not self._closed.is_set():
            try:
                self._learn(number, ask(link, HELLO({}), PROBE_SECONDS)["shard"])
                return self._is_there(number)
            except Misuse as wrong:
                reason, self._wrong = wrong.message, wrong
            except EscrowError as problem:
                if problem.code is Code.CLOSED:
                    return
                if problem.code not in AWAY:  # it refuses, so it is there; the calls will fail with it
                    return self._is_there(number)
                reason = problem.message
            if time.monotonic() - since >= AWAY_SECONDS or self._wrong is not None:
                self._is_quiet(number, reason, since)
            with self._news:
                self._tried[number] = True
                self._news.notify_all()
            rest(link, backoff.failed(), self._closed)

    def _is_there(self, number: int) -> None:
        with self._news:
            was, self._reasons[number], self._told[number] = self._told[number], None, False
            self._met[number], self._probing[number], self._tried[number] = True, False, True
            calls, self._waiting[number] = self._waiting[number], []
            self._news.notify_all()
        if was:
            _log.info("%s is back", self._links[number].address)
        for call in calls:
            threading.Thread(target=call, name="escrowmq-back", daemon=True).start()

    def _is_quiet(self, number: int, reason: str, since: float) -> None:
        with self._news:
            self._reasons[number], self._silent_since[number] = reason, since
            self._news.notify_all()
        if self.away(number) and not self._told[number]:  # one line, not one per try
            self._told[number] = True
            _log.warning("%s is away, going on with the other brokers: %s", self._links[number].address, reason)
