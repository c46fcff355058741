"""A producer's session with one broker: opened when first needed, kept for the producer's life.

A session is durable (the broker gives it an epoch), so it survives reconnects and restarts of the broker. Only one that
did nothing for the broker's ``producer_expiration`` is forgotten; it is renewed when the broker says so, and what was
refused is sent again.

Each request names its process, that is this object, by a random number: one that was given up, and is served after its
repeat, is answered with the same session, and fences nobody.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Any, cast

from escrowmq.client.links.answers import patient_action
from escrowmq.client.links.presence import Attendance
from escrowmq.errors import Code, Unknown
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker
from escrowmq.model import CheckPolicy
from escrowmq.platform.numbers import own_number
from escrowmq.wire import ExchangeOptions, Link
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.actions.producers import OPEN_SESSION, CheckRules, OpenSession


class Session:
    """One producer group's session on one link. ``number`` is None until it is open. ``named``: other processes may
    come with the same instance name. ``policy``: the check-back rules with which the group is made, if it does not
    exist."""

    def __init__(
        self,
        link: Link,
        group: str,
        instance: str,
        timeout: float,
        *,
        named: bool = True,
        policy: CheckPolicy | None = None,
    ) -> None:
        self.link = link
        self.number: int | None = None
        self.transactional = False
        self.checker = Checker(Limits())
        self._group, self._instance, self._timeout = group, instance, timeout
        self._named = named
        self._process = own_number()
        self._policy = policy
        self._lock = threading.Lock()

    def ready(self, transactional: bool) -> bool:
        """Return whether nothing has to be asked of the broker."""
        return self.number is not None and (self.transactional or not transactional)

    def open(self, transactional: bool, attendance: Attendance | None = None, *, patience: float | None = None) -> int:
        """Return the session's number; opens it if it is not open (or not for transactions, if that is wanted).

        Raises GROUP_KIND if the group serves the other kind of message, GROUP_RULES if it exists with another check
        policy, Unknown(TIMED_OUT) without an answer in time; with an ``attendance`` Overloaded(BROKER_AWAY) instead, at
        once where the broker counts as away. ``patience``: seconds (None: the timeout).
        """
        patience = self._timeout if patience is None else patience
        deadline = time.monotonic() + patience
        while not self._lock.acquire(timeout=0.05 if attendance else patience):
            if attendance is not None and attendance.away:  # another caller has the patience to wait for it
                raise attendance.refusal()
            if time.monotonic() >= deadline:
                if attendance is not None:
                    raise attendance.refusal()
                raise Unknown(Code.TIMED_OUT, f"{self.link.address}: no session could be opened")
        try:
            if self.number is None or (transactional and not self.transactional):
                hello = patient_action(self.link, HELLO({}), deadline, attendance)
                self.checker = Checker(Limits.of(hello["limits"]))
                before = self.number if self._named else None  # if that is forgotten, a newer process may have the name
                self.number = self._open(transactional, before, deadline, attendance)
                self.transactional = transactional
            return self.number
        except Unknown:  # no message was sent
            if attendance is None:
                raise
            raise attendance.refusal() from None
        finally:
            self._lock.release()

    def renew(self, forgotten: int) -> None:
        """Open another session: the broker does not know ``forgotten`` any more, so nothing was done under it. Does
        nothing if that has happened already.

        Raises Fenced if a newer process has this one's name, else as :meth:`open`.
        """
        with self._lock:
            if self.number == forgotten:
                resume = forgotten if self._named else None  # no other process has a name of our own making
                self.number = self._open(self.transactional, resume, time.monotonic() + self._timeout)

    def _open(
        self, transactional: bool, resume: int | None, deadline: float, attendance: Attendance | None = None
    ) -> int:
        request: OpenSession = {
            "group": self._group,
            "instance": self._instance,
            "transactional": transactional,
            "process": self._process,
        }
        if resume is not None:
            request["resume"] = resume
        if self._policy is not None:
            rules = {name: value for name, value in asdict(self._policy).items() if value is not None}
            request["rules"] = cast(CheckRules, rules)
        return patient_action(self.link, OPEN_SESSION(request), deadline, attendance)["session"]

    def options(self, **more: Any) -> ExchangeOptions:
        """Return the options of its exchanges, with ``more``."""
        return cast(ExchangeOptions, {"session": self.number or 0, **more})
