"""Limits of a consumer group: messages per second, messages in flight, and messages in flight of each key.

Rules:

1. They apply to new leases. What a named member holds in doubt is in flight already: it is handed over in any case, and
   counts for the rate.
2. The rate is a token bucket (:class:`Bucket`). A message that no consumer received (UNSEEN) does not count.
3. Messages without a key have no limit per key. Those with an unreadable key count as one key.
4. Under a limit per key, messages that have to wait are taken up into the retries with their keys, as in ``order.py``,
   so that other keys pass them. An ordered group takes up nothing for that: its lease ends before such a message.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.groups.order import numbers
from escrowmq.message.hashes import hash_key
from escrowmq.model import Limits

NO_LIMITS = Limits()
LEAST_RATE, MOST_RATE = 0.001, 1e9  # messages per second
MOST = (1 << 31) - 1  # messages in flight
BURST_SECONDS = 0.3  # of messages that a group makes up for after a stall or rest: 3 % of what it gets in 10 s
LEAST_SECONDS = 0.02  # of messages that a lease waits for, so that a fast group does not get them one by one
NO_KEY = int(numbers(np.array([hash_key("")], np.uint64))[0])


def check(limits: Limits) -> None:
    """Validate limits. Raises BAD_REQUEST for a value out of range."""
    rate, counts = limits.rate, (limits.in_flight, limits.in_flight_per_key)
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        hint = f"{LEAST_RATE} to {MOST_RATE:,.0f}; to stop a group, pause it"
        raise error(Code.BAD_REQUEST, f"a rate of {rate} messages per second", hint)
    if any(count is not None and not 1 <= count <= MOST for count in counts):
        raise error(Code.BAD_REQUEST, "at least one message is in flight", "to stop a group, pause it")


def given(limits: Limits) -> dict[str, Any]:
    """Return the limits by name, without those that are None."""
    return {name: value for name, value in dataclasses.asdict(limits).items() if value is not None}


def dump(limits: Limits) -> str:
    """Return the limits as JSON."""
    return json.dumps(given(limits), sort_keys=True, separators=(",", ":"))


def load(text: str) -> Limits:
    """Return the limits from their JSON."""
    return Limits(**json.loads(text)) if text != "{}" else NO_LIMITS


class Bucket:
    """The messages that a group may lease by its rate: ``burst`` messages after a rest, and ``rate`` per second.

    ``spent`` messages were leased since ``since_us``, when it was full. Two integers, so that no rounding adds up.
    ``burst`` is one message more than those of ``BURST_SECONDS``, and no integer, so that leases which are late by up
    to that time lose nothing of the rate, a slow one included.
    """

    __slots__ = ("burst", "least", "rate", "since_us", "spent")

    def __init__(self, rate: float, since_us: int, spent: int = 0) -> None:
        self.rate, self.since_us, self.spent = rate, since_us, spent
        self.burst = 1 + rate * BURST_SECONDS
        self.least = max(int(rate * LEAST_SECONDS), 1)

    @property
    def ready_us(self) -> int:
        """The time (µs) from which on the rate allows the next lease."""
        return self.since_us + max(math.ceil((self.spent + self.least - self.burst) * 1e6 / self.rate), 0)

    def room(self, now_us: int) -> int:
        """Return how many messages the rate allows to lease now; 0 before ``ready_us``."""
        if now_us < self.ready_us:
            return 0
        filled = self.burst - self.spent + (now_us - self.since_us) * self.rate / 1e6
        return int(min(max(filled, self.least), self.burst))

    def take(self, count: int, now_us: int) -> None:
        """Charge ``count`` messages, leased at ``now_us``, to the rate."""
        if (now_us - self.since_us) * self.rate / 1e6 >= self.spent:
            self.since_us, self.spent = now_us, 0
        self.spent += count

    def give_back(self, count: int) -> None:
        """Undo :meth:`take` of ``count`` messages that no consumer received, so that they do not count for the rate."""
        self.spent = max(self.spent - count, 0)


class KeyRoom:
    """How many more messages of each key may be leased: ``most`` less those ``in_flight`` (the key of each message)."""

    __slots__ = ("_in_flight", "_most")

    def __init__(self, most: int, in_flight: Int64s) -> None:
        self._most, self._in_flight = most, np.sort(in_flight)

    def select(self, keys: Int64s) -> Bools:
        """Return for each of these messages (by its key, in order of delivery) whether it may be leased together with
        those before it. Changes nothing."""
        order = np.argsort(keys, kind="stable")
        rising = keys[order]
        nth = np.arange(len(keys)) - np.searchsorted(rising, rising)
        held = np.searchsorted(self._in_flight, rising, "right") - np.searchsorted(self._in_flight, rising)
        chosen = np.empty(len(keys), bool)
        chosen[order] = (nth + held < self._most) | (rising == NO_KEY)
        return chosen

    def count_first(self, keys: Int64s) -> int:
        """Return how many messages, from the first on, may be leased before the first that may not."""
        return int(np.append(~self.select(keys), True).argmax())

    def take(self, keys: Int64s) -> None:
        """Count messages with these keys as in flight."""
        self._in_flight = np.sort(np.concatenate([self._in_flight, keys]))
