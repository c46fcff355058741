"""The leases of the messages that a worker holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from escrowmq.client.consuming.received import Received
from escrowmq.errors import Code, EscrowError

_log = logging.getLogger(__name__)


class Leases:
    """Received messages by delivery tag. A thread extends their leases by ``seconds`` until they are settled."""

    def __init__(self, seconds: float, every: float) -> None:
        self._seconds, self._every = seconds, every
        self._held: dict[str, Received] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, tag: str, message: Received) -> None:
        """Keep the lease of a message until :meth:`settle`."""
        with self._lock:
            self._held[tag] = message
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._keep, name="escrowmq-celery-leases", daemon=True)
                self._thread.start()

    def settle(self, tag: str, act: Callable[..., None], *given: Any) -> None:
        """Call ``act`` with the message of a tag, once; do nothing for a message that has no lease."""
        with self._lock:
            message = self._held.pop(tag, None)
        if message is not None:
            act(message, *given)

    def close(self) -> None:
        """Stop to extend."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        while not self._closed.wait(self._every):
            with self._lock:
                held = list(self._held.items())
            for tag, message in held:
                try:
                    message.extend(self._seconds)
                except EscrowError as problem:
                    if problem.code is not Code.LEASE_LOST:  # the broker is away, and the next ones would fail too
                        _log.warning("%d leases could not be extended: %s", len(held), problem)
                        break
                    with self._lock:
                        lost = self._held.pop(tag, None)
                    if lost is not None:  # else it was settled meanwhile
                        _log.warning("the lease of %r expired: its task may run a second time", message)
