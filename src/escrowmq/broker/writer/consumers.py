"""The connected consumers, noted at each receive, in memory only."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

MOST = 10_000
"""Consumers that are noted. Above: the one that received longest ago is forgotten."""
SWEEP = 256
"""New consumers between two searches for closed connections."""
SILENT_SECONDS = 60.0
"""Time (s) without a receive after which a consumer that holds nothing is not listed."""


class Client(Protocol):
    """The connection of a consumer."""

    peer: str
    """Its number, a colon, and its address."""
    heard: float
    """Monotonic time (s) of its last bytes."""
    closed: bool


@dataclass(frozen=True, slots=True)
class _Noted:
    received_us: int
    client: Client | None
    """None: the consumer is in the broker's process."""
    answer: weakref.ref[Future[Any]]


class Consumers:
    """The consumers of one broker, by group and member. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[tuple[str, int], _Noted] = {}

    def note(self, group: str, member: int, client: Client | None, answer: Future[Any], now_us: int) -> None:
        """Record that a consumer sent a receive at ``now_us``, with its connection and the future of the answer."""
        with self._lock:
            known = self._noted.pop((group, member), None)
            if known is None and len(self._noted) % SWEEP == SWEEP - 1:
                self._drop_closed()
            self._noted[group, member] = _Noted(now_us, client, weakref.ref(answer))
            if len(self._noted) > MOST:
                del self._noted[next(iter(self._noted))]

    def add_to(self, group: str, members: list[Any], now_us: int) -> list[Any]:
        """Add ``heard_us``, ``address`` and ``receiving`` to the members of a group that are connected, and append the
        connected ones that hold nothing."""
        with self._lock:
            self._drop_closed()
            noted = {member: one for (name, member), one in self._noted.items() if name == group}
        for found in members:
            if (one := noted.pop(found["member"], None)) is not None:
                found |= _describe(one, now_us)
        unnamed = {"instance": None, "epoch": None, "fenced": None, "joined_us": None}
        idle: dict[str, Any] = {**unnamed, "leases": 0, "messages": 0, "in_doubt": 0, "held": []}
        for member, one in noted.items():
            described = _describe(one, now_us)
            if described["receiving"] or now_us - one.received_us < SILENT_SECONDS * 1e6:
                members.append({"member": member, **idle, **described})
        return members

    def _drop_closed(self) -> None:
        """Remove the consumers of closed connections. Requires the lock."""
        self._noted = {key: one for key, one in self._noted.items() if not (one.client and one.client.closed)}


def _describe(one: _Noted, now_us: int) -> dict[str, Any]:
    waiting, client = one.answer(), one.client
    heard_us = 0 if client is None else now_us - int((time.monotonic() - client.heard) * 1e6)
    return {
        "heard_us": max(heard_us, one.received_us),
        "address": None if client is None else client.peer.partition(":")[2],
        "receiving": waiting is not None and not waiting.done(),
    }
