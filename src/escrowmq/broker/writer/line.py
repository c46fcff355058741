"""Messages that wait for the writer, by the connection that brought them: whose turn it is when more waits than one
round takes.

Fair queueing: time is counted in the bytes that each connection has had. A request begins at the time at which the line
stands when it comes, or behind what its connection has had, if that is later by more than ``AHEAD`` or if more of the
connection waits; it ends as much later as it is large; and the one that ends first is next. So whoever sends little is
in the next round, however much others have waiting; those that come again and again with one request each are served in
the order in which they come; and who sends much gets an equal part of what is left. That time also continues by itself,
slowly, so that connections that are always new do not keep the others waiting for ever. The messages of one source keep
their order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush, heapreplace

from escrowmq.broker.writer.rounds import AnyRequest

AHEAD = 64 << 10
"""So many bytes a connection may have had more than the others and still be served as one that had nothing."""
SLOWLY = 16
"""The line's time continues by one part in so many of what each connection would have had, were all served alike."""


class Line:
    """Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[AnyRequest]] = {}
        self._had: dict[Hashable, int] = {}  # until when each source had its part; those until now are as good as new
        self._turns: list[tuple[int, int, int, Hashable]] = []  # a heap: when the first of a source ends, its size
        self._numbers = itertools.count()
        self._now = 0
        self.count = 0
        """Requests that wait here."""

    def put(self, requests: Iterable[AnyRequest]) -> None:
        """Let these wait behind those of their source."""
        for request in requests:
            source = request.source
            if (waiting := self._waiting.get(source)) is None:
                waiting = self._waiting[source] = deque()
                ends = max(self._now, self._had.get(source, 0) - AHEAD) + request.size
                heappush(self._turns, (ends, request.size, next(self._numbers), source))
            waiting.append(request)
            self.count += 1

    def take(self, most: int, *, late: bool = False) -> list[AnyRequest]:
        """Return those whose turn it is: ``most`` bytes and the rest of a request, at least one; ``late``: not more
        than ``most``, and only of those who had nothing waiting."""
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
        """Return all that wait; then nothing does."""
        left = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting, self._had, self._turns, self._now, self.count = {}, {}, [], 0, 0
        return left
