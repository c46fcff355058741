"""Bounds JSON before it is parsed: its bytes, how many values it holds, how deep it is.

A parser makes some 70 bytes of every ``{}`` and a checker of models some kilobytes of every wrong one, so a body of one
MiB can become a GiB. What is counted here is what is outside strings: every value but the first of its list or object
follows a comma, and every list and object begins with a bracket.
"""

from __future__ import annotations

import re

from escrowmq.errors import Code, error

MAX_DEPTH = 32
"""Lists and objects within each other; no request has more than 8."""

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def check_json(raw: bytes, *, most_bytes: int, most_values: int) -> None:
    """Rejected(BATCH_TOO_LARGE) for JSON over these limits, Rejected(BAD_REQUEST) for what is deeper or not UTF-8.

    Names count as values. What passes may still be no JSON: that is its parser's to say.
    """
    if len(raw) > most_bytes:
        raise error(Code.BATCH_TOO_LARGE, f"{len(raw)} bytes of JSON; the limit is {most_bytes}")
    if b"\0" in raw or raw.startswith(b"\xef\xbb\xbf"):
        raise error(Code.BAD_REQUEST, "not JSON in UTF-8 (without a byte order mark)")
    depth = raw.count(b"[") + raw.count(b"{")
    if _values(raw) <= most_values and depth <= MAX_DEPTH:
        return
    bare = _STRINGS.sub(b'""', raw)  # texts may hold any number of commas
    if (count := _values(bare)) > most_values:
        raise error(Code.BATCH_TOO_LARGE, f"{count} values in one request; the limit is {most_values}")
    _check_depth(bare.translate(None, _NOT_BRACKETS))


def _values(raw: bytes) -> int:
    """Values and names, at most; the empty lists and objects, which hold none, are one each."""
    return raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{") + 1


def _check_depth(brackets: bytes) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise error(Code.BAD_REQUEST, f"lists or objects more than {MAX_DEPTH} deep")
