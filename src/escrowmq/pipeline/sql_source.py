"""Tables of any database that SQLAlchemy knows as one DataFrame, without JDBC: a Python data source.

Every table is cut into ranges of its primary key (its first column) with about so many *wanted* rows each, one Spark partition
a range; the filter runs in the database, the rows go from there to the executor as Arrow, and nothing passes through the driver.

The ranges begin before the first key and end after the last, so rows that come in between planning and reading are read, too. Each
range is one query: the whole is no snapshot of one moment.

URLs may hold passwords. They travel in an option whose name Spark redacts, and in the pickled reader; no plan shows them.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS = 50_000
BATCH_ROWS = 8192
SOURCE = "source"
"""The column that says which of the reads a row is of."""

Where = tuple[str, str, str | int | bool]
"""A column, one of ``= != < <= > >=``, and a value. A read's conditions must all hold."""
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value))


def _time(value: Any) -> datetime:
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A column type in Spark and Arrow, and how a driver's value becomes one of it."""

    spark: str
    arrow: pa.DataType
    make: Callable[[Any], Any]


_KINDS: tuple[tuple[type[Any], _Kind], ...] = (
    (sa.Boolean, _Kind("BOOLEAN", pa.bool_(), bool)),
    (sa.Integer, _Kind("BIGINT", pa.int64(), int)),
    (sa.Float, _Kind("DOUBLE", pa.float64(), float)),
    (sa.Numeric, _Kind("DECIMAL(38,9)", pa.decimal128(38, 9), _decimal)),
    (sa.DateTime, _Kind("TIMESTAMP", pa.timestamp("us", tz="UTC"), _time)),
    (sa.LargeBinary, _Kind("BINARY", pa.binary(), bytes)),
)
_TEXT = _Kind("STRING", pa.utf8(), str)
_BY_NAME = {kind.spark: kind for kind in (*(kind for _, kind in _KINDS), _TEXT)}


@dataclass(frozen=True, slots=True, repr=False)
class SqlRead:
    """``columns`` of the rows of ``table`` at ``url`` that meet all of ``where``."""

    url: str
    table: str
    columns: tuple[str, ...]
    where: tuple[Where, ...] = ()

    def __repr__(self) -> str:
        return f"SqlRead({safe_url(self.url)}, {self.table})"

    def query(self, *columns: str) -> sa.Select[Any]:
        """What selects these columns of the wanted rows."""
        chosen: list[sa.ColumnClause[Any]] = [sa.column(name) for name in columns]
        query = sa.select(*chosen).select_from(sa.table(self.table))
        return query.where(*(_OPERATORS[operator](sa.column(name), value) for name, operator, value in self.where))


@dataclass(frozen=True)
class SqlRange(InputPartition):
    """Rows of one read whose key is at least ``first`` (None: from the beginning) and below ``end`` (None: to the end)."""

    number: int
    key: str
    first: Any = None
    end: Any = None


def read_sql(spark: SparkSession, reads: Sequence[SqlRead], partition_rows: int = PARTITION_ROWS) -> DataFrame:
    """Rows of all reads: their columns (the same in all), and ``source`` int, the number of the read.

    Raises Misuse(BAD_ARGUMENT) if a table, a column or a primary key is not there, or columns differ between reads; Misuse(BAD_URL), and
    Unknown(DISCONNECTED) for a database that is away.
    """
    reads = [replace(read, url=absolute(read.url)) for read in reads]
    schemas = [check(read.url, read.table, (*read.columns, *(name for name, _, _ in read.where))) for read in reads]
    kinds = [[schema[name] for name in reads[0].columns] for schema in schemas]
    for read, found in zip(reads, kinds, strict=True):
        if found != kinds[0] or read.columns != reads[0].columns:
            told = f"{read} has {', '.join(found)}; {reads[0]} has {', '.join(kinds[0])}"
            raise Misuse(Code.BAD_ARGUMENT, told, "tables that are read as one must have the same columns")
    columns = ", ".join(f"`{name}` {kind}" for name, kind in zip(reads[0].columns, kinds[0], strict=True))
    spark.dataSource.register(SqlTables)
    return (
        spark.read.format(SqlTables.name())
        .schema(f"{SOURCE} INT, {columns}")
        .option("urls", json.dumps([asdict(read) for read in reads]))  # "url" in its name: redacted
        .option("partition_rows", str(partition_rows))
        .load()
    )


def check(url: str, table: str, columns: Sequence[str]) -> dict[str, str]:
    """Column → Spark type of a table. Raises Misuse(BAD_ARGUMENT) that names what is missing, as :func:`read_sql`."""
    check_there(url)
    with engines.opened(url) as engine, engine.connect() as connection:
        try:
            found = {one["name"]: _kind(one["type"]).spark for one in sa.inspect(connection).get_columns(table)}
        except sa.exc.NoSuchTableError:
            raise Misuse(Code.BAD_ARGUMENT, f"{safe_url(url)} has no table {table!r}") from None
    if lacking := [name for name in columns if name not in found]:
        told = f"table {table!r} of {safe_url(url)} has no column {', '.join(lacking)}"
        raise Misuse(Code.BAD_ARGUMENT, told, f"it has {', '.join(found)}")
    return found


def absolute(url: str) -> str:
    """A URL that means the same in every process: executors have folders of their own in which they run."""
    parsed = engines.open_engine(url).url
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database.startswith((":", "file:")):
        return url
    return parsed.set(database=str(Path(parsed.database).absolute())).render_as_string(hide_password=False)


def check_there(url: str) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a SQLite file that this machine does not have: SQLite would make an empty one."""
    parsed = sa.make_url(url)
    file = parsed.database
    if parsed.get_backend_name() != "sqlite" or not file or file.startswith((":", "file:")) or Path(file).is_file():
        return
    hint = "on a cluster every worker must have it, as the same file; else use a database server"
    raise Misuse(Code.BAD_ARGUMENT, f"{socket.gethostname()} has no database {file}", hint)


def safe_url(url: str) -> str:
    """A URL as it may be shown: without its password."""
    return sa.make_url(url).render_as_string(hide_password=True)


class SqlTables(DataSource):
    """Spark format ``escrowmq-sql``; options as :func:`read_sql` gives them."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-sql"

    def reader(self, schema: Any) -> DataSourceReader:
        given = [
            SqlRead(one["url"], one["table"], tuple(one["columns"]), tuple(map(tuple, one["where"])))
            for one in json.loads(self.options["urls"])
        ]
        kinds = [_spark_name(field.dataType.simpleString()) for field in schema.fields[1:]]
        return SqlReader(given, kinds, int(self.options["partition_rows"]))


class SqlReader(DataSourceReader):
    """Reads by ranges of keys. Pickled to executors: it holds no connection."""

    def __init__(self, reads: Sequence[SqlRead], kinds: Sequence[str], partition_rows: int) -> None:
        self._reads = reads
        self._kinds = kinds
        self._partition_rows = partition_rows

    def partitions(self) -> Sequence[InputPartition]:
        return [piece for number in range(len(self._reads)) for piece in self._ranges(number)]

    def _ranges(self, number: int) -> list[SqlRange]:
        read = self._reads[number]
        with engines.opened(read.url) as engine, engine.connect() as connection:
            key = _first_key(connection, read)
            rows = sa.func.row_number().over(order_by=sa.column(key)).label("n")
            counted = read.query(key).add_columns(rows).subquery()
            first = sa.select(counted.c[0]).where((counted.c.n - 1) % self._partition_rows == 0).order_by(counted.c.n)
            firsts = list(dict.fromkeys(connection.scalars(first)))[1:]
        bounds = [None, *firsts, None]
        return [SqlRange(number, key, first, end) for first, end in itertools.pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlRange)
        read = self._reads[partition.number]
        query = read.query(*read.columns)
        for bound, operator in ((partition.first, ">="), (partition.end, "<")):
            if bound is not None:
                query = query.where(_OPERATORS[operator](sa.column(partition.key), bound))
        kinds = [_BY_NAME[name] for name in self._kinds]
        schema = pa.schema(
            [(SOURCE, pa.int32()), *((n, kind.arrow) for n, kind in zip(read.columns, kinds, strict=True))]
        )
        check_there(read.url)
        with engines.opened(read.url) as engine, engine.connect() as connection:
            for rows in connection.execution_options(yield_per=BATCH_ROWS).execute(query).partitions():
                columns = [
                    _column(read, *one) for one in zip(read.columns, kinds, zip(*rows, strict=True), strict=True)
                ]
                source = pa.array([partition.number] * len(rows), pa.int32())
                yield pa.RecordBatch.from_arrays([source, *columns], schema=schema)


def _column(read: SqlRead, name: str, kind: _Kind, values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array([None if value is None else kind.make(value) for value in values], kind.arrow)
    except (TypeError, ValueError, ArithmeticError) as problem:  # SQLite's columns hold any type
        told = f"{read}: column {name!r} holds something that is no {kind.spark}: {problem}"
        raise Misuse(Code.BAD_ARGUMENT, told) from None


def _first_key(connection: sa.Connection, read: SqlRead) -> str:
    columns = sa.inspect(connection).get_pk_constraint(read.table)["constrained_columns"]
    if not columns:
        raise Misuse(Code.BAD_ARGUMENT, f"{read} has no primary key", "a table is read in ranges of it")
    return str(columns[0])


def _kind(found: Any) -> _Kind:
    """The kind of a reflected column; what is none of ours is read as text. MariaDB's BOOL is a TINYINT of width 1."""
    if getattr(found, "display_width", None) == 1:
        found = sa.Boolean()
    return next((kind for type_, kind in _KINDS if isinstance(found, type_)), _TEXT)


def _spark_name(simple: str) -> str:
    return next(name for name in _BY_NAME if name.lower() == simple)
