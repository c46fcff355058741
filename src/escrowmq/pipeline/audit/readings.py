"""The frames that the comparisons work on: every side as ``id`` and text columns, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from escrowmq.errors import Code, Misuse
from escrowmq.model import TransactionState
from escrowmq.pipeline.audit.manifest import MESSAGE_COLUMNS, Manifest
from escrowmq.pipeline.sources import TableRead, read_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATES = {int(state): state.name.lower() for state in TransactionState}
HALF, OP = "half", "op"

MESSAGE = "key STRING, tag STRING, properties MAP<STRING, STRING>, body BINARY, message_id BINARY, transaction BINARY"
LOG_SCHEMAS = {
    HALF: f"{MESSAGE}, topic STRING, stored_us BIGINT, state SMALLINT, checks INT",
    OP: "transaction BINARY, state SMALLINT, decided_by SMALLINT, decided_us BIGINT",
}
"""What the audit reads of the log, as Spark reads it from Parquet (topics: MESSAGE). Given, it need not be found out."""


class Readings:
    """All sides of one run. ``log`` is the folder that :func:`escrowmq.pipeline.audit.exporting.export_log` filled."""

    def __init__(self, spark: SparkSession, manifest: Manifest, log: Path) -> None:
        self._spark = spark
        self._manifest = manifest
        self._log = log

    def side(self, name: str, columns: Sequence[str]) -> DataFrame:
        """A side of a comparison that is no table (``file:``, ``topic:`` or ``half:NAME``) → ``id`` and ``columns``."""
        kind, _, name = name.partition(":")
        if kind == "file":
            return self.file(name, columns)
        if kind == "half":
            committed = self.half().where((f.col("topic") == name) & (f.col("state") == "committed"))
            return committed.select("id", *columns)
        return self.topic(name, columns)

    def tables(self, wanted: Mapping[str, Sequence[str]]) -> DataFrame:
        """Tables (``table:NAME`` → columns) → ``name`` (the same), ``cells``: the id and the columns, as text."""
        reads = []
        for side, columns in wanted.items():
            table = self._manifest.tables[side.removeprefix("table:")]
            database = str((self._manifest.folder / table.database).resolve())
            reads.append(TableRead(side, database, table.table, (table.id, *columns), table.where))
        return read_tables(self._spark, reads)

    def file(self, name: str, columns: Sequence[str] = ()) -> DataFrame:
        """A Parquet file → ``id`` and ``columns``, as text."""
        file = self._manifest.files[name]
        frame = _parquet(self._spark, self._manifest.folder / file.path)
        for column, value in file.where.items():
            frame = frame.where(f.col(column).cast("string") == value)
        return frame.select(
            f.col(file.id).cast("string").alias("id"), *[f.col(c).cast("string").alias(c) for c in columns]
        )

    def topic(self, name: str, columns: Sequence[str]) -> DataFrame:
        """The committed messages of a topic, as consumers see them → ``id`` (the key) and ``columns``."""
        return _message(_parquet(self._spark, self._log / "topics" / name, MESSAGE), columns)

    def half(self) -> DataFrame:
        """All half messages → ``id, topic, state, checks, transaction_id, message_id, tag, properties, body, stored_us``."""
        frame = _parquet(self._spark, self._log / HALF, LOG_SCHEMAS[HALF])
        names = f.create_map(*[f.lit(item) for state in STATES.items() for item in state])
        return frame.select(
            f.col("key").alias("id"),
            "topic",
            names[f.col("state").cast("int")].alias("state"),
            f.col("checks").cast("long").alias("checks"),
            _transaction_text(f.col("transaction")).alias("transaction_id"),
            _hex(f.col("message_id")).alias("message_id"),
            "tag",
            _properties_text(),
            "body",
            f.col("stored_us").cast("long").alias("stored_us"),
        )

    def decisions(self) -> DataFrame:
        """All decisions → ``transaction_id, state, decided_by, decided_us``."""
        frame = _parquet(self._spark, self._log / OP, LOG_SCHEMAS[OP])
        names = f.create_map(*[f.lit(item) for state in STATES.items() for item in state])
        return frame.select(
            _transaction_text(f.col("transaction")).alias("transaction_id"),
            names[f.col("state").cast("int")].alias("state"),
            f.col("decided_by").cast("int").alias("decided_by"),
            f.col("decided_us").cast("long").alias("decided_us"),
        )


def _message(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Messages as delivered → ``id`` and ``columns``: MESSAGE_COLUMNS, or else fields of the JSON body, as text."""
    fields = [name for name in columns if name not in MESSAGE_COLUMNS]
    shape = StructType([StructField(name, StringType()) for name in fields])
    body = f.from_json(f.decode(f.col("body"), "UTF-8"), shape) if fields else f.lit(None)
    own: dict[str, Column] = {
        "message_id": _hex(f.col("message_id")),
        "transaction_id": _transaction_text(f.col("transaction")),
        "tag": f.col("tag"),
        "properties": _properties_text(),
        "body": f.col("body"),
    }
    spread = frame.withColumn("_body", body)
    chosen = [own[name].alias(name) if name in own else f.col("_body")[name].alias(name) for name in columns]
    return spread.select(f.col("key").alias("id"), *chosen)


def _properties_text() -> Column:
    """The properties as one text, whatever order they were given in."""
    return f.to_json(f.array_sort(f.map_entries(f.col("properties")))).alias("properties")


def _hex(column: Column) -> Column:
    return f.lower(f.hex(column))


def _transaction_text(column: Column) -> Column:
    """The 16 bytes of a transaction id as ``str(TransactionId)`` prints them: SHARD-EPOCH-POSITION, hexadecimal."""
    digits = _hex(column)
    epoch, position = (_without_zeros(f.substring(digits, start, size)) for start, size in ((9, 8), (17, 16)))
    return f.concat_ws("-", f.substring(digits, 1, 8), epoch, position)


def _without_zeros(digits: Column) -> Column:
    return f.regexp_replace(digits, "^0+(?=.)", "")


def _parquet(spark: SparkSession, path: Path, schema: str | None = None) -> DataFrame:
    if not path.exists():
        raise Misuse(Code.BAD_ARGUMENT, f"{path} is missing")
    reader = spark.read if schema is None else spark.read.schema(schema)
    return reader.parquet(str(path.resolve()))
