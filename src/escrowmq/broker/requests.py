"""Validates requests before any work is done: batches by schemas and limits, JSON by its type.

The ledger checks the limits of single rows (body, key, names), because it answers row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar, cast, get_origin, is_typeddict

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error
from escrowmq.message.limits import has_null_texts
from escrowmq.message.row import ROW_OVERHEAD
from escrowmq.model import Act, Outcome, TransactionId
from escrowmq.settings import BrokerSettings
from escrowmq.wire import PARCEL_ROWS, REQUEST, Exchange, Parcel
from escrowmq.wire.values import Value, fields_of

T = TypeVar("T")

MAX_IDS = 100_000  # ids or items that one action may name
MOST_SHOWN = 30  # columns of a wrong schema that its refusal names
MAX_TEXT = 1 << 16  # characters of one string


def check_schema(kind: Exchange, given: Any) -> None:
    """Raise Rejected(BAD_BATCH) unless ``given`` is the schema of the kind's requests."""
    wanted = REQUEST[kind]
    if not isinstance(given, pa.Schema) or len(given) != len(wanted) or not given.equals(wanted):
        raise error(Code.BAD_BATCH, f"{kind} requires {_words(wanted)}; given {_words(given)}")


def check_batch(kind: Exchange, batch: pa.RecordBatch, settings: BrokerSettings) -> None:
    """Raise Rejected(BAD_BATCH or BATCH_TOO_LARGE) unless the batch is sound, of the kind's schema, and within
    limits."""
    check_schema(kind, batch.schema if isinstance(batch, pa.RecordBatch) else type(batch).__name__)
    if batch.num_rows > settings.max_batch_rows:
        raise error(Code.BATCH_TOO_LARGE, f"{batch.num_rows} rows; the limit is {settings.max_batch_rows}")
    try:
        batch.validate(full=True)
    except (pa.ArrowException, ValueError) as problem:
        raise error(Code.BAD_BATCH, f"the batch is damaged: {problem}") from None
    # nbytes of a slice only if its whole buffers are too large: it takes Arrow 20 times as long.
    if batch.get_total_buffer_size() > settings.max_batch_bytes < batch.nbytes:
        raise error(Code.BATCH_TOO_LARGE, f"{batch.nbytes} bytes; the limit is {settings.max_batch_bytes}")
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise error(Code.BAD_BATCH, f"column {field.name!r} has nulls")
        if pa.types.is_map(field.type) and has_null_texts(column):
            raise error(Code.BAD_BATCH, f"column {field.name!r} has null names or values")


_TEXT, _ID, _PAIRS = (str, type(None)), (bytes, type(None)), (list, type(None))
_SHAPES: dict[Exchange, frozenset[tuple[type, ...]]] = {
    kind: frozenset(product(*types))
    for kind, types in {
        Exchange.SEND: ((str,), (bytes,), _TEXT, _TEXT, _PAIRS, _ID, *[(int,)] * 4, _ID),
        Exchange.PREPARE: ((str,), (bytes,), _TEXT, _TEXT, _PAIRS, _ID, *[(int,)] * 4, _ID),
        Exchange.END: ((bytes,), (int, Outcome)),
        Exchange.SETTLE: (*[(int,)] * 3, (int, Act), (int,), _TEXT),
    }.items()
}
"""The types that the values of a parcel's rows may have."""
_MOST_INSTANCE, _MOST_SEQUENCE = 1 << 64, (1 << 64) - PARCEL_ROWS
_VALUE_BYTES = 8


def check_parcel(parcel: Parcel, settings: BrokerSettings, sound_bytes: int | None = None) -> int:
    """Check the rows of a parcel, and return about how many bytes they take: ``sound_bytes`` if given, because a
    carrier has checked all types. Raises Rejected(BAD_BATCH or BATCH_TOO_LARGE) unless they are tuples of the kind's
    types, with ids of 16 bytes. The writer refuses numbers out of range and text that is not Unicode, when it makes
    columns of them."""
    rows = parcel.rows
    if len(rows) > min(PARCEL_ROWS, settings.max_batch_rows):
        raise error(Code.BATCH_TOO_LARGE, f"a parcel of {len(rows)} rows; the limit is {PARCEL_ROWS}")
    size = _check_bytes(parcel) if sound_bytes is None else sound_bytes
    if size > settings.max_batch_bytes:
        raise error(Code.BATCH_TOO_LARGE, f"{size} bytes; the limit is {settings.max_batch_bytes}")
    return size


def _check_bytes(parcel: Parcel) -> int:
    shapes, size = _SHAPES[parcel.kind], 0
    for row in parcel.rows:
        if not isinstance(row, tuple) or tuple(map(type, row)) not in shapes:
            raise error(Code.BAD_BATCH, f"{row!r:.200} is no row of {parcel.kind}")
        size += _row_bytes(parcel.kind, row)
    instance, sequence = parcel.first_id
    if not (0 <= instance < _MOST_INSTANCE and 0 <= sequence < _MOST_SEQUENCE):
        raise error(Code.BAD_BATCH, f"{parcel.first_id!r:.100} is no message id")
    return size


def _row_bytes(kind: Exchange, row: tuple[Any, ...]) -> int:
    if kind is Exchange.END:
        if len(row[0]) != 16:
            raise error(Code.BAD_BATCH, "a transaction id has 16 bytes")
        return ROW_OVERHEAD
    if kind is Exchange.SETTLE:
        return ROW_OVERHEAD + (len(row[5]) if row[5] is not None else 0)
    topic, body, key, tag, pairs, identity, _, _, _, _, transaction = row
    if (identity is not None and len(identity) != 16) or (transaction is not None and len(transaction) != 16):
        raise error(Code.BAD_BATCH, "ids have 16 bytes")
    size = len(topic) + len(body) + len(key or "") + len(tag or "") + ROW_OVERHEAD
    for pair in pairs or ():
        if type(pair) is not tuple or tuple(map(type, pair)) != (str, str):
            raise error(Code.BAD_BATCH, f"{pair!r:.200} is no property")
        size += len(pair[0]) + len(pair[1]) + _VALUE_BYTES
    return size


def _words(schema: Any) -> str:
    if not isinstance(schema, pa.Schema):
        text = str(schema)
    else:  # it may have a million columns
        first = [schema.field(number) for number in range(min(len(schema), MOST_SHOWN))]
        text = ", ".join(f"{f.name}: {f.type}" for f in first) + (", ..." if len(schema) > MOST_SHOWN else "")
    return (text if len(text) <= 600 else text[:600] + "...") or "no columns"


def checked(shape: type[T], content: Mapping[str, Any]) -> T:
    """Validate JSON: return the fields of TypedDict ``shape`` that ``content`` has, each of its type and within its
    bounds. Null is the same as absent; unknown names are left out. Raises Rejected(BAD_REQUEST), which names the field;
    Rejected(BATCH_TOO_LARGE) for a list of more than ``MAX_IDS``."""
    found: dict[str, Any] = {}
    for name, required, check in _checks(cast(Any, shape)):
        value = content.get(name)
        if value is not None:
            found[name] = check(name, value)
        elif required:
            raise error(Code.BAD_REQUEST, f"{name!r} is missing")
    return cast(T, found)


_Check = Callable[[str, Any], Any]  # of one type: takes the name for its errors and a value, and returns the value


@cache
def _checks(shape: Any) -> tuple[tuple[str, bool, _Check], ...]:
    """Return for each field of a TypedDict its name, whether it is required, and the function that checks its value."""
    return tuple((field.name, field.required, _check_of(field.value)) for field in fields_of(shape))


def _check_of(value: Value) -> _Check:
    kind, bounds, choices = value.kind, value.bounds, value.choices
    if choices:
        return _scalar(lambda given: given in choices, f"one of {', '.join(choices)}", str)
    if is_typeddict(kind):
        return _scalar(lambda given: isinstance(given, dict), "an object", partial(checked, kind))
    if get_origin(kind) is tuple:
        return partial(_tuple, [_check_of(item) for item in value.items])
    if value.items:
        return partial(_list, _check_of(value.items[0]))
    if kind is int:
        return _scalar(
            lambda given: _is_number(given, int) and bounds.least <= given <= bounds.most,
            f"a whole number from {bounds.least} to {bounds.most}",
        )
    return _PLAIN[kind]


def _is_number(given: Any, kind: Any) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def _scalar(is_valid: Callable[[Any], bool], wanted: str, make: Callable[[Any], Any] = lambda given: given) -> _Check:
    def check(name: str, given: Any) -> Any:
        if not is_valid(given):
            raise error(Code.BAD_REQUEST, f"{name!r} must be {wanted}, not {given!r:.100}")
        return make(given)

    return check


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise error(Code.BAD_REQUEST, f"{name!r} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(Code.BAD_REQUEST, f"{name!r} is not valid Unicode") from None
    return value


_PLAIN: dict[type, _Check] = {
    float: _scalar(lambda given: _is_number(given, int | float) and 0 <= given < 1e10, "a number of seconds", float),
    bool: _scalar(lambda given: isinstance(given, bool), "true or false"),
    str: _text,
}


def _list(check: _Check, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise error(Code.BAD_REQUEST, f"{name!r} must be a list")
    if len(value) > MAX_IDS:
        raise error(Code.BATCH_TOO_LARGE, f"{name!r} has {len(value)} items; the limit is {MAX_IDS}")
    return [check(f"{name}[{number}]", item) for number, item in enumerate(value)]


def _tuple(checks: list[_Check], name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(checks):
        raise error(Code.BAD_REQUEST, f"{name!r} must be a list of {len(checks)}")
    return tuple(check(name, item) for check, item in zip(checks, value, strict=True))


def transaction_id(text: str) -> TransactionId:
    """Parse a printed transaction id. Raises Rejected(BAD_REQUEST) for anything else."""
    try:
        return TransactionId.parse(text)
    except EscrowError as problem:
        raise error(Code.BAD_REQUEST, problem.message, problem.hint) from None
