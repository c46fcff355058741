"""``escrowmq send``: plain messages from the argument, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from escrowmq.cli.failures import exit_code, show_error
from escrowmq.cli.options import DEFAULT_URL, PATIENCE, Url, bus_at, pairs, seconds
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Message

if TYPE_CHECKING:
    from escrowmq.model import Receipt

BATCH = 1000
BAR_FROM = 20 * BATCH
"""Messages from which on a progress bar is shown."""


def send(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    body: Annotated[str | None, typer.Argument(help="The body; - or nothing: standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Take the body from a file.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the file or input is a message.")] = False,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Same key, same queue, in order.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="What consumers filter by.")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", "-p", metavar="NAME=VALUE", help="May be given again.")
    ] = None,
    delay: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Not visible before: 5s, 10min.")] = None,
    queue: Annotated[
        int | None, typer.Option("--queue", "-q", min=0, help="This queue; else by key or by turns.")
    ] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", help="Your message id: sent again, it makes no second message.")
    ] = None,
    count: Annotated[
        int,
        typer.Option("--count", "-c", min=1, help="So many messages; {n} in key, id and body is the number, from 0."),
    ] = 1,
    group: Annotated[str, typer.Option("--group", "-g", help="The producer group.")] = "command-line",
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="One JSON receipt a line, for scripts.")] = False,
) -> None:
    """Send plain messages; each is durable when its receipt is printed."""
    if message_id is not None and (lines or (count > 1 and "{n}" not in message_id)):
        raise error(Code.BAD_ARGUMENT, "one id names one message", "put {n} into --id, or leave it out")
    bodies = _bodies(body, file, lines)
    named = pairs(properties, "--property") or None
    wait = seconds(delay, "--delay") or 0.0

    def messages() -> Iterator[Message]:
        for content in bodies:
            for n in range(count):
                number = str(n)
                yield Message(
                    topic,
                    content.replace(b"{n}", number.encode()) if count > 1 else content,
                    key=_numbered(key, number, count),
                    tag=tag,
                    properties=named,
                    delay=wait,
                    queue=queue,
                    message_id=_numbered(message_id, number, count),
                )

    total = len(bodies) * count
    show_each = json or total <= 20
    failed: EscrowError | None = None
    with bus_at(url) as bus, bus.producer(group, timeout=PATIENCE) as producer:
        batches: Iterable[list[Message]] = _batches(messages())
        if total >= BAR_FROM and not json:
            batches = track(batches, "sending", total=-(-total // BATCH), console=Console(stderr=True))
        sent = 0
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
    if not show_each:
        notice(f"{sent:,} messages sent to {topic}")
    if failed is not None:
        notice(f"{total - sent:,} of {total:,} not sent; the first because of")
        show_error(failed)
        raise typer.Exit(exit_code(failed))


def _bodies(body: str | None, file: Path | None, lines: bool) -> list[bytes]:
    if body is not None and body != "-":
        if file is not None:
            raise error(Code.BAD_ARGUMENT, "a body and a file were given", "give one of them")
        content = body.encode(errors="surrogateescape")
    elif file is not None:
        try:
            content = file.read_bytes()
        except OSError as problem:
            raise error(Code.BAD_ARGUMENT, f"cannot read {file}: {problem.strerror}") from None
    else:
        content = sys.stdin.buffer.read()
    return content.splitlines() if lines else [content]


def _numbered(text: str | None, number: str, count: int) -> str | None:
    return text.replace("{n}", number) if text is not None and count > 1 else text


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
        print_json_line(
            {
                "message_id": receipt.message_id.hex(),
                "topic": receipt.topic,
                "queue": receipt.queue,
                "offset": receipt.offset,
                "position": receipt.position,
            }
        )
    else:
        where = "delayed" if receipt.offset is None else f"queue {receipt.queue} offset {receipt.offset}"
        notice(f"{receipt.message_id.hex()}  {receipt.topic} {where}")
