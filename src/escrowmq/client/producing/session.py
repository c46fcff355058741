"""A producer's session with one broker: opened when first needed, kept for the producer's life.

A session is durable (the broker gives it an epoch), so it survives reconnects and restarts of the broker. Only one that did nothing for
the broker's ``producer_expiration`` is forgotten; it is renewed when the broker says so, and what was refused is sent again.
"""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from escrowmq.client.links.patience import patient_action
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker
from escrowmq.wire import ExchangeOptions, Link
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.actions.producers import OPEN_SESSION, OpenSession


class Session:
    """One producer group's session on one link. ``number`` is None until it is open. ``named``: other processes may come
    with the same instance name."""

    def __init__(self, link: Link, group: str, instance: str, timeout: float, *, named: bool = True) -> None:
        self.link = link
        self.number: int | None = None
        self.transactional = False
        self.checker = Checker(Limits())
        self._group, self._instance, self._timeout = group, instance, timeout
        self._named = named
        self._lock = threading.Lock()

    def ready(self, transactional: bool) -> bool:
        """Whether nothing has to be asked of the broker."""
        return self.number is not None and (self.transactional or not transactional)

    def open(self, transactional: bool) -> int:
        """The session's number; opens it if it is not open (or not for transactions, if that is wanted).

        Raises GROUP_KIND if the group serves the other kind of message, Unknown(TIMED_OUT) without an answer in time.
        """
        with self._lock:
            if self.number is None or (transactional and not self.transactional):
                deadline = time.monotonic() + self._timeout
                hello = patient_action(self.link, HELLO({}), deadline)
                self.checker = Checker(Limits.of(hello["limits"]))
                self.number = self._opened(transactional, None, deadline)
                self.transactional = transactional
            return self.number

    def renew(self, forgotten: int) -> None:
        """Open another session: the broker does not know ``forgotten`` any more, so nothing was done under it. Does nothing
        if that has happened already.

        Raises Fenced if a newer process has this one's name, else as :meth:`open`.
        """
        with self._lock:
            if self.number == forgotten:
                resume = forgotten if self._named else None  # no other process has a name of our own making
                self.number = self._opened(self.transactional, resume, time.monotonic() + self._timeout)

    def _opened(self, transactional: bool, resume: int | None, deadline: float) -> int:
        request: OpenSession = {"group": self._group, "instance": self._instance, "transactional": transactional}
        if resume is not None:
            request["resume"] = resume
        return patient_action(self.link, OPEN_SESSION(request), deadline)["session"]

    def options(self, **more: Any) -> ExchangeOptions:
        """The options of its exchanges, with ``more``."""
        return cast(ExchangeOptions, {"session": self.number or 0, **more})
