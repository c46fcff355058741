"""Limits JSON before it is parsed: its bytes, its number of values, its depth.

A parser needs about 70 bytes for every ``{}``, and a model validator some kilobytes for every invalid one, so a body of
one MiB can become a GiB. Only characters outside strings count here: every value but the first of its list or object
follows a comma, and every list and object begins with a bracket.
"""

from __future__ import annotations

import re

from escrowmq.errors import Code, error

MAX_DEPTH = 32
"""Maximum nesting of lists and objects; no request has more than 8."""

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def check_json(raw: bytes, *, most_bytes: int, most_values: int) -> None:
    """Raise Rejected(BATCH_TOO_LARGE) for JSON over these limits, Rejected(BAD_REQUEST) for deeper nesting or
    non-UTF-8.

    Names count as values. The text may still be invalid JSON, which its parser detects.
    """
    if len(raw) > most_bytes:
        raise error(Code.BATCH_TOO_LARGE, f"{len(raw)} bytes of JSON; the limit is {most_bytes}")
    if b"\0" in raw or raw.startswith(b"\xef\xbb\xbf"):
        raise error(Code.BAD_REQUEST, "not JSON in UTF-8 (without a byte order mark)")
    depth = raw.count(b"[") + raw.count(b"{")
    if _count_values(raw) <= most_values and depth <= MAX_DEPTH:
        return
    bare = _STRINGS.sub(b'""', raw)  # strings may contain any number of commas
    if (count := _count_values(bare)) > most_values:
        raise error(Code.BATCH_TOO_LARGE, f"{count} values in one request; the limit is {most_values}")
    _check_depth(bare.translate(None, _NOT_BRACKETS))


def _count_values(raw: bytes) -> int:
    """Return an upper bound of values and names; empty lists and objects count as one each."""
    return raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{") + 1


def _check_depth(brackets: bytes) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise error(Code.BAD_REQUEST, f"lists or objects more than {MAX_DEPTH} deep")
