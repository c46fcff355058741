"""Delivery of notices to the operator's webhooks.

Rules:

1. The reporter of an event never waits: the event goes into a bounded queue, which one thread reads.
2. Each webhook has its own thread, queue and connections: a slow or dead one delays no other. When its queue is full,
   the oldest notices are dropped and counted; the log contains all events.
3. A notice is retried, with the same ``webhook-id``, until the response has a status of 200 to 299, for at most
   ``GIVE_UP_SECONDS``. So it arrives at least once, or is given up, which is logged.
4. Redirects and proxy variables are ignored, and response bodies are not read.
"""

from __future__ import annotations

import json
import logging
import queue
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import httpx

from escrowmq.gateway.signing import sign
from escrowmq.gateway.webhooks.configured import Hook
from escrowmq.gateway.webhooks.rules import Notice, Window
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.logs import EVENTS

logger = logging.getLogger(__name__)

MOST_EVENTS = 10_000
"""Events waiting to be counted."""
MOST_NOTICES = 100
"""Notices waiting for one webhook."""
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
"""Pauses (s) between attempts, see :class:`Backoff`."""
GIVE_UP_SECONDS = 3600.0
CLOSE_SECONDS = 2.0
"""Time (s) in which :meth:`Webhooks.close` sends notices that are due."""


class Webhooks(logging.Handler):
    """A log handler that notifies ``hooks`` of events. ``source`` is a JSON object added to each notice, such as the
    broker's URL and folder. A context manager: inside it receives the records of the logger ``escrowmq.events``."""

    def __init__(self, hooks: Sequence[Hook], source: Mapping[str, Any]) -> None:
        super().__init__(logging.INFO)
        self.source = dict(source)
        self._addresses = [_Address(hook) for hook in hooks]
        self._windows = [(one, Window(rule)) for one in self._addresses for rule in one.hook.rules]
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_EVENTS)
        self._counter = threading.Thread(target=self._count, name="escrowmq-webhooks", daemon=True)
        self._previous_level = logging.NOTSET
        self._overflowed = False

    def __enter__(self) -> Webhooks:
        for address in self._addresses:
            address.start()
        self._counter.start()
        events = logging.getLogger(EVENTS)
        self._previous_level = events.level
        events.setLevel(min(logging.INFO, events.getEffectiveLevel()))
        events.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop receiving events; due notices are sent within :data:`CLOSE_SECONDS` or dropped. Idempotent."""
        events = logging.getLogger(EVENTS)
        if self in events.handlers:
            events.removeHandler(self)
            events.setLevel(self._previous_level)
            try:
                self._events.put(None, timeout=CLOSE_SECONDS)
                self._counter.join(CLOSE_SECONDS)
            except queue.Full:
                pass
            until = time.monotonic() + CLOSE_SECONDS
            for address in self._addresses:
                address.stop(until)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the facts of a record; never waits, never raises."""
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            try:
                self._events.put_nowait({**facts, "message": record.getMessage(), "time": record.created})
            except queue.Full:  # the log contains it
                if not self._overflowed:
                    self._overflowed = True
                    logger.warning(
                        "webhooks: more events at once than can be counted; those left out are in the log alone"
                    )

    def test(self) -> list[tuple[Hook, str | None]]:
        """Post a notice of the kind ``test`` to every webhook once. Returns the error of each, None if it succeeded."""
        body = self._body(Notice("test", 1, 0.0, ({"event": "test", "message": "somebody tries this address"},)))
        return [(one.hook, one.post(f"msg_{uuid.uuid4().hex}", body)) for one in self._addresses]

    def _count(self) -> None:
        while True:
            ends = [window.ends for _, window in self._windows if window.ends is not None]
            try:
                facts = self._events.get(timeout=max(0.0, min(ends) - time.monotonic()) if ends else None)
            except queue.Empty:
                facts = {}
            now = time.monotonic()
            for address, window in self._windows:
                self._queue_notice(address, window.due(now))
                if facts and facts.get("event") == window.rule.kind and address.hook.wants(facts):
                    self._queue_notice(address, window.saw(now, _size(facts), facts))
            if facts is None:
                return

    def _queue_notice(self, address: _Address, notice: Notice | None) -> None:
        if notice is not None:
            address.put(self._body(notice))

    def _body(self, notice: Notice) -> bytes:
        """Encode a notice as in Standard Webhooks: {"type", "timestamp", "data"}."""
        data = {
            "count": notice.count,
            "seconds": round(notice.seconds, 3),
            "samples": [_to_json(facts) for facts in notice.samples],
            "source": self.source,
        }
        content = {"type": f"escrowmq.{notice.kind}", "timestamp": datetime.now(UTC).isoformat(), "data": data}
        return json.dumps(content, default=str, separators=(",", ":")).encode()


def _size(facts: Mapping[str, Any]) -> int:
    """Return the number of events in a record: events beyond the individually logged ones share one record."""
    for name in ("more", "count"):
        if isinstance(number := facts.get(name), int) and number > 0:
            return number
    return 1


def _to_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    at = datetime.fromtimestamp(facts["time"], UTC).isoformat() if "time" in facts else None
    return {**{name: value for name, value in facts.items() if name != "event"}, **({"time": at} if at else {})}


class _Address:
    """One webhook: its queue of notices and the thread that posts them."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self._client = httpx.Client(
            follow_redirects=False,
            trust_env=False,
            verify=True if hook.ca_file is None else ssl.create_default_context(cafile=hook.ca_file),
            timeout=hook.timeout,
            limits=httpx.Limits(max_connections=1),
        )
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, bytes, float]] = deque()
        self._dropped = 0
        self._until: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"escrowmq-webhook-{hook.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, body: bytes) -> None:
        with self._changed:
            if len(self._waiting) >= MOST_NOTICES:
                self._waiting.popleft()
                self._dropped += 1
                if self._dropped == 1:
                    logger.warning("webhook %s: too many notices wait; the oldest are dropped", self.hook.name)
            self._waiting.append((f"msg_{uuid.uuid4().hex}", body, time.monotonic() + GIVE_UP_SECONDS))
            self._changed.notify()

    def stop(self, until: float) -> None:
        with self._changed:
            self._until = until
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))
        self._client.close()

    def post(self, identity: str, body: bytes) -> str | None:
        """Post a notice. Returns the error, None if it succeeded."""
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "escrowmq"}
        if self.hook.secret:
            headers |= sign(self.hook.secret, identity, body)
        else:
            headers["webhook-id"] = identity
        try:
            with self._client.stream("POST", self.hook.url, content=body, headers=headers) as response:
                return None if response.is_success else f"status {response.status_code}"
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            RuntimeError,
        ) as problem:  # RuntimeError: the client was closed
            return f"{type(problem).__name__}: {problem}"

    def _work(self) -> None:
        backoff, trouble = Backoff(FIRST_PAUSE, LAST_PAUSE), None
        while (found := self._next()) is not None:
            identity, body, give_up = found
            problem = self.post(identity, body)
            if problem is None:
                if backoff.worked():
                    logger.warning("webhook %s answers again", self.hook.name)
                trouble = None
                self._remove(identity)
                continue
            if problem != trouble:
                logger.warning("webhook %s: %s; it is tried again", self.hook.name, problem)
            trouble, pause = problem, backoff.failed()
            if time.monotonic() >= give_up:
                logger.error("webhook %s: a notice was given up after an hour: %s", self.hook.name, problem)
                self._remove(identity)
            with self._changed:
                if self._changed.wait_for(lambda: self._until is not None, pause):
                    return

    def _next(self) -> tuple[str, bytes, float] | None:
        """Return the oldest notice once there is one; None when stopping."""
        with self._changed:
            while True:
                if self._until is not None and (not self._waiting or time.monotonic() >= self._until):
                    return None
                if self._waiting:
                    return self._waiting[0]
                self._changed.wait()

    def _remove(self, identity: str) -> None:
        with self._changed:
            if self._waiting and self._waiting[0][0] == identity:  # else it was dropped meanwhile
                self._waiting.popleft()
