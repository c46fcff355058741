"""Options that several commands share, the parsing of their values, and the connection to the broker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from escrowmq.errors import Code, error
from escrowmq.settings import SECONDS, parse_quantity

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.bus import Bus

DEFAULT_URL = "escrow://127.0.0.1:7700"
PATIENCE = 10.0
"""Seconds that a command waits for its broker."""

Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="ESCROWMQ_URL", help="The broker: escrow://HOST:PORT[,HOST:PORT...] or file:FOLDER."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many.")]


@contextmanager
def bus_at(url: str) -> Iterator[Bus]:
    """A connection for the time of a command."""
    from escrowmq.connecting import connect

    with connect(url) as bus:
        yield bus


@contextmanager
def admin_at(url: str) -> Iterator[Admin]:
    """The admin face of the broker(s) at ``url``, with a command's patience."""
    from escrowmq.client.admin import Admin

    with bus_at(url) as bus:
        yield Admin(bus.router, PATIENCE)


def seconds(text: str | None, option: str) -> float | None:
    """A duration as people write it (``5min``) in seconds. Raises Misuse(BAD_ARGUMENT) that names the option."""
    if text is None:
        return None
    try:
        return parse_quantity(text, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{option}: {problem}") from None


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict. Raises Misuse(BAD_ARGUMENT) that names the option."""
    made = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(Code.BAD_ARGUMENT, f"{option} {text!r} is not NAME=VALUE")
        made[name] = value
    return made
