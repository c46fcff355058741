"""Converts plain text to canonical text on Spark: JSON fields, values of SQLite, columns of Parquet files.

The kinds, and what databases make of their values, are in :mod:`escrowmq.pipeline.sql.texts`. Text that is not a value
of its kind stays as it is: it equals no canonical text, so the difference is reported.

Conversions are SQL text, because Spark builds an expression from one text far quicker than call by call.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f

_STRIPPED = (
    "regexp_replace(regexp_replace(regexp_replace(regexp_replace(TEXT, '^[+]', ''), '^(-?)0+(?=[0-9])', '$1'), "
    "'([.][0-9]*[1-9])0+$|[.]0*$', '$1'), '^-0$', '0')"
)
_EXPONENT = "'^[+-]?[0-9]{1,19}([.]([0-9]{0,18}))?[eE]([+-]?[0-9]{1,2})$'"
_DECIMALS = f"length(regexp_extract(TEXT, {_EXPONENT}, 2)) - int(regexp_extract(TEXT, {_EXPONENT}, 3))"
_PLAIN = "replace(format_number(try_cast(TEXT AS DECIMAL(38, 18)), 18), ',', '')"
_NUMBER = f"""
    CASE WHEN TEXT = string(try_cast(TEXT AS BIGINT)) THEN TEXT
    WHEN TEXT RLIKE '^[+-]?[0-9]{{1,400}}([.][0-9]{{0,400}})?$' THEN {_STRIPPED}
    WHEN TEXT RLIKE {_EXPONENT} AND {_DECIMALS} <= 18 THEN
        coalesce({_STRIPPED.replace("TEXT", _PLAIN)}, TEXT)
    ELSE TEXT END"""
_FLOAT = """
    CASE WHEN TEXT RLIKE '^[+-]?[0-9]{1,400}([.][0-9]{0,400})?([eE][+-]?[0-9]{1,3})?$'
        AND abs(VALUE) < double('Infinity')
    THEN concat(if(VALUE < 0, '-', ''), java_method('java.lang.Double', 'doubleToLongBits', abs(VALUE)))
    ELSE TEXT END"""
_ZONED = (
    "regexp_replace(regexp_replace(regexp_replace(regexp_replace(TEXT, '^(.{10})$', '$1T00:00:00Z'), "
    "'^(.{11}[^Z+-]*)$', '$1Z'), '([+-][0-9]{2})$', '$1:00'), '([+-][0-9]{2})([0-9]{2})$', '$1:$2')"
)
_CLOCK = "[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)? ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?"
_TIME = f"""
    CASE WHEN TEXT RLIKE '^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}({_CLOCK})?$'
    THEN coalesce(string(unix_micros(try_cast({_ZONED} AS TIMESTAMP))), TEXT) ELSE TEXT END"""
_BOOLEAN = "CASE lower(TEXT) WHEN 'true' THEN 'true' WHEN '1' THEN 'true' WHEN 'false' THEN 'false' \
WHEN '0' THEN 'false' ELSE TEXT END"
_HEX = "lower(replace(TEXT, concat(char(92), 'x'), ''))"  # char(92): a backslash, as PostgreSQL writes bytes
_DIGITS = "lower(replace(TEXT, '-', ''))"
_KINDS = {
    "number": _NUMBER,
    "float": _FLOAT.replace("VALUE", "try_cast(TEXT AS DOUBLE)"),
    "float32": _FLOAT.replace("VALUE", "double(try_cast(TEXT AS FLOAT))"),
    "time": _TIME,
    "boolean": _BOOLEAN,
    "bytes": f"CASE WHEN {_HEX} RLIKE '^([0-9a-f]{{2}})*$' THEN {_HEX} ELSE TEXT END",
    "uuid": f"CASE WHEN {_DIGITS} RLIKE '^[0-9a-f]{{32}}$' THEN {_DIGITS} ELSE TEXT END",
}


def canonical(name: str, kind: str) -> Column:
    """Return a Spark column: the plain text of column ``name`` converted to the canonical text of ``kind``; unchanged
    if it is no value of that kind."""
    return f.expr(_KINDS[kind].replace("TEXT", f"`{name}`")) if kind in _KINDS else f.col(f"`{name}`")


AMOUNT = "decimal(37, 18)"
"""The type of values that are compared with a tolerance."""


def to_amount(text: Column, kind: str) -> Column:
    """Return the value of a canonical text of a number or a time (in microseconds) as a decimal, to compute with. Null
    for a text that is no value, and for values of 20 and more digits before the point. Digits after the 18th behind the
    point are rounded."""
    if kind in ("float", "float32"):
        bits = f.replace(text, f.lit("-"), f.lit("")).try_cast("bigint")
        decoded = f.java_method(f.lit("java.lang.Double"), f.lit("longBitsToDouble"), bits)
        shown = decoded.cast("double").cast("float").cast("string") if kind == "float32" else decoded
        is_finite = text.rlike("^-?[0-9]{1,19}$") & bits.isNotNull()
        return f.when(is_finite, f.concat(f.regexp_extract(text, "^-?", 0), shown)).try_cast(AMOUNT)
    return f.when(text.rlike("^-?[0-9]{1,19}([.][0-9]{1,400})?$"), text).try_cast(AMOUNT)


def to_micros(time: Column) -> Column:
    """Return the canonical text of a timestamp column: microseconds since 1970 UTC."""
    return f.unix_micros(time).cast("string")
