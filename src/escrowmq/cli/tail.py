"""``escrowmq tail``: look into a topic or a system view; nothing is leased or changed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, PATIENCE, JsonLines, Url, bus_at
from escrowmq.cli.printing import console, print_json_line
from escrowmq.cli.rows import ack_line, half_line, message_line, op_line, plain
from escrowmq.errors import Code, error
from escrowmq.platform.signals import stop_signals
from escrowmq.wire import ACK_VIEW_NAME, DEAD_LETTER_PREFIX, HALF_VIEW_NAME, OP_VIEW_NAME, VIEWS

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.bus import Bus

LOOK_AGAIN_SECONDS = 0.25
LAST = 10

Row = dict[str, Any]


@dataclass(slots=True)
class QueueReader:
    """One queue of one broker (a view counts as a queue), read up to before ``next``."""

    admin: Admin
    source: str
    queue: int
    next: int

    @property
    def numbered_by(self) -> str:
        """The column that rises: offsets in a topic, log positions in a view."""
        return "offset" if _is_topic(self.source) else "position"

    def read(self, most: int | None = None) -> Iterator[Row]:
        """The rows from ``next`` on; moves ``next`` behind them."""
        for batch in self.admin.read(self.source, queue=self.queue, start=self.next, max_rows=most):
            for row in batch.to_pylist():
                self.next = row[self.numbered_by] + 1
                yield row

    def show(self, row: Row, json: bool) -> None:
        """Print one row."""
        if json:
            return print_json_line(plain(row))
        number = row[self.numbered_by]
        if self.source == HALF_VIEW_NAME:
            line = half_line(row, str(number))
        elif self.source == OP_VIEW_NAME:
            line = op_line(row, str(number))
        elif self.source == ACK_VIEW_NAME:
            line = ack_line(row, str(number))
        else:
            line = message_line(row, f"{row['queue']}/{number}")
        console().print(line, soft_wrap=True)


def tail(
    source: Annotated[str, typer.Argument(help="A topic, %half, %op, %acks, or %dead-letters.GROUP.")],
    queue: Annotated[int | None, typer.Option("--queue", "-q", min=0, help="Only this queue.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="At most so many a queue, before following.")
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", "-s", help="Begin with the oldest that is stored.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    url: Url = DEFAULT_URL,
    json: JsonLines = False,
) -> None:
    """Show messages of a topic, half messages (%half), decisions (%op) or acknowledgements (%acks), without consuming them.

    Without --from-start: the last 10 of each queue, or as many as --limit says.
    """
    if follow and source.startswith(DEAD_LETTER_PREFIX):
        raise error(Code.BAD_ARGUMENT, "dead letters come and go; they cannot be followed", "leave --follow out")
    with bus_at(url) as bus:
        readers = _readers(bus, source, queue, None if from_start else limit or LAST)
        for reader in readers:
            for row in reader.read(limit) if from_start else deque(reader.read(), limit or LAST):
                reader.show(row, json)
        if follow:
            _follow(readers, json)


def _follow(readers: list[QueueReader], json: bool) -> None:
    """Until Ctrl-C. What a signal raises is lost when it comes while a library tidies up, so the signal is noted, too."""
    stop = threading.Event()

    def interrupt() -> None:
        stop.set()
        raise KeyboardInterrupt

    with stop_signals(interrupt):
        while not stop.is_set():
            if not sum([_show_new(reader, json) for reader in readers]):
                stop.wait(LOOK_AGAIN_SECONDS)
    raise KeyboardInterrupt


def _is_topic(source: str) -> bool:
    return source not in VIEWS


def _readers(bus: Bus, source: str, queue: int | None, last: int | None) -> list[QueueReader]:
    """One reader per queue of the source; ``last``: only so many messages from the end of each."""
    from escrowmq.client.admin import Admin
    from escrowmq.client.links.router import Router

    admins = [Admin(Router([link]), PATIENCE) for link in bus.router.links]
    if source.startswith("%"):
        return [QueueReader(admin, source, 0, 0) for admin in admins]
    readers = [
        QueueReader(
            admin, source, each["queue"], each["head"] if last is None else max(each["head"], each["end"] - last)
        )
        for admin in admins
        for topic in admin.topics()
        if topic["name"] == source
        for each in topic["queues"]
        if queue in (None, each["queue"])
    ]
    if not readers:
        what = f"no topic {source!r}" if queue is None else f"no queue {queue} of a topic {source!r}"
        raise error(Code.UNKNOWN_TOPIC, what, "see `escrowmq topics list`")
    return readers


def _show_new(reader: QueueReader, json: bool) -> int:
    shown = 0
    for row in reader.read():
        reader.show(row, json)
        shown += 1
    return shown
