"""Records of acts as lines of JSON, each with the hash of the previous line, and the detection of edited chains.

One line is one record. An act has two: one before it is applied, with operator, request and reason, and one after it
has ended, which refers to the first by its number (``of``) and contains the outcome::

    {"act":"transactions.settle","at_us":1790000000000000,"by":"anna@shop-1","n":1,"prev":"5f...","what":{...},
     "why":"...","hash":"c0..."}
    {"at_us":1790000000002000,"ended":{...},"n":2,"of":1,"prev":"c0...","hash":"9e..."}

``hash`` is SHA-256 over the line without its ``hash`` (keys sorted, ASCII, no spaces); ``prev`` is that of the previous
line, for the first line that of a text with the shard's number. So a changed, removed, inserted or moved record breaks
the chain at its place. The file beside it has the number and the hash of the last record, which reveals missing records
at the end. With write access to both files both can be forged: a chain shows edits, it does not prevent them. Copy the
last hash to another place to detect those, too.

A database applies and records an act in one transaction, so there the act and its outcome are one record, with ``act``
and ``ended``.

``by`` is the user and the host from the client's operating system, unverified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_TEXT = 1000
"""Maximum characters of ``by`` and of ``why``."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: start of an act (``act``, ``by``, ``why``, ``what``), end of the act ``of`` (``ended``), or both."""

    number: int
    at_us: int
    act: str | None = None
    by: str | None = None
    why: str | None = None
    what: dict[str, Any] = field(default_factory=dict)
    of: int | None = None
    ended: dict[str, Any] | None = None

    def sealed(self, previous: str) -> tuple[bytes, str]:
        """Return the line with its newline, and its hash. ``previous``: the hash of the previous line."""
        fields: dict[str, Any] = {"n": self.number, "at_us": self.at_us, "prev": previous}
        if self.of is not None:
            fields["of"] = self.of
        else:
            fields |= {"act": self.act, "by": self.by, "why": self.why, "what": self.what}
        if self.of is not None or self.ended is not None:
            fields["ended"] = self.ended
        line, digest = _seal(fields)
        return line + b"\n", digest


@dataclass(frozen=True, slots=True)
class Break:
    """A place where the chain is broken. ``line`` counts from 1; ``number`` is that of the record, if readable."""

    line: int
    number: int | None
    what: str

    def __str__(self) -> str:
        named = f" (record {self.number})" if self.number is not None else ""
        return f"line {self.line}{named}: {self.what}"


def origin(place: int | str) -> str:
    """Return the hash that precedes the first record: it differs between shards, so a file of another shard is
    detected. ``place``: a shard's number, or the name of another place."""
    named = f"shard {place}" if isinstance(place, int) else place
    return hashlib.sha256(f"EscrowMQ acts of {named}".encode()).hexdigest()


def cut(text: str | None) -> str | None:
    """Truncate ``by`` or ``why`` to its stored length."""
    return text if text is None else text[:MOST_TEXT]


def parse(line: bytes) -> tuple[Record, str, str]:
    """Parse a line; return its record, the previous line's hash and its own. Raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        return _record(fields), _hash_in(fields["prev"]), _hash_in(fields["hash"])
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"this is not a record of an act: {problem!r:.100}") from None


def is_sealed(line: bytes) -> bool:
    """Decide whether the line equals, byte for byte, the sealed form of its content."""
    try:
        fields = json.loads(line)
        fields.pop("hash")
        return line == _seal(fields)[0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def successor(line: bytes) -> str:
    """Return the ``prev`` of the next line: this line's hash, or the hash of its bytes if it has none."""
    try:
        return parse(line)[2]
    except ValueError:
        return hashlib.sha256(line).hexdigest()


def verify(lines: Iterable[bytes], place: int | str, last: tuple[int, str] | None) -> tuple[int, list[Break]]:
    """Return the number of records, and every place where the chain is broken. ``last``: number and hash of the last
    record from the file beside it (None: no file); ``place`` as for :func:`origin`; lines come without newlines."""
    breaks: list[Break] = []
    previous, number, count = origin(place), 0, 0
    for count, line in enumerate(lines, 1):
        try:
            record, before, digest = parse(line)
        except ValueError as problem:
            breaks.append(Break(count, None, str(problem)))
            previous, number = successor(line), number + 1
            continue
        if not is_sealed(line):
            breaks.append(Break(count, record.number, "it was changed: its hash does not match its content"))
        if before != previous:
            what = "the previous line is not its predecessor"
            if record.number > number + 1:
                what = f"{_missing(number + 1, record.number - 1)} missing before it"
            breaks.append(Break(count, record.number, what))
        elif record.number != number + 1:
            breaks.append(Break(count, record.number, f"its number should be {number + 1}"))
        previous, number = digest, record.number
    if last is not None and last != (number, previous):
        if last[0] > number:
            breaks.append(Break(count + 1, last[0], f"{_missing(number + 1, last[0])} missing at the end"))
        elif last[0] == number:
            breaks.append(Break(count, number, "it is not the last written record"))
    return count, breaks


def _missing(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"


def _record(fields: dict[str, Any]) -> Record:
    number, at_us, of = fields["n"], fields["at_us"], fields.get("of")
    if not isinstance(number, int) or not isinstance(at_us, int) or not isinstance(of, int | None):
        raise ValueError("a number is missing")
    if of is not None:
        return Record(number, at_us, of=of, ended=dict(fields["ended"]))
    act, ended = fields["act"], fields.get("ended")
    if not isinstance(act, str):
        raise ValueError("no act is named")
    ended = None if ended is None else dict(ended)
    return Record(number, at_us, act, fields.get("by"), fields.get("why"), dict(fields["what"]), ended=ended)


def _hash_in(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64:
        raise ValueError("a hash is missing")
    return value


def _seal(fields: dict[str, Any]) -> tuple[bytes, str]:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}', digest
