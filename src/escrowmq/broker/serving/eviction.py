"""The choice of the connections that a server closes: there are too many, or incomplete frames are too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.serving.requests import Requests
from escrowmq.broker.serving.room import STUCK_SECONDS


def find_least_useful(
    clients: Mapping[Connection, Requests], *, greeted: bool, but: Connection | None = None
) -> Connection | None:
    """Return the connection to close when there are too many; None if there is none.

    That is one without a greeting; with ``greeted``, then one that never sent a request, then one without pending work,
    then any other. Among equals it is the one that was silent longest. ``but`` is never returned.
    """

    def usefulness(pair: tuple[Connection, Requests]) -> tuple[bool, bool, bool, float]:
        connection, asked = pair
        heard = connection.heard if asked.welcomed else connection.opened
        return asked.welcomed, asked.busy, asked.count > 0, heard

    others = (
        (connection, asked)
        for connection, asked in clients.items()
        if connection is not but and (greeted or not asked.welcomed)
    )
    found = min(others, key=usefulness, default=None)
    return None if found is None else found[0]


def find_unfinished(read: Sequence[Connection], limit: int, now: float) -> Iterator[tuple[Connection, str]]:
    """Yield the connections to close because of incomplete frames, each with the reason. Then the others announce at
    most ``limit`` bytes, and at most as many of those have arrived. A connection that sends nothing is spared until
    ``STUCK_SECONDS`` have passed."""
    unfinished = [connection for connection in read if connection.assembler.claimed]
    unfinished.sort(key=lambda connection: connection.heard)
    announced = sum(connection.assembler.claimed for connection in unfinished)
    for connection in list(unfinished):
        if announced <= limit or now - connection.heard < STUCK_SECONDS:
            break
        announced -= connection.assembler.claimed
        unfinished.remove(connection)
        yield connection, "that announces a large frame and sends nothing"
    came = sum(connection.assembler.waiting for connection in unfinished)
    unfinished.sort(key=lambda connection: connection.assembler.waiting)
    while came > limit:
        largest = unfinished.pop()
        came -= largest.assembler.waiting
        yield largest, "whose frame is large and incomplete"
