"""Messages that wait for the writer, by the connection that brought them: whose turn it is when more waits than one round takes.

Deficit round robin: each source in turn may enter ``QUANTUM`` bytes or an equal part of the round, and saves what it did not use for its next
turn. One that had nothing waiting comes first. So whoever sends little waits for no more than the rounds that have begun, however much others have
waiting. The messages of one source keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from escrowmq.broker.writer.rounds import AnyRequest

QUANTUM = 64 << 10


class Line:
    """Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[AnyRequest]] = {}
        self._credit: dict[Hashable, int] = {}
        self._turns: deque[Hashable] = deque()
        self.count = 0
        """Requests that wait here."""

    def put(self, requests: Iterable[AnyRequest]) -> None:
        """Let these wait behind those of their source."""
        for request in requests:
            source = request.source
            waiting = self._waiting.get(source)
            if waiting is None:
                waiting = self._waiting[source] = deque()
                self._credit[source] = 0
                self._turns.appendleft(source)
            waiting.append(request)
            self.count += 1

    def take(self, most: int) -> list[AnyRequest]:
        """Those whose turn it is: ``most`` bytes and the rest of a request, at least one."""
        taken: list[AnyRequest] = []
        size = 0
        turn = max(QUANTUM, most // max(len(self._turns), 1))
        while self._turns and (size < most or not taken):
            source = self._turns[0]
            waiting, credit = self._waiting[source], self._credit[source] + turn
            while waiting and waiting[0].size <= credit and (size < most or not taken):
                request = waiting.popleft()
                taken.append(request)
                size += request.size
                credit -= request.size
            if waiting:
                self._credit[source] = min(credit, waiting[0].size + turn)
                self._turns.rotate(-1)
            else:
                del self._waiting[source], self._credit[source]
                self._turns.popleft()
        self.count -= len(taken)
        return taken

    def clear(self) -> list[AnyRequest]:
        """All that wait; then nothing does."""
        left = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting, self._credit, self._turns, self.count = {}, {}, deque(), 0
        return left
