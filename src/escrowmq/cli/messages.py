"""``escrowmq send``, ``tail`` and ``lookup``: send messages, print a topic or view, find messages by key or id."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Argument, Option

from escrowmq.cli.failures import Exit, exit_code, show_error
from escrowmq.cli.options import DEFAULT_URL, PATIENCE, Brokers, JsonLines, Limit, Url, bus_at, pairs, time_option
from escrowmq.cli.printing import RUN, Columns, console, moment, notice, print_facts, print_json_line, print_rows, state
from escrowmq.cli.rows import ack_line, body_of, group_act_line, half_line, message_line, op_line, plain
from escrowmq.errors import AWAY, Code, EscrowError, error
from escrowmq.model import Message
from escrowmq.platform.signals import stop_signals
from escrowmq.wire import (
    ACK_VIEW_NAME,
    DEAD_LETTER_PREFIX,
    GROUP_ACT_VIEW_NAME,
    HALF_VIEW_NAME,
    OP_VIEW_NAME,
    VIEWS,
    read_schema,
)

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.bus import Bus
    from escrowmq.client.reading.reader import Reader
    from escrowmq.model import Receipt

BATCH = 1000
BAR_FROM = 20 * BATCH
"""Number of messages from which a progress bar is shown."""
POLL_SECONDS = 0.25
LAST = 10
"""Default number of messages that ``tail`` shows."""

Row = dict[str, Any]
_VIEW_LINES = {
    HALF_VIEW_NAME: half_line,
    OP_VIEW_NAME: op_line,
    ACK_VIEW_NAME: ack_line,
    GROUP_ACT_VIEW_NAME: group_act_line,
}


@dataclass
class _Content:
    """Messages to send: bodies, and what they have in common."""

    body: str | None = Argument(None, help="The body; - or nothing: standard input.")
    file: Path | None = Option(None, "--file", "-f", help="Take the body from a file.")
    lines: bool = Option(False, "--lines", help="Each line of the file or input is a message.")
    key: str | None = Option(None, "--key", "-k", help="Same key queue, in order.")
    tag: str | None = Option(None, "--tag", "-t", help="What consumers filter by.")
    properties: list[str] | None = Option(None, "--property", "-p", metavar="NAME=VALUE", help="May be given again.")
    delay: float | None = time_option(None, "--delay", "Not visible before: 5s, 10min.")
    queue: int | None = Option(None, "--queue", "-q", min=0, help="This queue; else by key or round-robin.")
    message_id: str | None = Option(None, "--id", help="Your message id: sent again, it makes no second message.")
    count: int = Option(1, "--count", "-c", min=1, help="So many messages; {n} in key, id and body is its number.")

    def bodies(self) -> list[bytes]:
        """Return the body, or those of all lines. Raises Misuse(BAD_ARGUMENT)."""
        if self.message_id is not None and (self.lines or (self.count > 1 and "{n}" not in self.message_id)):
            raise error(Code.BAD_ARGUMENT, "one id names one message", "put {n} into --id, or leave it out")
        if self.body is not None and self.body != "-":
            if self.file is not None:
                raise error(Code.BAD_ARGUMENT, "a body and a file were given", "give one of them")
            content = self.body.encode(errors="surrogateescape")
        elif self.file is not None:
            try:
                content = self.file.read_bytes()
            except OSError as problem:
                raise error(Code.BAD_ARGUMENT, f"cannot read {self.file}: {problem.strerror}") from None
        else:
            content = sys.stdin.buffer.read()
        return content.splitlines() if self.lines else [content]

    def messages(self, topic: str, bodies: Iterable[bytes]) -> Iterator[Message]:
        """Yield ``count`` messages of each body."""
        properties = pairs(self.properties, "--property") or None
        for content in bodies:
            for n in range(self.count):
                number = str(n)
                yield Message(
                    topic,
                    content.replace(b"{n}", number.encode()) if self.count > 1 else content,
                    key=self._numbered(self.key, number),
                    tag=self.tag,
                    properties=properties,
                    delay=self.delay or 0.0,
                    queue=self.queue,
                    message_id=self._numbered(self.message_id, number),
                )

    def _numbered(self, text: str | None, number: str) -> str | None:
        return text.replace("{n}", number) if text is not None and self.count > 1 else text


def send(
    content: _Content,
    topic: str = Argument(..., help="The topic."),
    group: str = Option("command-line", "--group", "-g", help="The producer group."),
    url: Url = DEFAULT_URL,
    json: bool = Option(False, "--json", help="One JSON receipt a line, for scripts."),
) -> None:
    """Send plain messages; each is durable when its receipt is printed."""
    bodies = content.bodies()
    total = len(bodies) * content.count
    show_each = json or total <= 20
    failed: EscrowError | None = None
    sent = 0
    with bus_at(url, make=True) as bus, bus.producer(group, timeout=PATIENCE) as producer:
        batches: Iterable[list[Message]] = _batches(content.messages(topic, bodies))
        if total >= BAR_FROM and not json:
            batches = track(batches, "sending", total=-(-total // BATCH), console=Console(stderr=True))
        try:
            for batch in batches:
                receipts = producer.send_batch(batch)
                for row in range(len(batch)):
                    try:
                        receipt = receipts[row]
                    except EscrowError as problem:
                        failed = failed or problem
                        continue
                    sent += 1
                    if show_each:
                        _show(receipt, json)
        except (EscrowError, KeyboardInterrupt):
            notice(f"ended early: {sent:,} of {total:,} were surely sent to {topic}")
            raise
    if not show_each:
        notice(f"{sent:,} messages sent to {topic}")
    if failed is not None:
        notice(f"{total - sent:,} of {total:,} not sent; the first error:")
        show_error(failed)
        raise typer.Exit(exit_code(failed))


def _batches(messages: Iterator[Message]) -> Iterator[list[Message]]:
    batch: list[Message] = []
    size = 0
    for message in messages:
        if batch and (len(batch) == BATCH or size + len(message.body) > 1 << 24):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message.body)
    if batch:
        yield batch


def _show(receipt: Receipt, json: bool) -> None:
    if json:
        places = {name: getattr(receipt, name) for name in ("topic", "queue", "offset", "position")}
        print_json_line({"message_id": receipt.message_id.hex(), **places})
    else:
        where = "delayed" if receipt.offset is None else f"queue {receipt.queue} offset {receipt.offset}"
        notice(f"{receipt.message_id.hex()}  {receipt.topic} {where}")


@dataclass(slots=True)
class QueueReader:
    """One queue of one broker (a view counts as a queue); rows before ``next`` are read."""

    admin: Admin
    source: str
    queue: int
    next: int
    wanted: dict[str, Any]
    """Filters for :meth:`Admin.read`."""

    @property
    def numbered_by(self) -> str:
        """The increasing column: offsets in a topic, log positions in a view."""
        return "position" if self.source in VIEWS else "offset"

    def read(self, most: int | None = None) -> Iterator[Row]:
        """Read the rows from ``next`` on, and advance ``next``."""
        columns = read_schema(self.source, damaged=True).names
        for batch in self.admin.read(
            self.source, queue=self.queue, start=self.next, max_rows=most, columns=columns, **self.wanted
        ):
            for row in batch.to_pylist():
                if row["damaged"] is None:
                    del row["damaged"]
                self.next = row[self.numbered_by] + 1
                yield row

    def show(self, row: Row, json: bool) -> None:
        """Print one row."""
        if json:
            return print_json_line(plain(row))
        number = row[self.numbered_by]
        view_line = _VIEW_LINES.get(self.source)
        line = view_line(row, str(number)) if view_line else message_line(row, f"{row['queue']}/{number}")
        console().print(line, soft_wrap=True)


@dataclass
class _Chosen:
    """The rows that ``tail`` shows."""

    queue: int | None = Option(None, "--queue", "-q", min=0, help="Only this queue.")
    limit: int | None = Option(None, "--limit", "-n", min=1, help="At most so many in all, before following.")
    from_start: bool = Option(False, "--from-start", "-s", help="Begin with the oldest that is stored.")
    tag: list[str] | None = Option(None, "--tag", "-t", help="Only messages with this tag; may be repeated.")
    key: str | None = Option(None, "--key", "-k", help="Only messages with this key.")
    group: str | None = Option(None, "--group", "-g", help="Of %acks and %group-acts: only of this consumer group.")
    since: float | None = time_option(None, "--since", "Only what was stored (decided, ...) in the last 30s, 5min, 2h.")

    @property
    def most(self) -> int | None:
        """The maximum number of rows; None: all."""
        return self.limit if self.from_start else self.limit or LAST

    def filters(self) -> dict[str, Any]:
        """Return the filters for :meth:`Admin.read`."""
        stored_from = None if self.since is None else datetime.now(UTC) - timedelta(seconds=self.since)
        return {"tags": self.tag or None, "key": self.key, "group": self.group, "stored_from": stored_from}


def tail(
    chosen: _Chosen,
    source: str = Argument(..., help="A topic, %half, %op, %acks, %group-acts, or %dead-letters.GROUP."),
    follow: bool = Option(False, "--follow", "-f", help="Continue with new rows, until Ctrl-C."),
    url: Url = DEFAULT_URL,
    json: JsonLines = False,
) -> None:
    """Show messages of a topic or rows of a system view (%half, %op, %acks, %group-acts, %dead-letters.GROUP).

    Without --from-start: the last 10, or --limit. If limited, rows are in the order in which they were stored.
    """
    most, from_start = chosen.most, chosen.from_start
    with bus_at(url) as bus:
        readers = _readers(bus, source, chosen)
        dead = source.startswith(DEAD_LETTER_PREFIX)
        later = bus.reader(source, start="latest", tags=chosen.tag, key=chosen.key) if follow and dead else None
        if most is None:
            for reader in readers:
                for row in reader.read():
                    reader.show(row, json)
        else:
            rows = [(row, r) for r in readers for row in (r.read(most) if from_start else deque(r.read(), most))]
            rows.sort(key=lambda found: _stored_time(found[0]))
            for row, reader in rows[:most] if from_start else rows[-most:]:
                reader.show(row, json)
        if later is not None:
            _follow_dead(later, readers[0], json)
        elif follow:
            _follow(readers, json)


def _stored_time(row: Row) -> int:
    """Return the time when a row of a topic or view was stored (by the clock of its broker)."""
    names = ("stored_us", "decided_us", "acked_us", "acted_us")
    return next((row[name] for name in names if row.get(name) is not None), 0)


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Provide an event that the first signal sets (an exception in library cleanup would be lost); the second signal,
    and the end of the block, raise KeyboardInterrupt."""
    stop = threading.Event()

    def on_signal() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with stop_signals(on_signal):
        yield stop
    raise KeyboardInterrupt


def _follow_dead(reader: Reader, shown_by: QueueReader, json: bool) -> None:
    """Follow like :func:`_follow`, but in the order in which messages became dead letters, over all queues."""
    with _until_signal() as stop:
        while not stop.is_set():
            for batch in reader.batches(idle_timeout=POLL_SECONDS):
                for row in batch.arrow.to_pylist():
                    shown_by.show(row, json)
                if stop.is_set():
                    break


def _follow(readers: list[QueueReader], json: bool) -> None:
    """Show new rows until Ctrl-C."""
    with _until_signal() as stop:
        while not stop.is_set():
            before = [reader.next for reader in readers]
            for reader in readers:
                try:
                    for row in reader.read():
                        reader.show(row, json)
                        if stop.is_set():
                            break
                except EscrowError as problem:  # one of several brokers may be unreachable for a while
                    if problem.code not in AWAY or len(readers) == 1:
                        raise
            if before == [reader.next for reader in readers]:
                stop.wait(POLL_SECONDS)


def _readers(bus: Bus, source: str, chosen: _Chosen) -> list[QueueReader]:
    """Create a reader per queue of the source. Without filters they start at the last rows, unless from the start."""
    from escrowmq.client.admin import Admin
    from escrowmq.client.links.router import Router

    every = [Admin(Router([link]), PATIENCE) for link in bus.router.links]
    answers = bus.router.every(lambda number: every[number].topics(), PATIENCE)
    RUN.missing += answers.missing
    admins, wanted = [every[number] for number, _ in answers.found], chosen.filters()
    if source.startswith("%"):
        return [QueueReader(admin, source, 0, 0, wanted) for admin in admins]
    whole = chosen.from_start or any(value is not None for value in wanted.values())
    last = chosen.limit or LAST
    readers = [
        QueueReader(
            admin, source, each["queue"], each["head"] if whole else max(each["head"], each["end"] - last), wanted
        )
        for admin, listed in zip(admins, answers.values, strict=True)
        for topic in listed
        if topic["name"] == source
        for each in topic["queues"]
        if chosen.queue in (None, each["queue"])
    ]
    if not readers:
        what = f"no topic {source!r}" if chosen.queue is None else f"no queue {chosen.queue} of a topic {source!r}"
        raise error(Code.UNKNOWN_TOPIC, what, "see `escrowmq topics list`")
    return readers


def lookup(
    brokers: Brokers,
    key: str | None = Argument(None, help="The key of the messages."),
    message_id: str | None = Option(None, "--id", "-i", help="Instead of a key: the message id (32 digits, or yours)."),
    topic: str | None = Option(None, "--topic", "-t", help="Only in this topic."),
    limit: Limit = 20,
) -> None:
    """Find messages by key or id, newest first: plain, half, committed or rolled back.

    Exit code 1 when there is none.
    """
    if (key is None) == (message_id is None):
        raise error(Code.BAD_ARGUMENT, "look up by key or by id", "escrowmq lookup KEY, or escrowmq lookup --id ID")
    with brokers.admin() as admin:
        found = [plain(m) for m in admin.lookup(message_id=message_id, key=key, topic=topic, limit=limit)[:limit]]
    if len(found) == 1 and not brokers.json:
        print_facts(_facts(found[0]))
    else:
        columns: Columns = {
            "message": _format_address,
            "state": lambda m: state(m["state"]),
            "key": "key",
            "tag": "tag",
            "stored": lambda m: moment(m["stored_us"]),
            "transaction": "transaction",
            "body": lambda m: body_of(m, 40),
        }
        print_rows(found, brokers.json, columns, "nothing found")
    if not found:
        raise typer.Exit(Exit.FINDING)


def _facts(message: dict[str, Any]) -> dict[str, Any]:
    """Return all facts about one message."""
    edit = {"in place of": message.get("edited_from") or "a damaged message", "for group": message.get("group")}
    return {
        "message": _format_address(message),
        "state": state(message["state"]),
        "message id": message["message_id"],
        **(edit if message["state"] == "edited" else {}),
        **{name: message[name] for name in ("transaction", "key", "tag")},
        "born": moment(message["born_us"]),
        "stored": moment(message["stored_us"]),
        "visible from": moment(message["visible_us"]),
        "position": message["position"],
        **{f"property {name}": value for name, value in message["properties"].items()},
        "body": body_of(message, 2000),
    }


def _format_address(message: dict[str, Any]) -> str:
    """Return the position where consumers find a message; only the topic if it is not visible."""
    offset = message["offset"]
    return message["topic"] if offset is None else f"{message['topic']}/{message['queue']}/{offset}"
