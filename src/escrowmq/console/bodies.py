"""A message's body for display: as JSON, text or hexadecimal digits; always plain text of the page, never markup."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from escrowmq.console.words import lines

MOST = 64 << 10
"""Maximum bytes of a body that a page shows."""
HEX_MOST = 8 << 10
"""Maximum bytes shown in hexadecimal digits: each takes five characters."""
DEEPEST = 40
"""Maximum indentation levels; deeper values are not indented further."""
KINDS = ("json", "text", "hex")

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True)
class Body:
    """A body as displayed: in one of ``kinds``, and how much of it."""

    size: int
    kind: str
    kinds: tuple[str, ...]
    text: str
    shown: int
    """Number of its bytes in ``text``."""


def shown(body: bytes, wanted: str | None = None) -> Body:
    """Format a body in the requested kind if possible, else in the most readable one."""
    start = body[:MOST]
    text = _decode(start, len(body) > MOST)
    neat = _format_json(text) if text is not None and len(body) <= MOST else None
    kinds = tuple(kind for kind in KINDS if kind == "hex" or (neat if kind == "json" else text) is not None)
    kind = wanted if wanted in kinds else kinds[0]
    if kind == "json":
        return Body(len(body), kind, kinds, lines(neat or ""), len(start))
    if kind == "text":
        return Body(len(body), kind, kinds, lines(text or ""), len(start))
    return Body(len(body), kind, kinds, _format_hex(body[:HEX_MOST]), min(len(body), HEX_MOST))


def _decode(start: bytes, cut: bool) -> str | None:
    """Decode UTF-8; None if invalid. A character cut at the end is dropped."""
    for shorter in range(4 if cut else 1):
        try:
            return start[: len(start) - shorter].decode()
        except UnicodeDecodeError as problem:
            if problem.start < len(start) - 4:
                return None
    return None


def _format_json(text: str) -> str | None:
    """Format JSON with one value per line and unchanged characters; None if it is not an object or list."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    made: list[str] = []
    depth = 0
    tokens = _TOKEN.findall(text)
    for number, token in enumerate(tokens):
        if token in "{[":
            depth += 1
            made.append(token)
            if tokens[number + 1] not in "}]":
                made.append(_new_line(depth))
        elif token in "}]":
            depth -= 1
            if tokens[number - 1] not in "{[":
                made.append(_new_line(depth))
            made.append(token)
        elif token == ",":
            made.append("," + _new_line(depth))
        else:
            made.append(": " if token == ":" else token)
    return "".join(made)


def _new_line(depth: int) -> str:
    return "\n" + "  " * min(depth, DEEPEST)


def _format_hex(start: bytes) -> str:
    rows = []
    for at in range(0, len(start), 16):
        row = start[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{at:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(rows)
