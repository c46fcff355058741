"""What enters is checked here, before any work: batches against their schemas and limits, JSON against its names.

Limits of single rows (body, key, names) are the ledger's, because they are answered row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error
from escrowmq.message.limits import has_null_texts
from escrowmq.model import TransactionId
from escrowmq.settings import BrokerSettings
from escrowmq.wire import REQUEST, Exchange

T = TypeVar("T")
_REQUIRED: Any = object()

MAX_IDS = 100_000
"""Ids or items that one action may name."""


def check_batch(kind: Exchange, batch: pa.RecordBatch, settings: BrokerSettings) -> None:
    """Rejected(BAD_BATCH or BATCH_TOO_LARGE) unless the batch is sound, of the kind's schema, and within limits."""
    schema = REQUEST[kind]
    if not isinstance(batch, pa.RecordBatch) or not batch.schema.equals(schema):
        given = batch.schema if isinstance(batch, pa.RecordBatch) else type(batch).__name__
        raise error(Code.BAD_BATCH, f"{kind} wants {_words(schema)}; given {_words(given)}")
    if batch.num_rows > settings.max_batch_rows:
        raise error(Code.BATCH_TOO_LARGE, f"{batch.num_rows} rows; the limit is {settings.max_batch_rows}")
    try:
        batch.validate(full=True)
    except (pa.ArrowException, ValueError) as problem:
        raise error(Code.BAD_BATCH, f"the batch is damaged: {problem}") from None
    if batch.nbytes > settings.max_batch_bytes:
        raise error(Code.BATCH_TOO_LARGE, f"{batch.nbytes} bytes; the limit is {settings.max_batch_bytes}")
    for field, column in zip(schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise error(Code.BAD_BATCH, f"column {field.name!r} has nulls")
        if pa.types.is_map(field.type) and has_null_texts(column):
            raise error(Code.BAD_BATCH, f"column {field.name!r} has null names or values")


def _words(schema: Any) -> str:
    text = ", ".join(f"{f.name}: {f.type}" for f in schema) if isinstance(schema, pa.Schema) else str(schema)
    return text if len(text) <= 600 else text[:600] + "..."


class Fields:
    """The fields of one JSON object; every reader raises Rejected(BAD_REQUEST) that names the field."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self._content.get(name)
        if value is None:
            if default is _REQUIRED:
                raise error(Code.BAD_REQUEST, f"{name!r} is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 0, most: int = (1 << 63) - 1) -> Any:
        """A whole number within bounds."""
        value = self._value(name, default)
        if value is default and default is not _REQUIRED:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise error(Code.BAD_REQUEST, f"{name!r} must be a whole number from {least} to {most}, not {value!r:.100}")
        return value

    def seconds(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number of seconds, not negative."""
        value = self._value(name, default)
        if value is default and default is not _REQUIRED:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e10:
            raise error(Code.BAD_REQUEST, f"{name!r} must be a number of seconds, not {value!r:.100}")
        return float(value)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string of at most 64 KiB."""
        value = self._value(name, default)
        if value is default and default is not _REQUIRED:
            return value
        if not isinstance(value, str) or len(value) > 1 << 16:
            raise error(Code.BAD_REQUEST, f"{name!r} must be a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise error(Code.BAD_REQUEST, f"{name!r} is not valid Unicode") from None
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise error(Code.BAD_REQUEST, f"{name!r} must be true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        """One of some words."""
        value = self._value(name, default)
        if value not in choices:
            raise error(Code.BAD_REQUEST, f"{name!r} must be one of {', '.join(choices)}, not {value!r:.100}")
        return str(value)

    def list(self, name: str, of: type[T], default: Any = _REQUIRED) -> list[T]:
        """A list of values of one type, at most ``MAX_IDS``."""
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or not all(isinstance(item, of) for item in value):
            raise error(Code.BAD_REQUEST, f"{name!r} must be a list of {of.__name__}")
        if len(value) > MAX_IDS:
            raise error(Code.BATCH_TOO_LARGE, f"{name!r} has {len(value)} items; the limit is {MAX_IDS}")
        return list(value)


def transaction_id(text: str) -> TransactionId:
    """A transaction id from its printed form; Rejected(BAD_REQUEST) for anything else."""
    try:
        return TransactionId.parse(text)
    except EscrowError as problem:
        raise error(Code.BAD_REQUEST, problem.message, problem.hint) from None
