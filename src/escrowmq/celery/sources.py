"""Where a channel's messages come from: the consumer group of a work queue, or the readers of a broadcast."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

from kombu.utils.json import loads

from escrowmq.celery.leases import Leases
from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import Received
from escrowmq.client.reading.reader import Reader
from escrowmq.errors import AWAY, EscrowError
from escrowmq.platform.backoff import Backoff

_log = logging.getLogger(__name__)
WAIT_SECONDS = 1.0
"""Time (s) that a receive waits at the broker: closing waits for it."""
BAD = (ValueError, TypeError, KeyError)
"""Errors that :func:`_payload` raises."""
Payload = dict[str, Any]
"""A message as kombu's virtual transports handle it."""


class Source(Protocol):
    """The messages of one queue."""

    def receive(self, most: int, wait: float) -> list[Payload]:
        """Return up to ``most`` messages that are there, or arrive within ``wait`` seconds."""


class Work:
    """A queue that workers share: each message is leased to one of them."""

    def __init__(self, consumer: Consumer, leases: Leases) -> None:
        self.consumer = consumer
        self._leases = leases

    def receive(self, most: int, wait: float) -> list[Payload]:
        found = []
        if not wait:
            self.consumer.flush()  # what was returned before is there
        for message in self.consumer.receive(most, wait):
            try:
                found.append(self._accept(message))
            except BAD as problem:
                message.reject(f"not a message of Celery: {problem!r}")
        return found

    def _accept(self, message: Received) -> Payload:
        """Hold the lease of a message under a new delivery tag."""
        payload = _payload(message.body)
        payload["properties"]["delivery_info"]["redelivered"] = message.redelivered
        self._leases.hold(payload["properties"]["delivery_tag"], message)
        return payload


class Broadcast:
    """A queue of one process that gets what is published while it listens (remote control, replies, events)."""

    def __init__(self) -> None:
        self._readers: list[tuple[Reader, Callable[[str], bool]]] = []

    def listen(self, reader: Reader, wants: Callable[[str], bool]) -> None:
        """Add the messages of a topic whose routing key ``wants`` accepts."""
        self._readers.append((reader, wants))

    def receive(self, most: int, wait: float) -> list[Payload]:
        for reader, wants in self._readers:
            for batch in reader.batches(most, idle_timeout=wait / len(self._readers)):
                return list(self._decode(message.body for message in batch if wants(message.tag or "")))
        return []

    @staticmethod
    def _decode(bodies: Iterable[bytes]) -> Iterator[Payload]:
        for body in bodies:
            with suppress(*BAD):  # it is of another program
                yield _payload(body)

    def close(self) -> None:
        for reader, _ in self._readers:
            reader.close()


def _payload(body: bytes) -> Payload:
    """Decode a message, with a delivery tag of its own. Raises one of BAD."""
    payload: Payload = loads(body)
    payload["properties"]["delivery_tag"] = str(uuid4())
    payload["properties"]["delivery_info"]  # kombu needs it
    return payload


class Feed:
    """A thread that receives for one queue whenever the channel has room."""

    def __init__(
        self,
        source: Source,
        room: Callable[[], int],
        changed: threading.Condition,
        deliver: Callable[[Feed, Sequence[Payload]], None],
        fail: Callable[[EscrowError], None],
    ) -> None:
        self._source, self._room, self._changed = source, room, changed
        self._deliver, self._fail = deliver, fail
        self.stopped = False  # guarded by ``changed``
        self._thread = threading.Thread(target=self._run, name="escrowmq-celery-feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Receive nothing more. Does not wait."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the receive in flight, whose messages ``deliver`` returns to the broker."""
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while (most := self._wait_for_room()) > 0:
            try:
                found = self._source.receive(most, WAIT_SECONDS)
            except EscrowError as problem:
                if self.stopped:
                    return
                if problem.code not in AWAY:
                    self._fail(problem)
                    return
                _log.warning("the broker is away: %s", problem)
                with self._changed:
                    self._changed.wait_for(lambda: self.stopped, backoff.failed())
            else:
                backoff.worked()
                self._deliver(self, found)

    def _wait_for_room(self) -> int:
        """Return for how many messages there is room, 0 when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._room() > 0)
            return 0 if self.stopped else self._room()
