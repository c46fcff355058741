"""A fair queue of the messages that wait for the writer, by connection, for rounds that cannot take all of them.

Fair queueing: virtual time is counted in the bytes that each connection was given. A request begins at the current
virtual time, or behind what its connection was given, if that is later by more than ``AHEAD`` or if more of the
connection waits. It ends as much later as it is large, and the request that ends first is next. So a connection that
sends little is in the next round, however much others have waiting; connections with one request at a time are served
in the order of arrival; and a connection that sends much gets an equal part of the rest. Virtual time also moves slowly
by itself, so that a series of new connections cannot starve the others. The messages of one source keep their order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush, heapreplace

from escrowmq.broker.writer.rounds import AnyRequest

AHEAD = 64 << 10  # the lead (bytes) that a connection may have over the others and still count as new
SLOWLY = 16  # virtual time moves by one part in so many of an equal share


class Line:
    """A fair queue. Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[AnyRequest]] = {}
        self._had: dict[Hashable, int] = {}  # the virtual time up to which each source was served, if not yet over
        self._turns: list[tuple[int, int, int, Hashable]] = []  # a heap: end of each source's first request, its size
        self._numbers = itertools.count()
        self._now = 0
        self.count = 0  # requests in the queue

    def put(self, requests: Iterable[AnyRequest]) -> None:
        """Append requests, each behind the waiting ones of its source (the connection)."""
        for request in requests:
            source = request.source
            if (waiting := self._waiting.get(source)) is None:
                waiting = self._waiting[source] = deque()
                ends = max(self._now, self._had.get(source, 0) - AHEAD) + request.size
                heappush(self._turns, (ends, request.size, next(self._numbers), source))
            waiting.append(request)
            self.count += 1

    def take(self, most: int, *, late: bool = False) -> list[AnyRequest]:
        """Remove and return the next requests in fair order, until they have ``most`` bytes or more; at least one.
        ``late``: not more than ``most``, and only of connections that had nothing waiting."""
        taken: list[AnyRequest] = []
        size, now = 0, self._now
        while self._turns:
            ends, own, _, source = self._turns[0]
            if (ends - own > now or size + own > most) if late else (size >= most and taken):
                break
            waiting = self._waiting[source]
            taken.append(waiting.popleft())
            size += own
            self._now = max(ends - own, self._now + own // (SLOWLY * len(self._turns)))
            self._had[source] = had = max(ends, self._had.get(source, 0) + own)
            if waiting:
                following = waiting[0].size
                heapreplace(self._turns, (had + following, following, next(self._numbers), source))
            else:
                heappop(self._turns)
                del self._waiting[source]
        self.count -= len(taken)
        self._had = {source: until for source, until in self._had.items() if until > self._now and self._turns}
        return taken

    def clear(self) -> list[AnyRequest]:
        """Remove and return all requests."""
        left = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting, self._had, self._turns, self._now, self.count = {}, {}, [], 0, 0
        return left
