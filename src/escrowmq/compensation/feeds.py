"""Sources of announced ids, as a scheduler and a recovery need them: acknowledged positions, and reading again.

``TopicKeys`` is a key topic of this broker. :class:`GivenKeys` are keys from another broker: their program reads them,
passes them to the half set, and provides these functions as far as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pyarrow as pa

from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import away
from escrowmq.client.reading.reading import Partition
from escrowmq.errors import AWAY, Code, EscrowError, Misuse, Rejected
from escrowmq.platform import clock

KeyTimes = tuple[Sequence[bytes], Sequence[int]]
"""Ids, and the time at which each key was stored (microseconds since 1970)."""

_ROWS = 10_000
_COLUMNS = ["key", "message_id", "stored_us"]
_SLACK_US = 1_000
"""Reading starts this much earlier (µs), because times travel as floating-point numbers."""


class KeyFeed(Protocol):
    """The keys of one compensation at their broker."""

    def now_us(self) -> int:
        """Return the time of the clock by which keys are stored, the slowest if there are several. Raises Overloaded or
        Unknown if no broker responds."""
        ...

    def acknowledged_us(self) -> int | None:
        """Return a time before which every key was acknowledged, so is in the set store; None if unknown now. It must
        never be too late: if the store was emptied, keys from before it are not read again."""
        ...

    def read_again(self, since_us: int) -> Iterator[KeyTimes]:
        """Yield all keys stored then or later, acknowledged or not, in parts of at most 10,000; extra keys do no harm.
        Raises an EscrowError if some cannot be read now, or ever."""
        ...


def id_of_key(key: str | None, message_id: bytes) -> bytes:
    """Return the id that a key message announces: its key, 32 hex digits, else its own message id. Messages of our
    producer have the announced id as message id, too. A stray message so becomes a case for an operator and is not
    lost."""
    with suppress(ValueError):
        if key is not None and len(key) == 32:
            return bytes.fromhex(key)
    return message_id


def to_key_times(rows: pa.RecordBatch) -> KeyTimes:
    """Convert messages of a key topic."""
    keys, ids, stored_us = (rows.column(name).to_pylist() for name in _COLUMNS)
    return list(map(id_of_key, keys, ids)), stored_us


class TopicKeys:
    """The keys in a topic of this broker, consumed by ``group``."""

    def __init__(self, bus: Bus, topic: str, group: str) -> None:
        self._bus = bus
        self.topic = topic
        self.group = group

    def now_us(self) -> int:
        """Return the slowest clock of the reachable brokers."""
        answers = self._bus.admin.hello()
        if not answers:
            raise away(answers.missing, "no broker reports its time")
        return min(answer.get("time_us", clock.now_us()) for answer in answers)

    def acknowledged_us(self) -> int | None:
        """Return the brokers' time, read first, or the store time of the first unacknowledged key, whichever is
        earlier."""
        try:
            now_us = self.now_us()
            listed = self._bus.admin.groups()
            ends = self._bus.admin.offsets(self.topic)
        except Rejected as problem:
            if problem.code is not Code.UNKNOWN_TOPIC:
                raise
            return now_us  # there is no key yet
        except EscrowError as problem:
            if problem.code not in AWAY:
                raise
            return None
        if listed.missing or ends.missing or self._bus.missing():
            return None
        floors = {
            (group["broker"], queue["queue"]): queue["floor"]
            for group in listed
            if group["name"] == self.group
            for queue in group["queues"]
            if queue["topic"] == self.topic
        }
        times = [now_us]
        for line in ends:
            first = max(floors.get((line["broker"], line["queue"]), 0), line["head"])
            if first < line["end"]:
                stored_us = self._stored_us((line["shard"], line["queue"]), first)
                if stored_us is None:
                    return None
                times.append(stored_us)
        return min(times)

    def _stored_us(self, place: Partition, offset: int) -> int | None:
        """Return the store time of the first message at or after an offset; None if its broker does not provide it
        now."""
        try:
            with self._bus.reader(self.topic, queues=[place], start={place: offset}, columns=["stored_us"]) as reader:
                for batch in reader.batches(1, idle_timeout=0.0):
                    return int(batch.arrow.column("stored_us")[0].as_py())
        except EscrowError as problem:
            if problem.code not in AWAY and problem.code is not Code.RANGE_PURGED:
                raise
        return None

    def read_again(self, since_us: int) -> Iterator[KeyTimes]:
        """Yield the keys of the topic stored since then, acknowledged or not. Raises Overloaded(BROKER_AWAY) if a
        broker is away."""
        since = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=max(since_us - _SLACK_US, 0))
        try:
            lines = self._bus.admin.offsets(self.topic, time=since)
        except Rejected as problem:
            if problem.code is not Code.UNKNOWN_TOPIC:
                raise
            return
        incomplete = f"the keys in {self.topic} can only be read in part"
        if missing := lines.missing or self._bus.missing():
            raise away(missing, incomplete)
        ends = {(line["shard"], line["queue"]): line["end"] for line in lines}
        start = {(line["shard"], line["queue"]): max(line.get("offset_at", 0), line["head"]) for line in lines}
        pending = [place for place, first in start.items() if first < ends[place]]
        if not pending:
            return
        chosen = {place: start[place] for place in pending}
        with self._bus.reader(self.topic, queues=pending, start=chosen, columns=_COLUMNS) as reader:
            for batch in reader.batches(_ROWS, idle_timeout=5.0):
                yield to_key_times(batch.arrow)
                # lacks the queues of a broker that just became unreachable
                positions = reader.positions()
                if all(positions.get(place, start[place]) >= ends[place] for place in pending):
                    return
            raise away(reader.missing, incomplete)


class GivenKeys:
    """Keys that another broker carries, described by functions of their program. ``acknowledged_us`` and ``read_again``
    are those of :class:`KeyFeed`. Without the first, ``settled_us`` never advances, so a recovery reads everything
    again; without the second, a store that lost its entries stays suspended, with an error."""

    def __init__(
        self,
        *,
        acknowledged_us: Callable[[], int | None] | None = None,
        read_again: Callable[[int], Iterable[KeyTimes]] | None = None,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self._acknowledged_us = acknowledged_us
        self._read_again = read_again
        self._now_us = now_us or clock.now_us

    def now_us(self) -> int:
        """Return the time of the given clock, else of this machine."""
        return self._now_us()

    def acknowledged_us(self) -> int | None:
        """Return the result of the given function, else None (unknown)."""
        return None if self._acknowledged_us is None else self._acknowledged_us()

    def read_again(self, since_us: int) -> Iterator[KeyTimes]:
        """Yield the keys from the given function. Raises Misuse(BAD_SETTING) without it."""
        if self._read_again is None:
            text = "the set store has lost its entries, and no function was given that reads the keys again"
            hint = "give GivenKeys(read_again=...), then run it again; the compensation stays suspended until then"
            raise Misuse(Code.BAD_SETTING, text, hint)
        yield from self._read_again(since_us)
