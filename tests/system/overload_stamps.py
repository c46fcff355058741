"""Where the time of a send goes: stamps that the broker of the overload takes, put together with those of the polite
client.

All of it is one machine's monotonic clock, so that stamps of several processes can be compared. Every stamp is taken
around a function of the product, by wrapping it; nothing in the product knows of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TOPICS = ("polite", "careful")
STEPS = ("arrived", "given room", "taken by a round", "decided", "handed over", "synced", "answered", "received")
"""What happens to a send, in this order. ``arrived``: it was read from the socket; ``given room``: it waits for the
writer; ``received``: its client knows. Each step's seconds are those since the step before it; the first counts from
the call.
"""


class Stamps:
    """What one broker noted. :meth:`install` wraps the product's functions for this process."""

    def __init__(self) -> None:
        self.sends: dict[str, dict[str, float]] = {}
        """By the key of the message: stamps, and the numbers of rounds."""
        self.rounds: list[dict[str, float]] = []
        """Of each round of the writer with something to sync: when it took what waited, was decided, handed over and
        synced, its bytes and requests."""
        self.syncs: list[tuple[str, float, float, int]] = []
        """Of each sync of the disk: the thread that asked for it, when, its seconds, its bytes."""
        self._peers: set[str] = set()
        self._offered: dict[tuple[str, int], tuple[float, float]] = {}
        self._by_request: dict[int, str] = {}

    def install(self) -> None:
        """Wrap what a send passes through."""
        from escrowmq.broker.calls import Calls
        from escrowmq.broker.serving.requests import Requests
        from escrowmq.broker.writer.engine import Engine
        from escrowmq.broker.writer.rounds import ParcelRequest
        from escrowmq.broker.writer.shard import Shard
        from escrowmq.testing.disks import SlowDisk

        self._wrap(Requests, "_request", self._requested)
        self._wrap(Calls, "parcel", self._parcelled)
        self._wrap(Engine, "_enqueue", self._queued)
        self._wrap(Engine, "_round", self._ran)
        self._wrap(Engine, "_drain", self._drained)
        self._wrap(Shard, "finishing", self._finishing)
        self._wrap(ParcelRequest, "answer", self._answered)
        self._wrap(SlowDisk, "wait_for", self._synced)

    @staticmethod
    def _wrap(owner: type, name: str, act: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*arguments: Any, **named: Any) -> Any:
            return act(inner, *arguments, **named)

        setattr(owner, name, outer)

    # The carrier's thread

    def _requested(self, inner: Callable[..., Any], asked: Any, kind: int, number: int, content: Any) -> Any:
        connection = asked._connection
        if connection.peer in self._peers:
            self._offered.setdefault((connection.peer, number), (connection.heard, time.monotonic()))
            self._now = self._offered[connection.peer, number]
        else:
            self._now = (connection.heard, time.monotonic())
        return inner(asked, kind, number, content)

    def _parcelled(
        self, inner: Callable[..., Any], calls: Any, parcel: Any, done: Any, size: Any = None, source: Any = None
    ) -> Any:
        if parcel.rows and parcel.rows[0][0] in TOPICS:
            self._peers.add(source)
            heard, offered = self._now
            self.sends[parcel.rows[0][2]] = {"arrived": heard, "offered": offered, "given room": time.monotonic()}
        return inner(calls, parcel, done, size, source)

    def _queued(self, inner: Callable[..., Any], engine: Any, request: Any) -> Any:
        rows = getattr(request, "rows", None)
        if rows and rows[0][0] in TOPICS and (send := self.sends.get(rows[0][2])) is not None:
            self._by_request[id(request)] = rows[0][2]
            send["rounds before"] = engine.rounds
        return inner(engine, request)

    # The writer

    def _ran(self, inner: Callable[..., Any], engine: Any) -> Any:
        self._round: dict[str, float] = {"began": time.monotonic()}
        inner(engine)
        self._round["ended"] = time.monotonic()

    def _drained(self, inner: Callable[..., Any], engine: Any, **late: bool) -> Any:
        requests = inner(engine, **late)
        now, size = time.monotonic(), sum(request.size for request in requests)
        one = self._round
        one.setdefault("taken", now)
        one["bytes"] = one.get("bytes", 0) + size
        one["requests"] = one.get("requests", 0) + len(requests)
        if late:
            one["late"], one["late requests"] = now, len(requests)
        for request in requests:
            if (key := self._by_request.get(id(request))) is not None:
                self.sends[key].update({"taken by a round": now, "rounds begun": engine.rounds, "bytes": size})
        return requests

    def _finishing(self, inner: Callable[..., Any], shard: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        keys = [key for request, _ in pairs if (key := self._by_request.get(id(request))) is not None]
        one, decided = self._round, time.monotonic()
        sync, tell = inner(shard, pairs)
        handed = time.monotonic()
        one.update({"decided": decided, "handed over": handed})
        self.rounds.append(one)
        for key in keys:
            self.sends[key].update({"decided": decided, "handed over": handed})

        def synced() -> Any:
            one["sync began"] = time.monotonic()
            done = sync()
            one["synced"] = time.monotonic()
            for key in keys:
                self.sends[key]["synced"] = one["synced"]
            return done

        def told() -> Any:
            one["telling"] = time.monotonic()
            done = tell()
            one["answered"] = time.monotonic()
            return done

        return synced, told

    # The thread that commits

    def _synced(self, inner: Callable[..., Any], disk: Any, written: int) -> Any:
        began = time.monotonic()
        inner(disk, written)
        self.syncs.append((threading.current_thread().name, began, time.monotonic() - began, written))

    def _answered(self, inner: Callable[..., Any], request: Any, value: Any) -> Any:
        if (key := self._by_request.pop(id(request), None)) is not None:
            inner(request, value)
            self.sends[key]["answered"] = time.monotonic()
            return None
        return inner(request, value)

    def told(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"sends": self.sends, "rounds": self.rounds, "syncs": self.syncs}


def breakdown(calls: Sequence[Sequence[Any]], told: Mapping[str, Any], count: int = 5) -> list[dict[str, Any]]:
    """Of the slowest of the ``calls`` (key, began, ended): the seconds of each step, the rounds, and every sync of the
    disk meanwhile."""
    slowest = sorted(calls, key=lambda call: call[1] - call[2])[:count]
    return [explained(call, told) for call in slowest]


def explained(call: Sequence[Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Where the time of one call went."""
    key, began, ended = call
    stamps = {**told["sends"].get(key, {}), "received": ended}
    steps, last = {}, began
    for step in STEPS:
        if step in stamps:
            steps[step], last = round(stamps[step] - last, 3), stamps[step]
    during = [one for one in told["rounds"] if "answered" in one and one["answered"] > began and one["taken"] < ended]
    return {
        "key": key,
        "seconds": round(ended - began, 3),
        "steps": steps,
        "rounds begun until it was taken": stamps.get("rounds begun", 0) - stamps.get("rounds before", 0),
        "rounds": [
            {
                "taken": round(one["taken"] - began, 3),
                "decided": round(one["decided"] - one["taken"], 3),
                "handed over": round(one["handed over"] - one["decided"], 3),
                "waited": round(one["sync began"] - one["handed over"], 3),
                "sync": round(one["synced"] - one["sync began"], 3),
                "waited for answers": round(one["telling"] - one["synced"], 3),
                "answers": round(one["answered"] - one["telling"], 3),
                "late": one.get("late requests", 0),
                "bytes": one["bytes"],
                "requests": one["requests"],
            }
            for one in during
        ],
        "syncs": [
            [name, round(at - began, 3), round(seconds, 3), size]
            for name, at, seconds, size in told["syncs"]
            if at < ended and at + seconds > began
        ],
    }
