"""A data source of Spark that reads ranges of the log and returns their checksums by window, or only the messages in
some windows: other messages do not go through Java.

A comparison is summed so, and its tables in :mod:`escrowmq.pipeline.sql.summing`, if nothing of it needs Spark:
see :func:`escrowmq.pipeline.audit.parts.columns.can_sum_here`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.pipeline.bodies import MESSAGE_COLUMNS, Bodies
from escrowmq.pipeline.sql import summing
from escrowmq.pipeline.sql.summing import STORED, SUMS
from escrowmq.pipeline.transactions import find_ids, to_hex
from escrowmq.spark import source
from escrowmq.spark.columns import arrow_schema, choose, spark_schema
from escrowmq.spark.options import read_options
from escrowmq.spark.reading import EscrowReader, RangePartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_PLAN = "urls"  # "url" in its name: Spark redacts it, because it may contain secrets
_SETTLED = f"{SUMS}, _settled BOOLEAN"
_IDS = ("message_id", "transaction_id")


class LogRole(msgspec.Struct, frozen=True):
    """The role of a topic in a comparison: its columns with their kinds in front."""

    topic: str
    comparison: int
    expected: bool
    keys: tuple[str, ...]


class LogRead(msgspec.Struct, frozen=True):
    """A read of messages: ``options`` of format "escrow", and by which of ``windows`` windows they are summed or
    selected. ``hex_ids`` are the topics whose id is the message id. ``only``: rows of these windows are read; None:
    ``roles`` are summed, of half messages the committed ones. ``limits``: offsets (positions) by partition before which
    rows are settled; None: sums have no such column."""

    options: dict[str, str]
    hex_ids: tuple[str, ...]
    windows: int
    portable: bool
    only: tuple[int, ...] | None = None
    is_half: bool = False
    roles: tuple[LogRole, ...] = ()
    limits: dict[str, int] | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that are read for the sums."""
        named = {key.partition(" ")[2] for role in self.roles for key in role.keys}
        of_message = {name if name in MESSAGE_COLUMNS else "body" for name in named}
        more = ["state", "position"] if self.is_half else ["offset"]
        return sorted({"topic", "key", *more, *of_message, *(["message_id"] if self.hex_ids else [])})


def read_log(spark: SparkSession, read: LogRead) -> DataFrame:
    """Return the selected messages, or the checksums → the columns of SUMS, and ``_settled`` with limits; one row per
    role, range and window that has rows."""
    spark.dataSource.register(LogRows)
    schema = SUMS if read.limits is None else _SETTLED
    if read.only is not None:
        options = read_options(read.options)
        schema = spark_schema(choose(options.first_source, options.columns))
    return spark.read.format(LogRows.name()).schema(schema).option(_PLAN, msgspec.json.encode(read).decode()).load()


class LogRows(DataSource):
    """Spark format ``escrowmq-log-rows``. :func:`read_log` sets its option."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-log-rows"

    def reader(self, schema: StructType) -> DataSourceReader:
        read = msgspec.json.decode(self.options[_PLAN], type=LogRead)
        options = read_options(read.options)
        if read.only is not None:
            return WindowReader(read, EscrowReader(options, source.arrow_schema(options, schema)))
        return LogSumReader(read, EscrowReader(options, arrow_schema(choose(options.first_source, read.columns))))


class WindowReader(DataSourceReader):
    """Selects rows that another reader reads. Pickled to executors."""

    def __init__(self, read: LogRead, reader: EscrowReader) -> None:
        self._read = read
        self._reader = reader

    def partitions(self) -> Sequence[InputPartition]:
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        read = self._read
        for batch in self._reader.read(partition):
            found = summing.find_windows(find_ids(batch, read.hex_ids), read.windows, read.portable)
            yield batch.filter(pa.array(np.isin(found, read.only or ())))


class LogSumReader(WindowReader):
    """Sums rows that another reader reads."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        read = self._read
        sums = summing.WindowSums(read.windows, len(read.roles), portable=read.portable, parts=2)
        limit = 0
        if read.limits is not None and isinstance(partition, RangePartition):
            limit = read.limits.get(partition.range.partition.name, 0)
        adder = _Adder(read, sums, limit)
        for batch in self._reader.read(partition):
            adder.add(batch)
        lines = (
            (role.comparison, window, int(role.expected), *values, bool(part))
            for number, role in enumerate(read.roles)
            for part, window, *values in sums.lines(number)
        )
        names = [column.split()[0] for column in (SUMS if read.limits is None else _SETTLED).split(", ")]
        kinds = [*summing.SUM_KINDS, pa.bool_()][: len(names)]
        yield pa.RecordBatch.from_arrays(summing.make_columns(lines, kinds), names=names)


class _Adder:
    """Adds batches of messages to sums. Rows before ``limit`` are settled."""

    def __init__(self, read: LogRead, sums: summing.WindowSums, limit: int) -> None:
        self._read = read
        self._sums = sums
        self._limit = limit
        named = [key.partition(" ")[::2] for role in read.roles for key in role.keys]
        # a field in two kinds is read in the stricter way: only numbers may have fractions
        fields = {name: "number" for _, name in named if name not in MESSAGE_COLUMNS}
        fields |= {name: kind for kind, name in named if name in fields and kind != "number"}
        self._fields = list(fields)
        self._bodies = Bodies(fields)

    def add(self, batch: pa.RecordBatch) -> None:
        for topic in dict.fromkeys(role.topic for role in self._read.roles):
            is_mine = pc.equal(batch.column("topic"), topic)
            if self._read.is_half:
                is_mine = pc.and_(is_mine, pc.equal(batch.column("state"), "committed"))
            mine = batch.filter(pc.fill_null(is_mine, False))
            if mine.num_rows:
                self._add_topic(topic, mine)

    def _add_topic(self, topic: str, batch: pa.RecordBatch) -> None:
        read = self._read
        part: Any = 0
        if read.limits is not None:
            part = batch.column("position" if read.is_half else "offset").to_numpy() < self._limit
        roles = {number: role for number, role in enumerate(read.roles) if role.topic == topic}
        keys = list({key for role in roles.values() for key in role.keys})
        fields: dict[str, pa.Array] = {}
        if {key.partition(" ")[2] for key in keys}.intersection(self._fields):
            fields = dict(zip(self._fields, self._bodies.read(batch.column("body").to_pylist()), strict=True))
        columns = [(_make_plain(key, batch, fields), key.partition(" ")[0]) for key in keys]
        sums = {number: [keys.index(key) for key in role.keys] for number, role in roles.items()}
        self._sums.add(find_ids(batch, read.hex_ids), columns, sums, part)


def _make_plain(key: str, batch: pa.RecordBatch, fields: Mapping[str, pa.Array]) -> pa.Array:
    kind, _, name = key.partition(" ")
    if name in fields:
        return fields[name]
    column = batch.column(name)
    if name == "properties":
        return _write_properties(column)
    if name in _IDS:
        return column.cast(pa.binary(16)) if kind == STORED else to_hex(column)
    return column.cast(pa.binary())


def _write_properties(column: pa.Array) -> pa.Array:
    """Return maps as texts in which equal maps are equal."""
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.binary())
    encode = msgspec.json.encode
    return pa.array([None if one is None else encode(sorted(one)) for one in column.to_pylist()], pa.binary())
