"""The records of acts as lines of JSON, each with the hash of the line before it; and what is wrong with a chain that
somebody has edited.

One line is one record. An act has two: one before it is done, with who, what and why, and one when it has ended, which
names the first by its number (``of``) and says what came of it::

    {"act":"transactions.settle","at_us":1790000000000000,"by":"anna@shop-1","n":1,"prev":"5f...","what":{...},"why":"...","hash":"c0..."}
    {"at_us":1790000000002000,"ended":{...},"n":2,"of":1,"prev":"c0...","hash":"9e..."}

``hash`` is SHA-256 over the line as it would be without its ``hash`` (keys sorted, ASCII, no spaces); ``prev`` is that
of the line before, for the first line that of a text which names the shard. So a record that was changed, removed, put
in or moved breaks the chain at its place. What is missing at the very end is known from the file beside it, which has
the number and the hash of the last record. Whoever can write both files can forge both: a chain shows edits, it does
not prevent them. Copy the last hash to a place of your own to show those, too.

A database does an act and records it in one transaction, so there the act and what came of it are one record, with
``act`` and ``ended``.

``by`` is the user and the host as the client's operating system names them. Nobody has verified it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_TEXT = 1000
"""Characters of ``by`` and of ``why``: more are cut."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: the begin of an act (``act``, ``by``, ``why``, ``what``), or the end of the act ``of`` (``ended``); or,
    in a database, both in one (no ``of``)."""

    number: int
    at_us: int
    act: str | None = None
    by: str | None = None
    why: str | None = None
    what: dict[str, Any] = field(default_factory=dict)
    of: int | None = None
    ended: dict[str, Any] | None = None

    def sealed(self, previous: str) -> tuple[bytes, str]:
        """Return the line, its end included, and its hash. ``previous``: the hash of the line before."""
        fields: dict[str, Any] = {"n": self.number, "at_us": self.at_us, "prev": previous}
        if self.of is None:
            fields |= {"act": self.act, "by": self.by, "why": self.why, "what": self.what}
            if self.ended is not None:
                fields["ended"] = self.ended
        else:
            fields |= {"of": self.of, "ended": self.ended}
        line, digest = _seal(fields)
        return line + b"\n", digest


@dataclass(frozen=True, slots=True)
class Break:
    """A place where the chain does not hold. ``line`` counts from 1; ``number`` is that of the record, if it can be
    read."""

    line: int
    number: int | None
    what: str

    def __str__(self) -> str:
        named = f" (record {self.number})" if self.number is not None else ""
        return f"line {self.line}{named}: {self.what}"


def origin(place: int | str) -> str:
    """Return the value that stands for the hash before the first record. It differs between shards, so a file of
    another shard is noticed. ``place``: a
    shard's number, or what keeps the record otherwise."""
    named = f"shard {place}" if isinstance(place, int) else place
    return hashlib.sha256(f"EscrowMQ acts of {named}".encode()).hexdigest()


def cut(text: str | None) -> str | None:
    """``by`` or ``why`` as a record keeps it."""
    return text if text is None else text[:MOST_TEXT]


def parse(line: bytes) -> tuple[Record, str, str]:
    """Return the record of a line, the hash of the line before, its own. Raises ValueError for what is no record."""
    try:
        fields = json.loads(line)
        return _record(fields), _hash_in(fields["prev"]), _hash_in(fields["hash"])
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"this is no record of an act: {problem!r:.100}") from None


def is_sealed(line: bytes) -> bool:
    """Return whether the line is, byte for byte, what its content would be sealed as."""
    try:
        fields = json.loads(line)
        fields.pop("hash")
        return line == _seal(fields)[0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def successor(line: bytes) -> str:
    """Return the value that the next line has as ``prev``: the hash of this line, or of its bytes if it carries
    none."""
    try:
        return parse(line)[2]
    except ValueError:
        return hashlib.sha256(line).hexdigest()


def verify(lines: Iterable[bytes], place: int | str, last: tuple[int, str] | None) -> tuple[int, list[Break]]:
    """Return how many records there are, and every place where the chain is broken. ``last``: number and hash of the
    last
    record as the file beside it has them (None: there is none); ``place`` as for :func:`origin`; lines come without
    their ends."""
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
            breaks.append(Break(count, record.number, "it was changed: its hash is not that of its content"))
        if before != previous:
            what = "the line before it is not the one that it follows"
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
            breaks.append(Break(count, number, "it is not the last record that was written"))
    return count, breaks


def _missing(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"


def _record(fields: dict[str, Any]) -> Record:
    number, at_us, of = fields["n"], fields["at_us"], fields.get("of")
    if not isinstance(number, int) or not isinstance(at_us, int) or not isinstance(of, int | None):
        raise ValueError("a number is missing")
    if of is not None:
        return Record(number, at_us, of=of, ended=dict(fields["ended"]))
    act = fields["act"]
    if not isinstance(act, str):
        raise ValueError("no act is named")
    return Record(
        number, at_us, act, fields.get("by"), fields.get("why"), dict(fields["what"]), ended=_read_end(fields)
    )


def _read_end(fields: dict[str, Any]) -> dict[str, Any] | None:
    return dict(fields["ended"]) if fields.get("ended") is not None else None


def _hash_in(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64:
        raise ValueError("a hash is missing")
    return value


def _seal(fields: dict[str, Any]) -> tuple[bytes, str]:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}', digest
