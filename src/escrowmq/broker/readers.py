"""Streaming queries that read topics, as their reads name them. In memory: a broker that starts knows none."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.requests import checked
from escrowmq.ledger.listings import topics_list
from escrowmq.wire import ReadRequest
from escrowmq.wire.actions.standing import ReaderStands

MOST = 1_000
"""Readers, each of one topic; beyond it, the one that has not read for the longest time is dropped."""
KEPT_US = 24 * 3600 * 1_000_000
LONGEST = 200  # characters of a name; the rest is cut off


@dataclass(slots=True)
class _Reader:
    """The last batch that a query has read of a topic, and the offset after it by queue."""

    batch: int
    read_us: int
    ends: dict[int, int] = field(default_factory=dict)


class Readers:
    """The readers of one broker, by query and topic. Thread-safe."""

    def __init__(self, engine: Readable) -> None:
        self._engine = engine
        self._readers: dict[tuple[str, str], _Reader] = {}
        self._lock = threading.Lock()

    def note(self, content: Mapping[str, object]) -> None:
        """Record how far a streaming query has read a queue, from a read that names its ``reader`` and an ``end``;
        other reads, and those of views, are ignored. Within a batch the largest end of a queue counts, because several
        tasks read it; a query that starts anew counts from where it reads then."""
        request = checked(ReadRequest, content)
        if "reader" not in request or "end" not in request or request["source"].startswith("%"):
            return
        name, batch = (request["reader"][:LONGEST], request["source"]), request.get("batch", 0)
        queue, end = request.get("queue", 0), cast(int, request["end"])
        with self._lock:
            reader = self._readers.pop(name, None) or _Reader(batch, 0)
            is_same = reader.batch == batch
            reader.ends[queue] = max(end, reader.ends.get(queue, 0)) if is_same else end
            reader.batch, reader.read_us = batch, self._engine.clock.now_us()
            self._readers[name] = reader  # the most recent one is last
            if len(self._readers) > MOST:
                self._readers.pop(next(iter(self._readers)))

    def standing(self) -> dict[str, Any]:
        """Return {"readers": [...]}: the readers of the last 24 hours, each with its topic, its lag (messages behind
        the ends of the queues that it has read) and the time of its last read."""
        if not self._readers:
            return {"readers": []}
        topics = self._engine.look(lambda: topics_list(self._engine.shard.ledger)).result()
        ends = {topic["name"]: {queue["queue"]: queue["end"] for queue in topic["queues"]} for topic in topics}
        since = self._engine.clock.now_us() - KEPT_US
        found: list[ReaderStands] = []
        with self._lock:
            for (name, topic), reader in self._readers.items():
                if reader.read_us >= since and topic in ends:
                    lag = sum(max(ends[topic].get(queue, 0) - end, 0) for queue, end in reader.ends.items())
                    found.append({"reader": name, "topic": topic, "lag": lag, "read_us": reader.read_us})
        return {"readers": found}
