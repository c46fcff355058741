"""Fields of JSON bodies as Spark's ``from_json`` reads them to text, but decoded in the process that reads the log.

What Spark may write in another way (nested values, long or unusual numbers, bodies that are no JSON objects) is marked:
see :mod:`escrowmq.pipeline.sql.summing`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from escrowmq.pipeline.sql.summing import INTEGER, mark

MESSAGE_COLUMNS = ("message_id", "transaction_id", "tag", "properties", "body")
"""Columns that every topic has beside the fields of its bodies."""
_FLOAT = re.compile(rb"-?(0|[1-9][0-9]*)[.][0-9]+")
_FLOAT_LENGTH = 15  # a double has as many digits exactly
_UNUSUAL = (msgspec.MsgspecError, UnicodeError, RecursionError, pa.ArrowInvalid, TypeError, OverflowError)


class Bodies:
    """A reader of some fields of bodies, by name; ``kinds`` are those in which they are compared."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = list(kinds.values())
        self._names = [f"f{n}" for n in range(len(kinds))]
        rename = dict(zip(self._names, kinds, strict=True))
        usual, raw = ([(name, of, default) for name in rename] for of, default in ((_USUAL, None), (_RAW, _RAW(b""))))
        self._decode_usual = msgspec.json.Decoder(msgspec.defstruct("Usual", usual, rename=rename, gc=False)).decode
        self._decode_raw = msgspec.json.Decoder(msgspec.defstruct("Raw", raw, rename=rename, gc=False)).decode

    def read(self, bodies: Sequence[bytes]) -> list[pa.Array]:
        """Return each field of these bodies: binary (text, a marked value, or null), or int64 if all are integers."""
        try:
            decode = self._decode_usual
            rows = [decode(body) for body in bodies]
            return [_to_array([getattr(row, name) for row in rows]) for name in self._names]
        except _UNUSUAL:
            columns = zip(*map(self._read_one, bodies), strict=True)
            return [pa.array(column, pa.binary()) for column in columns]

    def _read_one(self, body: bytes) -> list[bytes | None]:
        try:
            row = self._decode_raw(body)
        except _UNUSUAL:
            whole = mark(mark(body or b""))  # twice: no value of a field equals it; a damaged row has no body
            return [whole] * len(self._names)
        pairs = zip(self._names, self._kinds, strict=True)
        return [_read_value(bytes(getattr(row, name)), kind) for name, kind in pairs]


_USUAL: Any = str | int | None
_RAW = msgspec.Raw


def _to_array(values: Sequence[str | int | None]) -> pa.Array:
    return pa.array(values, pa.int64() if int in set(map(type, values)) else pa.binary())


def _read_value(raw: bytes, kind: str) -> bytes | None:
    if raw in (b"", b"null"):
        return None
    is_short = kind == "number" and len(raw) <= _FLOAT_LENGTH and _FLOAT.fullmatch(raw)
    if raw in (b"true", b"false") or is_short or INTEGER.fullmatch(raw):
        return raw
    try:
        return msgspec.json.decode(raw, type=str).encode()
    except _UNUSUAL:
        return mark(raw)
