"""A producer's session with one broker: opened when first needed, kept for the producer's life.

A session is durable (the broker gives it an epoch), so it survives reconnects and restarts of the broker. The broker
forgets it only after ``producer_expiration`` without a request; then it is renewed, and the refused requests are sent
again.

Session requests carry a random process id, so retries are idempotent: a late repeat gets the same session and fences
nobody.
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
from escrowmq.wire.actions.producers import OPEN_SESSION


class Session:
    """One producer group's session on one link. ``number`` is None until it is open. ``named``: other processes may
    use the same instance name. ``policy``: the check-back rules of a group that is new."""

    def __init__(
        self, link: Link, group: str, instance: str, timeout: float, *, named: bool, policy: CheckPolicy | None
    ) -> None:
        self.link = link
        self.number: int | None = None
        self.transactional = False
        self.checker = Checker(Limits())
        self._timeout, self._named = timeout, named
        process = own_number()
        self._request: Any = {"group": group, "instance": instance, "process": process}
        if policy is not None:
            self._request["rules"] = {name: value for name, value in asdict(policy).items() if value is not None}
        self._lock = threading.Lock()

    def ready(self, transactional: bool) -> bool:
        """Return whether the session is open, and for transactions if that is wanted."""
        return self.number is not None and (self.transactional or not transactional)

    def open(self, transactional: bool, attendance: Attendance | None = None, *, patience: float | None = None) -> int:
        """Open the session unless it is :meth:`ready`, once for all callers. Returns its number.

        Raises GROUP_KIND if the group serves the other kind of message, GROUP_RULES if it exists with another check
        policy, Unknown(TIMED_OUT) without an answer in time; with an ``attendance`` Overloaded(BROKER_AWAY) instead, at
        once if the broker counts as away. ``patience``: seconds (None: the timeout).
        """
        patience = self._timeout if patience is None else patience
        deadline = time.monotonic() + patience
        while not self._lock.acquire(timeout=0.05 if attendance else patience):  # another caller waits for the broker
            if attendance is not None and (attendance.away or time.monotonic() >= deadline):
                raise attendance.refusal()
            if time.monotonic() >= deadline:
                raise Unknown(Code.TIMED_OUT, f"{self.link.address}: no session could be opened")
        try:
            if self.number is None or not self.ready(transactional):
                hello = patient_action(self.link, HELLO({}), deadline, attendance)
                self.checker = Checker(Limits.of(hello["limits"]))
                before = self.number if self._named else None  # once it is forgotten, a newer process may have the name
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
        """Open another session, because the broker has forgotten the one with the number ``forgotten``, unless that has
        been done.

        Raises Fenced if a newer process has this producer's name, else as :meth:`open`.
        """
        with self._lock:
            if self.number == forgotten:
                resume = forgotten if self._named else None  # no other process has a name of our own making
                self.number = self._open(self.transactional, resume, time.monotonic() + self._timeout)

    def _open(
        self, transactional: bool, resume: int | None, deadline: float, attendance: Attendance | None = None
    ) -> int:
        request = self._request | {"transactional": transactional} | ({} if resume is None else {"resume": resume})
        return patient_action(self.link, OPEN_SESSION(request), deadline, attendance)["session"]

    def options(self, **more: Any) -> ExchangeOptions:
        return cast(ExchangeOptions, {"session": self.number or 0, **more})
