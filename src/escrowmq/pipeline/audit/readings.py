"""The rows that the comparisons work on: every side as an id and cells of text, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit.log import Log
from escrowmq.pipeline.audit.manifest import MESSAGE_COLUMNS, Comparison, Manifest
from escrowmq.pipeline.audit.rows import Cell, Role, Rows, Speaker
from escrowmq.pipeline.sources import TableRead, read_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BODY = "_body"
"""The fields of a JSON body, once they are taken apart."""


class Readings:
    """All sides of one run."""

    def __init__(self, spark: SparkSession, manifest: Manifest, log: Log) -> None:
        self._spark = spark
        self._manifest = manifest
        self._log = log

    def rows(self, comparisons: Sequence[Comparison]) -> list[Rows]:
        """The sides of these comparisons: all tables, all topics and all half messages in one frame each, and each file."""
        roles: dict[str, list[Role]] = {}
        for number, c in enumerate(comparisons):
            roles.setdefault(c.expected, []).append(Role(number, True, c.columns))
            roles.setdefault(c.found, []).append(Role(number, False, c.columns))
        of = {
            kind: {side.partition(":")[2]: tuple(its) for side, its in roles.items() if side.startswith(f"{kind}:")}
            for kind in ("table", "topic", "half", "file")
        }
        made = [self._file(name, its) for name, its in of["file"].items()]
        made += [self._tables(of["table"])] if of["table"] else []
        made += [self._topics(of["topic"])] if of["topic"] else []
        made += [self._halves(of["half"])] if of["half"] else []
        return made

    def half(self) -> DataFrame:
        """All half messages → ``id, state, checks, transaction, stored_us``."""
        frame = self._log.half(["key", "state", "checks", "transaction_id", "stored"])
        return frame.select(
            f.col("key").alias("id"),
            "state",
            f.col("checks").cast("long").alias("checks"),
            f.col("transaction_id").alias("transaction"),
            f.unix_micros("stored").alias("stored_us"),
        )

    def decisions(self) -> DataFrame:
        """All decisions → ``transaction, state, decided_by, decided_us``."""
        frame = self._log.decisions(["transaction_id", "state", "decided_by", "decided"])
        return frame.select(
            f.col("transaction_id").alias("transaction"),
            "state",
            "decided_by",
            f.unix_micros("decided").alias("decided_us"),
        )

    def _tables(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Tables come as their name and cells, the id first."""
        reads, speakers = [], []
        for name, its in roles.items():
            table = self._manifest.tables[name]
            columns = _columns(its)
            database = str((self._manifest.folder / table.database).resolve())
            reads.append(TableRead(name, database, table.table, (table.id, *columns), table.where))
            speakers.append(Speaker(its, _numbered(columns), f.col("name") == name))
        frame = read_tables(self._spark, reads)  # which also looks whether all is there
        sure = [self._manifest.tables[read.name].unique and read.is_unique(read.columns[0]) for read in reads]
        speakers = [Speaker(s.roles, s.cell, s.where, unique) for s, unique in zip(speakers, sure, strict=True)]
        return Rows(frame, f.col("cells")[0], tuple(speakers))

    def _file(self, name: str, roles: tuple[Role, ...]) -> Rows:
        """A Parquet file."""
        file = self._manifest.files[name]
        path = self._manifest.folder / file.path
        if not path.exists():
            raise Misuse(Code.BAD_ARGUMENT, f"{path} is missing")
        frame = self._spark.read.parquet(str(path.resolve()))
        for column, value in file.where.items():
            frame = frame.where(f.col(column).cast("string") == value)
        return Rows(frame, f.col(file.id).cast("string"), (Speaker(roles, lambda name: f.col(name).cast("string")),))

    def _topics(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """The committed messages of topics, as consumers see them."""
        fields = [name for name in _columns([r for its in roles.values() for r in its]) if name not in MESSAGE_COLUMNS]
        frame = self._log.topics(list(roles), _needed(roles, fields))
        if fields:
            shape = StructType([StructField(name, StringType()) for name in fields])
            frame = frame.withColumn(_BODY, f.from_json(f.col("body").cast("string"), shape))
        speakers = [Speaker(its, _message_cell, f.col("topic") == name) for name, its in roles.items()]
        return Rows(frame, f.col("key"), tuple(speakers))

    def _halves(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """The half messages whose transaction committed."""
        frame = self._log.half(_needed(roles, []) | {"state"}).where(f.col("state") == "committed")
        speakers = [Speaker(its, _message_cell, f.col("topic") == name) for name, its in roles.items()]
        return Rows(frame, f.col("key"), tuple(speakers))


def _columns(roles: Sequence[Role]) -> list[str]:
    return sorted({name for role in roles for name in role.columns})


def _numbered(columns: Sequence[str]) -> Cell:
    """A table's cells: the id, then ``columns``."""
    return lambda name: f.col("cells")[columns.index(name) + 1]


def _needed(roles: Mapping[str, tuple[Role, ...]], fields: Collection[str]) -> set[str]:
    """Columns of format "escrow" that messages of these roles are made of."""
    own = {name for its in roles.values() for name in _columns(its)} & set(MESSAGE_COLUMNS)
    return {"topic", "key", *own} | ({"body"} if fields else set())


def _message_cell(name: str) -> Column:
    """A column of a message, or else a field of its JSON body, as text."""
    make = _OWN.get(name)
    return make() if make is not None else f.col(_BODY)[name]


def _properties_text() -> Column:
    """The properties as one text, whatever order they were given in."""
    return f.to_json(f.array_sort(f.map_entries(f.col("properties"))))


def _hex(column: Column) -> Column:
    return f.lower(f.hex(column))


def _transaction_text() -> Column:
    """The 16 bytes of a transaction id as ``str(TransactionId)`` prints them: SHARD-EPOCH-POSITION, hexadecimal."""
    digits = _hex(f.col("transaction_id"))
    epoch, position = (_without_zeros(f.substring(digits, start, size)) for start, size in ((9, 8), (17, 16)))
    return f.concat(f.substring(digits, 1, 8), f.lit("-"), epoch, f.lit("-"), position)


def _without_zeros(digits: Column) -> Column:
    left = f.ltrim(digits, f.lit("0"))
    return f.when(left == "", "0").otherwise(left)


_OWN: dict[str, Callable[[], Column]] = {
    "message_id": lambda: _hex(f.col("message_id")),
    "transaction_id": _transaction_text,
    "tag": lambda: f.col("tag"),
    "properties": _properties_text,
    "body": lambda: f.col("body"),
}
"""MESSAGE_COLUMNS, each as it is compared."""
