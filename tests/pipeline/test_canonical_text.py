"""The same value has the same text, and the same checksum, in every database and on Spark."""

from __future__ import annotations

import math
import sqlite3
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.audit import windows
from escrowmq.pipeline.audit.rows import portable_digest, portable_hash
from escrowmq.pipeline.sql import texts
from escrowmq.pipeline.sql.canonical import canonical
from escrowmq.pipeline.sql.id_windows import NO_ID
from escrowmq.pipeline.sql.tables import BATCH_ROWS, absolute
from escrowmq.pipeline.sql.text_reads import Sum, Text, TextRead, reflect_texts

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

TYPES = {
    "sqlite": {
        **{"small": "SMALLINT", "whole": "INTEGER", "large": "BIGINT", "price": "DECIMAL(20,6)", "flag": "BOOLEAN"},
        **{"real32": "FLOAT", "real64": "DOUBLE", "at": "TIMESTAMP", "on_day": "DATE", "note": "TEXT", "raw": "BLOB"},
    },
    "postgresql": {
        **{"small": "SMALLINT", "whole": "INTEGER", "large": "BIGINT", "price": "NUMERIC(30,6)", "flag": "BOOLEAN"},
        **{"real32": "REAL", "real64": "DOUBLE PRECISION", "at": "TIMESTAMPTZ", "on_day": "DATE", "note": "TEXT"},
        **{"raw": "BYTEA", "naive": "TIMESTAMP", "ref": "UUID", "code": "CHAR(5)"},
    },
    "mysql": {
        **{"small": "SMALLINT", "whole": "INT(9) ZEROFILL", "large": "BIGINT", "price": "DECIMAL(30,6)"},
        **{"flag": "BOOL", "real32": "FLOAT", "real64": "DOUBLE", "at": "TIMESTAMP(6) NULL", "on_day": "DATE"},
        **{"note": "TEXT CHARACTER SET utf8mb4", "raw": "VARBINARY(50)", "naive": "DATETIME(6)", "code": "CHAR(5)"},
    },
}
KINDS = {
    **{"small": "number", "whole": "number", "large": "number", "price": "number", "flag": "boolean"},
    **{"real32": "float32", "real64": "float", "at": "time", "on_day": "text", "note": "text", "raw": "bytes"},
    **{"naive": "time", "ref": "uuid", "code": "text"},
}
TIME = datetime(2026, 1, 31, 23, 59, 59, 123456, UTC)
ROWS: list[dict[str, Any]] = [
    {
        **{"small": -5, "whole": 42, "large": 2**63 - 1, "price": Decimal("12345678.900000"), "flag": True},
        **{
            "real32": 0.1,
            "real64": 0.1,
            "at": TIME,
            "on_day": "2026-01-31",
            "note": "Grüße 😀'\"\\\n",
            "raw": b"\0\xff",
        },
        **{"naive": TIME, "ref": uuid.UUID(int=255), "code": "ab"},
    },
    {
        **{"small": 0, "whole": 0, "large": -(2**63), "price": Decimal("-0.000001"), "flag": False},
        **{"real32": -1.5, "real64": -0.0, "at": datetime(1970, 1, 1, 0, 0, 1, 999999, UTC), "note": ""},
        **{"on_day": "1999-12-31", "raw": b"", "naive": datetime(1960, 2, 29), "ref": uuid.UUID(int=0), "code": ""},
    },
    {
        **{"small": 1, "whole": 1000, "large": 10**15, "price": Decimal("100"), "flag": True},
        **{"real32": 16777216.0, "real64": 1e300, "at": TIME, "on_day": "2026-02-01", "note": "1:a", "raw": b"x"},
        **{"naive": TIME, "ref": uuid.UUID(int=1), "code": "N"},
    },
]
JSON = [
    {
        **{"small": "-5", "whole": "42", "large": "9223372036854775807", "price": "1.23456789E7", "flag": "true"},
        **{"real32": "0.1", "real64": "0.10000000000000001", "at": "2026-02-01T00:59:59.123456+01:00"},
        **{"on_day": "2026-01-31", "note": "Grüße 😀'\"\\\n", "raw": "00FF", "naive": "2026-01-31 23:59:59.123456"},
        **{"ref": "00000000-0000-0000-0000-0000000000FF", "code": "ab"},
    },
    {
        **{"small": "-0", "whole": "0.0", "large": "-9223372036854775808", "price": "-1e-6", "flag": "0"},
        **{"real32": "-1.50", "real64": "0", "at": "1970-01-01T00:00:01.999999Z", "on_day": "1999-12-31", "note": ""},
        **{"raw": "", "naive": "1960-02-29", "ref": "00000000000000000000000000000000", "code": ""},
    },
    {
        **{"small": "1", "whole": "1e3", "large": "1000000000000000", "price": "100.00", "flag": "1"},
        **{"real32": "16777217", "real64": "1E+300", "at": "1769903999123456", "on_day": "2026-02-01", "note": "1:a"},
        **{"raw": "\\x78", "naive": "2026-02-01 0559", "ref": "00000000000000000000000000000001", "code": "N"},
    },
]
JSON[2]["naive"] = "2026-02-01 05:29:59.123456 +0530"


@pytest.fixture
def url(database_url: str) -> str:
    return absolute(database_url)


def backend(url: str) -> str:
    return sa.make_url(url).get_backend_name()


def fill(
    url: str, columns: dict[str, str], rows: list[tuple[Any, ...]], key: str = "id VARCHAR(40) PRIMARY KEY"
) -> None:
    """A table ``t`` whose first column is ``id``."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        if backend(url) == "mysql":
            connection.exec_driver_sql("SET time_zone = '+00:00', sql_mode = ''")
        kinds = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        connection.exec_driver_sql(f"CREATE TABLE t ({key}, {kinds})")
        names = ["id", *columns]
        marks = ", ".join(f":{name}" for name in names)
        values = [dict(zip(names, row, strict=True)) for row in rows]
        insert = sa.text(f"INSERT INTO t ({', '.join(names)}) VALUES ({marks})")
        if values:
            connection.execute(insert, values)
    engine.dispose()


def read(url: str, columns: dict[str, str]) -> TextRead:
    natives = reflect_texts(url, "t", ["id", *columns])
    wanted = [Text(name, natives[name], kind) for name, kind in columns.items()]
    return TextRead(url, "t", (Text("id", natives["id"], "text"), *wanted))


def all_rows(one: TextRead, size: int = 2) -> list[tuple[str | None, ...]]:
    found = []
    for key, bounds in one.ranges(size):
        for columns in one.batches(key, bounds):
            found += list(zip(*(column.to_pylist() for column in columns), strict=True))
    return sorted(found, key=str)


def on_spark(spark: SparkSession, kinds: list[str], rows: list[tuple[str | None, ...]]) -> list[tuple[Any, ...]]:
    """Rows with their id first, as canonical texts."""
    names = ["id", *(f"c{n}" for n in range(len(kinds)))]
    frame = spark.createDataFrame(rows, ", ".join(f"{name} string" for name in names))
    made = frame.select("id", *(canonical(f"c{n}", kind).alias(f"c{n}") for n, kind in enumerate(kinds)))
    return sorted((tuple(row) for row in made.collect()), key=str)


def sqlite_value(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(" ")
    return str(value) if name == "price" else value


@pytest.mark.invariant("I43")
def test_every_type_has_the_text_that_spark_makes_of_json(spark: SparkSession, url: str) -> None:
    columns = TYPES[backend(url)]
    rows = [
        (f"o-{n}", *(sqlite_value(c, row[c]) if backend(url) == "sqlite" else row[c] for c in columns))
        for n, row in enumerate(ROWS)
    ]
    rows.append(("o-null", *[None] * len(columns)))
    fill(url, columns, rows)
    natives = reflect_texts(url, "t", list(columns))
    kinds = [KINDS[name] for name in columns]
    if backend(url) == "sqlite":
        kinds[list(columns).index("real32")] = "float"  # SQLite has no single precision
    assert [texts.compared_kind(natives[name]) for name in columns] == kinds
    plain = [(f"o-{n}", *(row[c] for c in columns)) for n, row in enumerate(JSON)]
    if backend(url) == "sqlite":
        plain = [tuple("16777216" if value == "16777217" else value for value in row) for row in plain]
    plain.append(("o-null", *[None] * len(columns)))
    wanted = on_spark(spark, kinds, plain)
    found = all_rows(read(url, dict(zip(columns, kinds, strict=True))))
    if backend(url) == "sqlite":
        found = on_spark(spark, kinds, found)
    assert found == wanted


@pytest.mark.invariant("I43")
def test_a_database_computes_the_checksums_that_spark_computes(spark: SparkSession, url: str) -> None:
    if backend(url) == "sqlite":
        pytest.skip("SQLite has no hash")
    columns = TYPES[backend(url)]
    rows = [(f"o-{n}", *(row[c] for c in columns)) for n, row in enumerate(ROWS)] + [("ä", *[None] * len(columns))]
    fill(url, columns, rows)
    one = read(url, {name: KINDS[name] for name in columns})
    some = (Sum(7, True, tuple(range(1, len(columns) + 1))), Sum(8, False, ()))
    summed = TextRead(one.url, one.table, one.columns, sums=some, windows=3)
    found: dict[tuple[int, int, int], list[int]] = {}
    for key, bounds in summed.ranges(2):
        for line in zip(*(column.to_pylist() for column in summed.read_sums(key, bounds)), strict=True):
            total = found.setdefault(line[:3], [0, 0, 0])
            total[:] = [before + more for before, more in zip(total, line[3:], strict=True)]
    names = [f"c{n}" for n in range(len(one.columns))]
    frame = spark.createDataFrame(all_rows(one), ", ".join(f"{name} string" for name in names))
    wanted: dict[tuple[int, int, int], list[int]] = {}
    for comparison, expected, cells in ((7, 1, names[1:]), (8, 0, [])):
        made = frame.select(portable_hash(f.col("c0")) % 3, portable_digest(f.col("c0"), [f.col(c) for c in cells]))
        for window, digest in made.collect():
            total = wanted.setdefault((comparison, window, expected), [0, 0, 0])
            halves = (digest & 0xFFFF_FFFF, (digest >> 32) & 0xFFFF_FFFF)
            total[:] = [total[0] + 1, total[1] + halves[0], total[2] + halves[1]]
    assert found == wanted


EDGES = [
    *(sign * value for sign in (1, -1) for value in (0.0, 5e-324, 2.225073858507201e-308, 2.2250738585072014e-308)),
    *(math.nextafter(2.0**k, way) for k in range(-1021, 1024, 31) for way in (0.0, math.inf, 2.0**k)),
    *(1.7976931348623157e308, 0.1 + 0.2, 1 / 3, 2.0**53 + 2),
]


def bits(value: float) -> str:
    [number] = struct.unpack("<q", struct.pack("<d", abs(value)))
    return f"{'-' if value < 0 else ''}{number}"


@pytest.mark.invariant("I43")
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_floats_keep_every_bit(float_table: str, data: st.DataObject) -> None:
    """In every magnitude, also where LOG2 of MariaDB rounds to the next power of two."""
    values = [*EDGES, *data.draw(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=200))]
    engine = sa.create_engine(float_table)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM t"))
        rows = [{"id": f"{n:04}", "x": value} for n, value in enumerate(values)]
        connection.execute(sa.text("INSERT INTO t VALUES (:id, :x)"), rows)
    engine.dispose()
    assert [text for _, text in all_rows(read(float_table, {"x": "float"}), 1000)] == [bits(value) for value in values]


@pytest.fixture(scope="module", params=["postgres", "mariadb"])
def float_table(request: pytest.FixtureRequest, new_database: Callable[[str], Any]) -> Iterator[str]:
    with new_database(request.getfixturevalue(f"{request.param}_url")) as url:
        fill(url, {"x": "DOUBLE PRECISION"}, [])
        yield url


def test_special_floats_times_and_decimals_of_postgresql(
    spark: SparkSession, postgres_url: str, new_database: Callable[[str], Any]
) -> None:
    with new_database(postgres_url) as url:
        columns = {"x": "FLOAT8", "at": "TIMESTAMPTZ", "n": "NUMERIC"}
        many = Decimal("1" * 40 + "." + "2" * 40 + "0")
        rows = [("a", "NaN", "infinity", "NaN"), ("b", "Infinity", "-infinity", many), ("c", "-Infinity", None, "-0.0")]
        fill(url, columns, rows)
        found = all_rows(read(url, {"x": "float", "at": "time", "n": "number"}))
        assert found == [
            ("a", "NaN", "infinity", "NaN"),
            ("b", "Infinity", "-infinity", "1" * 40 + "." + "2" * 40),
            ("c", "-Infinity", None, "0"),
        ]
        assert on_spark(spark, ["float", "time", "number"], found) == found


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=9)


@pytest.mark.invariant("I43")
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.integers(-9, 9), st.booleans()), min_size=30, max_size=30))
def test_numbers_with_exponents_are_shifted_exactly(
    spark: SparkSession, drawn: list[tuple[Decimal, int, bool]]
) -> None:
    drawn += [(Decimal("-0.00"), 5, True), (Decimal(10), -1, False), (Decimal("1.50"), -9, True)]
    shifted = [f"{number:f}{'E' if upper else 'e'}{power:+}" for number, power, upper in drawn]
    plain = [f"{number:f}{'0' * power}" for number, power, _ in drawn if power >= 0 and "." in f"{number:f}"]
    made = on_spark(spark, ["number"], [(f"{n:04}", text) for n, text in enumerate([*shifted, *plain])])
    for (_, found), text in zip(made, [*shifted, *plain], strict=True):
        assert found == strip(Decimal(text))


def strip(value: Decimal) -> str:
    text = f"{value:f}"
    return "0" if not value else text.rstrip("0").rstrip(".") if "." in text else text


@pytest.mark.invariant("I43")
@settings(max_examples=2, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),
            st.integers(-14 * 60, 14 * 60),
            st.sampled_from("T "),
        ),
        min_size=30,
        max_size=30,
    )
)
def test_times_of_any_zone_are_microseconds(spark: SparkSession, drawn: list[tuple[datetime, int, str]]) -> None:
    aware = [(one.replace(tzinfo=timezone(timedelta(minutes=zone))), sep) for one, zone, sep in drawn]
    made = on_spark(spark, ["time"], [(f"{n:04}", one.isoformat(sep)) for n, (one, sep) in enumerate(aware)])
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [found for _, found in made] == [str((one - epoch) // timedelta(microseconds=1)) for one, _ in aware]


NO_VALUES: dict[str, list[str | None]] = {
    "number": ["5x", "1d", "", "0x10", "1e4000", "1e-19", None],
    "float": ["1d", " 1", "1e999", None],
    "time": ["2026-13-01", "2026", "today", "2026-01-01T25:00:00Z", "2026-01-01T12:00:00+99:00", None],
    "boolean": ["yes", None],
    "bytes": ["abc", "xy", None],
    "uuid": ["00000000-0000", None],
}


def test_what_is_no_value_of_its_kind_stays_as_it_is(spark: SparkSession) -> None:
    """It equals no value, so it is reported; and nothing fails."""
    width = max(map(len, NO_VALUES.values()))
    padded = [[*its, *[None] * (width - len(its))] for its in NO_VALUES.values()]
    rows = [(f"{n}", *row) for n, row in enumerate(zip(*padded, strict=True))]
    assert on_spark(spark, list(NO_VALUES), rows) == rows


def test_rows_of_sqlite_are_read_in_batches(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE t (id TEXT)")
        database.executemany("INSERT INTO t VALUES (?)", ((f"o-{n}",) for n in range(BATCH_ROWS + 1)))
        database.commit()
    read = TextRead(f"sqlite:///{tmp_path / 'x.db'}", "t", (Text("id", "text", "text"),))
    assert [len(batch[0]) for batch in read.batches("", (None, None))] == [BATCH_ROWS, 1]


def test_sqlite_values_of_other_types_are_texts(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE t (id, x)")
        values = [("a", 0.1 + 0.2), ("b", 1e300), ("c", 5), ("d", "5x"), ("e", b"\xff"), ("f", None), (7, 2.0)]
        database.executemany("INSERT INTO t VALUES (?, ?)", values)
        database.commit()
    found = all_rows(read(f"sqlite:///{tmp_path / 'x.db'}", {"x": "text"}))
    assert found == [
        ("7", "2.0"),
        ("a", "0.30000000000000004"),
        ("b", "1e+300"),
        ("c", "5"),
        ("d", "5x"),
        ("e", "\ufffd"),
        ("f", None),
    ]


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("kind", "encoding"), [("text", "UTF-8"), ("bytes", "UTF-8"), ("text", "UTF-16")])
def test_sqlite_selects_the_windows_of_spark(
    spark: SparkSession, tmp_path: Path, portable: bool, kind: str, encoding: str
) -> None:
    """Of ids of every type, of text that is not UTF-8, and without an id."""
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute(f"PRAGMA encoding = '{encoding}'")
        database.execute("CREATE TABLE t (id)")
        odd: list[Any] = ["é", "a\0b", "", None, 5, -7, 0.1 + 0.2, 1e30, b"ab", b"a\xff"]
        ids = [*(f"o-{n}" for n in range(30)), *odd]
        database.executemany("INSERT INTO t VALUES (?)", [(id,) for id in ids])
        database.execute("INSERT INTO t VALUES (CAST(x'61ff' AS TEXT))")
        database.commit()
    every = TextRead(f"sqlite:///{tmp_path / 'x.db'}", "t", (Text("id", "text", kind),))
    known = [NO_ID if id is None else id for (id,) in all_rows(every)]
    number = windows.window(f.col("id"), 7, portable)
    wanted = spark.createDataFrame([(id,) for id in known], "id STRING").select("id", number.alias("n")).collect()
    for n in range(7):
        found = all_rows(replace(every, windows=7, only=(n,), portable=portable))
        assert [NO_ID if id is None else id for (id,) in found] == [row["id"] for row in wanted if row["n"] == n]


@pytest.mark.parametrize(
    ("key", "ids", "many"),
    [
        ("id INTEGER PRIMARY KEY", list(range(-50, 150)), True),
        ("id VARCHAR(40) PRIMARY KEY", [f"o-{n:03}" for n in range(100)], True),
        ("id VARCHAR(40)", [f"o-{n:03}" for n in range(100)], False),
    ],
)
def test_ranges_cover_every_row_once(url: str, key: str, ids: list[Any], many: bool) -> None:
    fill(url, {"x": "VARCHAR(9)"}, [(id, "x") for id in ids], key)
    one = read(url, {"x": "text"})
    ranges = one.ranges(30)
    assert len(ranges) > 1 or not (many or backend(url) == "sqlite")
    found = [
        row[0] for key, bounds in ranges for columns in one.batches(key, bounds) for row in zip(columns[0].to_pylist())
    ]
    assert sorted(found) == sorted(map(str, ids))


def test_pages_of_a_table_without_key_are_ranges(postgres_url: str, new_database: Callable[[str], Any]) -> None:
    with new_database(postgres_url) as url:
        fill(url, {"x": "TEXT"}, [(f"o-{n}", "x" * 100) for n in range(300)], "id TEXT")
        one = read(absolute(url), {"x": "text"})
        ranges = one.ranges(30)
        assert len(ranges) > 5
        found = [
            row for key, bounds in ranges for columns in one.batches(key, bounds) for row in columns[0].to_pylist()
        ]
        assert sorted(found) == sorted(f"o-{n}" for n in range(300))
        limited = TextRead(one.url, one.table, one.columns, (("id", "text", "o-1:'5"),))
        assert all_rows(limited) == []


def test_without_adbc_a_cursor_reads_the_same(
    postgres_url: str, new_database: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = TYPES["postgresql"]
    with new_database(postgres_url) as url:
        fill(url, columns, [(f"o-{n}", *(row[c] for c in columns)) for n, row in enumerate(ROWS)])
        one = read(absolute(url), {name: KINDS[name] for name in columns})
        by_adbc = all_rows(one)
        monkeypatch.setitem(__import__("sys").modules, "adbc_driver_postgresql", None)
        assert all_rows(one) == by_adbc != []


def test_conditions_and_odd_names_mean_the_same_everywhere(url: str) -> None:
    odd = '"od:d %s"' if backend(url) != "mysql" else "`od:d %s`"
    fill(url, {"gone": "BOOLEAN", "n": "INTEGER"}, [("a", True, 1), ("A", False, 5), ("b", False, 5)], "id VARCHAR(9)")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        odd = odd.replace(":", "\\:")
        connection.execute(sa.text(f"ALTER TABLE t ADD {odd} VARCHAR(9)"))
        connection.execute(sa.text(f"UPDATE t SET {odd} = 'x''y'"))
    engine.dispose()
    one = read(url, {"od:d %s": "text"})
    assert all_rows(one) == [("A", "x'y"), ("a", "x'y"), ("b", "x'y")]
    for where, ids in (
        ((("n", "integer", "5"),), ["A", "b"]),
        ((("id", "text", "a"),), ["a"]),
        ((("gone", "boolean", "0" if backend(url) == "sqlite" else "false"),), ["A", "b"]),
        ((("od:d %s", "text", "x'y"), ("n", "integer", "1")), ["a"]),
    ):
        assert [row[0] for row in all_rows(TextRead(one.url, one.table, one.columns, where))] == ids
