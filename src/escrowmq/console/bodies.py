"""A message's body for the eye: as JSON, as text, or as hexadecimal digits; always as text of the page, never as
markup.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from escrowmq.console.words import lines

MOST = 64 << 10
"""Bytes of a body that a page shows."""
HEX_MOST = 8 << 10
"""Bytes of them in hexadecimal digits: each takes five letters."""
DEEPEST = 40
"""Levels that are moved in; deeper ones stand below each other."""
KINDS = ("json", "text", "hex")

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True)
class Body:
    """A body as it is shown: in which of ``kinds``, how much of it."""

    size: int
    kind: str
    kinds: tuple[str, ...]
    text: str
    shown: int
    """Bytes of it that the text is made of."""


def shown(body: bytes, wanted: str | None = None) -> Body:
    """Return a body in the kind that is wanted, else in the most readable one that it can be."""
    start = body[:MOST]
    text = _text(start, len(body) > MOST)
    neat = _neat(text) if text is not None and len(body) <= MOST else None
    kinds = tuple(kind for kind in KINDS if kind == "hex" or (neat if kind == "json" else text) is not None)
    kind = wanted if wanted in kinds else kinds[0]
    if kind == "json":
        return Body(len(body), kind, kinds, lines(neat or ""), len(start))
    if kind == "text":
        return Body(len(body), kind, kinds, lines(text or ""), len(start))
    return Body(len(body), kind, kinds, _hex(body[:HEX_MOST]), min(len(body), HEX_MOST))


def _text(start: bytes, cut: bool) -> str | None:
    """UTF-8, or None. A letter that the cut went through is left out."""
    for shorter in range(4 if cut else 1):
        try:
            return start[: len(start) - shorter].decode()
        except UnicodeDecodeError as problem:
            if problem.start < len(start) - 4:
                return None
    return None


def _neat(text: str) -> str | None:
    """JSON with one value a line, every letter of its values as it was sent; None if it is no object and no list."""
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
                made.append(_line(depth))
        elif token in "}]":
            depth -= 1
            if tokens[number - 1] not in "{[":
                made.append(_line(depth))
            made.append(token)
        elif token == ",":
            made.append("," + _line(depth))
        else:
            made.append(": " if token == ":" else token)
    return "".join(made)


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, DEEPEST)


def _hex(start: bytes) -> str:
    rows = []
    for at in range(0, len(start), 16):
        row = start[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{at:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(rows)
