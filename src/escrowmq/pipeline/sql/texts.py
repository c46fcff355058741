"""Canonical text of database values: the same value has the same text in every database, and in a message.

A column has a *native* kind, from its declared type. Two columns are compared in one kind, see :func:`unify`:

========  ==================================================================================
text      as the database converts it to text
number    integers and decimals: no exponent, no ``+``, no zeros that do not count; ``-0`` is ``0``
float     ``-`` if negative, and the 63 other bits of the double as an integer; NaN, Infinity
float32   the same, after rounding to single precision
time      microseconds since 1970 UTC; a time without zone is UTC
boolean   ``true`` or ``false``
bytes     lower-case hex
uuid      32 lower-case hex digits
========  ==================================================================================

A server computes this text in SQL, and checksums of it. SQLite columns hold any type, so its values are read as plain
text, which Spark converts (:mod:`escrowmq.pipeline.sql.canonical`). Imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import sqlalchemy as sa

from escrowmq.pipeline.sql.id_windows import NO_ID

_NATIVE: tuple[tuple[type[Any], str], ...] = (
    (sa.Boolean, "boolean"),
    (sa.Integer, "integer"),
    (sa.Float, "float"),
    (sa.Numeric, "decimal"),
    (sa.DateTime, "time"),
    (sa.LargeBinary, "bytes"),
    (sa.BINARY, "bytes"),
    (sa.VARBINARY, "bytes"),
    (sa.Uuid, "uuid"),
)
_SINGLE = {("postgresql", "REAL"), ("mysql", "FLOAT"), ("mariadb", "FLOAT")}
_COMPARED = {"integer": "number", "decimal": "number"}
"""The kind in which a native kind is compared, where their names differ."""
_UNIFIED = {
    frozenset(pair): kind
    for *pair, kind in (
        ("number", "float", "float"),
        ("number", "float32", "float32"),
        ("float", "float32", "float32"),
        ("number", "boolean", "boolean"),
        ("number", "time", "time"),
        ("bytes", "uuid", "uuid"),
    )
}


def find_native(found: Any, dialect: str) -> str:
    """Return the native kind, such as ``integer`` or ``time``, of a column type that SQLAlchemy reflected; ``text`` for
    unknown types."""
    name = type(found).__name__
    if getattr(found, "display_width", None) == 1:  # the BOOL of MariaDB is a TINYINT of width 1
        return "boolean"
    if dialect in ("mysql", "mariadb") and name == "BIT":
        return "boolean" if found.length == 1 else "integer"
    if (dialect, name) in _SINGLE:
        return "float32"
    return next((kind for type_, kind in _NATIVE if isinstance(found, type_)), "text")


def compared_kind(native: str | None) -> str | None:
    """Return the kind in which values of a native kind are compared with values of the same; None for None."""
    return _COMPARED.get(native, native) if native else native


def unify(natives: Iterable[str | None]) -> str:
    """Return the kind in which columns of these native kinds are compared. None is a side without types, such as the
    JSON body of a message: its values are converted to the kind of the other side."""
    return reduce(_unify, (kind for kind in map(compared_kind, natives) if kind), "text")


def _unify(one: str, other: str) -> str:
    if one == other or other == "text":
        return one
    return other if one == "text" else _UNIFIED.get(frozenset((one, other)), "text")


def id_kind(native: str) -> str:
    """Return the kind of the text of ids: plain, so that a UUID keeps its dashes, but numbers and bytes canonical."""
    kind = compared_kind(native)
    return kind if kind in ("number", "bytes") else "text"


def is_canonical(dialect: str, native: str, kind: str) -> bool:
    """Return whether the database itself converts values of ``native`` to the canonical text of ``kind``."""
    return dialect != "sqlite" and (kind == "text" or compared_kind(native) == kind)


_PG_BITS = (
    "CASE WHEN {c} IN ('NaN', 'Infinity', '-Infinity') THEN {c}::text ELSE CASE WHEN {c} < 0 THEN '-' ELSE '' END "
    "|| ('x' || encode(float8send(abs({c}::float8)), 'hex'))::bit(64)::bigint END"
)
_PG = {
    "text": "{c}::text",
    "integer": "{c}::text",
    "decimal": "trim_scale({c})::text",
    "float": _PG_BITS,
    "float32": _PG_BITS,
    "time": "CASE WHEN isfinite({c}) THEN (extract(epoch FROM {c}) * 1000000)::bigint::text ELSE {c}::text END",
    "boolean": "{c}::text",
    "bytes": "encode({c}, 'hex')",
    "uuid": "replace({c}::text, '-', '')",
}
_MY_CHAR = "CAST({c} AS CHAR CHARACTER SET utf8mb4)"
_MY_NUMBER = "CAST({c} + 0 AS CHAR CHARACTER SET utf8mb4)"  # + 0: without the zeros of ZEROFILL, and BIT as a number
_MY_EXPONENT = "LEAST(1023, FLOOR(LOG2(ABS({c}))))"
_MY_PART = f"(ABS({{c}}) / POW(2, {_MY_EXPONENT}))"  # 1 to 2, or just outside: LOG2 is rounded
_MY_BITS = (
    "CONCAT(IF({c} < 0, '-', ''), CASE WHEN {c} = 0 THEN 0 "
    "WHEN ABS({c}) < 2.2250738585072014e-308 THEN CAST(ABS({c}) * POW(2, 537) * POW(2, 537) AS SIGNED) "
    f"ELSE CAST({_MY_EXPONENT} + 1023 AS SIGNED) * 4503599627370496 + CAST(4503599627370496 * CASE "
    f"WHEN {_MY_PART} < 1 THEN 2 * ({_MY_PART} - 1) WHEN {_MY_PART} > 2 THEN {_MY_PART} / 2 ELSE {_MY_PART} - 1 END "
    "AS SIGNED) END)"
)
_MY = {
    "text": _MY_CHAR,
    "integer": _MY_NUMBER,
    "decimal": f"IF(LOCATE('.', {_MY_NUMBER}), TRIM(TRAILING '.' FROM TRIM(TRAILING '0' FROM {_MY_NUMBER})), "
    f"{_MY_NUMBER})",
    "float": _MY_BITS,
    "float32": _MY_BITS,
    # COALESCE: the time 0000-00-00 has no number
    "time": f"COALESCE(CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {{c}}) AS CHAR), {_MY_CHAR})",
    "boolean": f"CASE {{c}} WHEN 1 THEN 'true' WHEN 0 THEN 'false' ELSE {_MY_NUMBER} END",
    "bytes": "LOWER(HEX({c}))",
    "uuid": f"REPLACE({_MY_CHAR}, '-', '')",
}


def select_text(dialect: str, column: str, native: str, kind: str) -> str:
    """Return the SQL of the text of a quoted column: canonical if :func:`is_canonical`, else plain. SQLite returns
    its values as they are: their texts are made faster here, and its own text of a float is rounded."""
    if dialect == "sqlite":
        is_hex = kind in ("bytes", "uuid")
        return f"CASE typeof({column}) WHEN 'blob' THEN lower(hex({column})) ELSE {column} END" if is_hex else column
    templates = _PG if dialect == "postgresql" else _MY
    exact = kind != "text" and is_canonical(dialect, native, kind)
    return templates[native if exact or native == "bytes" else "text"].format(c=column)


def select_exact(dialect: str, column: str, native: str) -> str:
    """Return the SQL expression of a column's text for a byte-by-byte comparison with a text of the user: a condition
    of a manifest, or an id."""
    if dialect == "sqlite":
        return f"CAST({column} AS TEXT)"
    kind = compared_kind(native)
    text = select_text(dialect, column, native, kind if kind in ("number", "boolean", "bytes") else "text")
    return f'({text}) COLLATE "C"' if dialect == "postgresql" else f"({text}) COLLATE utf8mb4_bin"


SETTINGS = {
    "postgresql": (
        "SET datestyle = 'ISO, YMD'",
        "SET intervalstyle = 'iso_8601'",
        "SET timezone = 'UTC'",
        "SET extra_float_digits = 1",
        "SET client_encoding = 'UTF8'",
    ),
    "mysql": ("SET SESSION time_zone = '+00:00', SESSION sql_mode = ''",),
}
"""Settings of a session on which texts depend."""
SETTINGS["mariadb"] = SETTINGS["mysql"]


def window(dialect: str, id: str, count: int, portable: bool = True) -> str:
    """Return the SQL of :func:`escrowmq.pipeline.sql.id_windows.find_window` for the text of an id. SQLite calls it as
    a function of the name WINDOW_FUNCTION; servers compute only portable windows."""
    if dialect == "sqlite":
        # text of a database in UTF-8 may not be UTF-8, and Python's functions take no such text
        is_exact = f"typeof({id}) = 'text' AND (SELECT encoding FROM pragma_encoding) = 'UTF-8'"
        exact = f"CASE WHEN {is_exact} THEN CAST({id} AS BLOB) ELSE {id} END"
        return f"{WINDOW_FUNCTION}({exact}, {count}, {int(portable)})"
    return f"{_to_number(dialect, f'md5({known_id(id)})', 1, 15)} % {count}"


WINDOW_FUNCTION = "escrowmq_window"


def known_id(id: str) -> str:
    """Return the SQL of an id's text, or NO_ID for null."""
    return f"coalesce({id}, '{NO_ID}')"


def digest(dialect: str, id: str, texts: Sequence[str]) -> str:
    """Return the SQL of the MD5 of a row: its id and ``texts`` (each SQL), each with its length in bytes; ``N`` for
    null."""
    length = "octet_length" if dialect == "postgresql" else "LENGTH"
    join, shape = (" || ", "{} || ':' || {}") if dialect == "postgresql" else (", ", "concat({}, ':', {})")
    marked = [f"coalesce({shape.format(f'{length}({text})', text)}, 'N')" for text in (known_id(id), *texts)]
    return f"md5({join.join(marked)})" if dialect == "postgresql" else f"md5(concat({join.join(marked)}))"


def sum_halves(dialect: str, hashed: str) -> tuple[str, str]:
    """Return the SQL of two sums over rows: of the lower and of the upper half of the first 64 bits of the MD5
    ``hashed``."""
    lower, upper = (f"coalesce(sum({_to_number(dialect, hashed, start, 8)}), 0)" for start in (9, 1))
    return lower, upper


def _to_number(dialect: str, hashed: str, start: int, digits: int) -> str:
    part = f"substr({hashed}, {start}, {digits})"
    if dialect == "postgresql":
        return f"('x' || {part})::bit({4 * digits})::bigint"
    return f"CAST(CONV({part}, 16, 10) AS UNSIGNED)"  # a sum of texts would be a double
