"""The columns of a comparison: which they are, the kind in which each is compared, and by how much its values may
differ. Types are known of tables and files; messages have none, and take those of the other side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    TimestampNTZType,
    TimestampType,
)

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit.manifest import ALL, Comparison, Manifest
from escrowmq.pipeline.audit.rows import Role
from escrowmq.pipeline.bodies import MESSAGE_COLUMNS
from escrowmq.pipeline.sql import texts
from escrowmq.pipeline.sql.summing import KINDS, STORED

Natives = Mapping[str, Mapping[str, str | None]]
"""The native kinds of the columns of tables and files, by side."""
_NUMBERS = ("number", "float", "float32")
_FORMATTED = ("properties", "transaction_id")
"""Columns of messages of which only Spark makes texts."""
_NATIVES: tuple[tuple[type[DataType], str], ...] = (
    (BooleanType, "boolean"),
    (IntegralType, "integer"),
    (FloatType, "float32"),
    (DoubleType, "float"),
    (DecimalType, "decimal"),
    (TimestampType, "time"),
    (TimestampNTZType, "time"),
    (BinaryType, "bytes"),
)


def find_native(type_: DataType) -> str:
    """Return the native kind, such as ``integer`` or ``time``, of a Spark column type; ``text`` for unknown types."""
    return next((kind for one, kind in _NATIVES if isinstance(type_, one)), "text")


def list_columns(manifest: Manifest, comparison: Comparison, natives: Natives) -> tuple[str, ...]:
    """Return the names of the columns that are compared. ALL (``*``) stands for those of the expected side if it is a
    table, otherwise of the other side, without its id, the columns of ``where`` and excluded ones."""
    if ALL not in comparison.columns:
        return comparison.named
    side = next(side for side in comparison.sides if side.startswith("table:"))
    table = manifest.tables[side.removeprefix("table:")]
    return tuple(name for name in natives[side] if name not in (table.id, *table.where, *comparison.exclude))


def make_role(manifest: Manifest, number: int, comparison: Comparison, is_expected: bool, natives: Natives) -> Role:
    """Return the role of one side in the comparison with this number. Its columns have their kind in front: ``number
    cents``. Raises Misuse(BAD_ARGUMENT) for :func:`find_column_problems`."""
    for _, problem in find_column_problems(manifest, comparison, natives):
        raise Misuse(Code.BAD_ARGUMENT, f"{comparison.expected} → {comparison.found}: {problem}")
    keys, near = [], []
    skew = Decimal(str(comparison.clock_skew)) * 1_000_000
    for name in list_columns(manifest, comparison, natives):
        kind = _find_kind(comparison, name, natives)
        keys.append(f"{kind} {name}")
        limit = skew if kind == "time" else Decimal(str(comparison.tolerance.get(name, 0)))
        near += [(keys[-1], limit)] if limit else []
    return Role(number, is_expected, tuple(keys), tuple(near))


def can_sum_here(comparison: Comparison, keys: Sequence[str]) -> bool:
    """Return whether the processes that read can compute the sums of a comparison: it has tables, topics or half
    messages on both sides, and its columns (``keys``, each a kind and a name) are texts, numbers and booleans."""
    named = [key.partition(" ")[::2] for key in keys]
    return all(side.startswith(("table:", "topic:", "half:")) for side in comparison.sides) and all(
        kind in KINDS and (kind == STORED or name not in _FORMATTED) for kind, name in named
    )


def find_column_problems(
    manifest: Manifest, comparison: Comparison, natives: Natives
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the errors that only the types of the columns show: the path of a field of the comparison, and a text.
    ``natives``: the native kinds of the columns of tables and files, by side."""
    names = list_columns(manifest, comparison, natives)
    typed = {side: natives[side] for side in comparison.sides if side in natives}
    for side, columns in typed.items():
        if lacking := sorted(set(names) - columns.keys()):
            yield ("columns",), f"{manifest.label(side)} has no column {', '.join(lacking)}: exclude it"
    for name in comparison.exclude:
        if typed and not any(name in columns for columns in typed.values()) and ALL in comparison.columns:
            yield ("exclude",), f"there is no column {name!r} to exclude"
    kinds = {name: _find_kind(comparison, name, natives) for name in names}
    for name in comparison.tolerance:
        if name not in kinds:
            yield ("tolerance", name), f"column {name!r} has a tolerance, but it is not compared"
        elif kinds[name] not in _NUMBERS:
            yield ("tolerance", name), f"column {name!r} has a tolerance, but it is compared as {kinds[name]}"
    if comparison.clock_skew and "time" not in kinds.values():
        yield ("clock_skew",), "no column is compared as a time"


def _find_kind(comparison: Comparison, name: str, natives: Natives) -> str:
    """Return the kind in which a column is compared. A field of messages on both sides is a number if it has a
    tolerance."""
    both = [natives.get(side, {}).get(name) for side in comparison.sides]
    if both == [None, None]:
        return STORED if name in MESSAGE_COLUMNS else "number" if name in comparison.tolerance else "text"
    return texts.unify(both)
