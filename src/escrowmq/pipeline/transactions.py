"""A data source of Spark that joins half messages with decisions in the processes that read them from the log.

Almost every transaction begins and ends within one range of the log. It becomes three numbers of a packed value (see
:mod:`escrowmq.pipeline.timeline`), so it does not go to Java as a row. Only the others are *loose*: Spark joins their
half messages and decisions by transaction.

A range has all half messages of a transaction that began in it and whose decision is in it, because nothing is added to
a decided transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.pipeline import timeline
from escrowmq.pipeline.sql import summing
from escrowmq.pipeline.sql.id_windows import SAMPLED_OF
from escrowmq.pipeline.timeline import DECIDERS, STATES, UNDECIDED, make_udf
from escrowmq.schemas import TRANSACTION_ID_DTYPE
from escrowmq.spark.columns import arrow_schema, choose
from escrowmq.spark.options import read_options
from escrowmq.spark.reading import EscrowReader, RangePartition, read_partition
from escrowmq.wire import HALF_VIEW_NAME, OP_VIEW_NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_ROWS = {
    "packed": ("BINARY", pa.binary()),
    "part": ("INT", pa.int32()),
    "loose": ("BINARY", pa.binary()),
    "ids": ("BINARY", pa.binary()),
    "transaction": ("BINARY", pa.binary()),
    "id": ("STRING", pa.utf8()),
    "state": ("STRING", pa.utf8()),
}
ROWS = ", ".join(f"{name} {kind}" for name, (kind, _) in _ROWS.items())
"""The columns of :func:`read_transactions`."""

_PLAN = "urls"  # "url" in its name: Spark redacts it, because it may contain secrets
DECISION_COLUMNS = ("transaction_id", "state", "decided_by", "decided")
_PARTS = 256
"""Ids and loose transactions are shuffled in so many parts."""
_LOOSE = np.dtype([("transaction", TRANSACTION_ID_DTYPE), *[(name, "<i8") for name in ("stored_us", "checks", "end")]])
"""A half message (``end`` is NO_END) or a decision (``stored_us`` is _DECISION)."""
_PAIR = pa.struct([("hashed", pa.int64()), ("stored_us", pa.int64())])
_DECISION = np.iinfo(np.int64).max


class TransactionRead(msgspec.Struct, frozen=True):
    """A read of the transactions that have half messages of ``topics``, with the ids of these messages; None: of all
    transactions, without ids. ``options`` are those of format "escrow"; ``hex_ids`` the topics whose id is the message
    id; ``sample``: only so many of SAMPLED_OF parts of the ids."""

    options: dict[str, str]
    topics: tuple[str, ...] | None = None
    hex_ids: tuple[str, ...] = ()
    sample: int | None = None

    @property
    def columns(self) -> list[str]:
        """The columns of half messages that are read."""
        of_ids = ["topic", "key", *(["message_id"] if self.hex_ids else [])]
        return ["transaction_id", "state", "checks", "stored", *(of_ids if self.topics is not None else [])]

    def open_half(self, batch: pa.RecordBatch) -> _Halves:
        """Return the half messages of a batch that are read."""
        if self.topics is None:
            return _Halves.of(batch, None)
        batch = batch.filter(pc.fill_null(pc.is_in(batch.column("topic"), pa.array(self.topics, pa.utf8())), False))
        ids = find_ids(batch, self.hex_ids)
        if self.sample is not None:
            chosen = pa.array(summing.find_windows(ids, SAMPLED_OF, True) < self.sample)
            batch, ids = batch.filter(chosen), ids.filter(chosen)
        return _Halves.of(batch, ids)


def find_ids(batch: pa.RecordBatch, hex_ids: Sequence[str]) -> pa.Array:
    """Return the ids of messages as binary: the key, or for the topics ``hex_ids`` the message id in hexadecimal."""
    ids = batch.column("key").cast(pa.binary())
    if not hex_ids:
        return ids
    are_hex = pc.fill_null(pc.is_in(batch.column("topic"), pa.array(hex_ids)), False)
    return pc.if_else(are_hex, to_hex(batch.column("message_id")), ids)


def to_hex(column: pa.Array) -> pa.Array:
    """Convert bytes to hexadecimal digits, as binary."""
    values = column.cast(pa.binary()).to_pylist()
    return pa.array([None if value is None else value.hex().encode() for value in values], pa.binary())


def read_transactions(spark: SparkSession, read: TransactionRead) -> DataFrame:
    """Return the transactions of a log → the columns ROWS, in four kinds of rows. ``packed``: transactions that are
    joined. ``part`` and ``ids``: hashes of ids (64 bits) with the times of their first half messages, by part of the
    hash. ``part`` and ``loose``: half messages and decisions that are to be joined, by part of the transaction.
    ``transaction, id, state``: half messages that are undecided."""
    spark.dataSource.register(Transactions)
    plan = msgspec.json.encode(read).decode()
    return spark.read.format(Transactions.name()).schema(ROWS).option(_PLAN, plan).load()


class Transactions(DataSource):
    """Spark format ``escrowmq-transactions``. :func:`read_transactions` sets its option."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-transactions"

    def reader(self, schema: StructType) -> DataSourceReader:
        read = msgspec.json.decode(self.options[_PLAN], type=TransactionRead)
        options = read_options(read.options)
        return TransactionReader(read, EscrowReader(options, arrow_schema(choose(HALF_VIEW_NAME, read.columns))))


class TransactionReader(DataSourceReader):
    """Joins half messages that another reader reads with the decisions in the same ranges of the log. Pickled to
    executors."""

    def __init__(self, read: TransactionRead, half: EscrowReader) -> None:
        self._read = read
        self._half = half

    def partitions(self) -> Sequence[InputPartition]:
        return self._half.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):  # nothing is to be read
            return
        of_range = partition.range
        decided = RangePartition(replace(of_range, partition=replace(of_range.partition, source=OP_VIEW_NAME)))
        schema = arrow_schema(choose(OP_VIEW_NAME, DECISION_COLUMNS))
        decisions = read_partition(decided, schema, self._half.options)
        yield from join_range(self._read, self._half.read(partition), decisions, of_range.start)


def join_range(
    read: TransactionRead, halves: Iterable[pa.RecordBatch], decisions: Iterable[pa.RecordBatch], start: int
) -> Iterator[pa.RecordBatch]:
    """Join all half messages and decisions of a range of the log that begins at position ``start``. Yields ROWS."""
    half = _Halves.concat([read.open_half(batch) for batch in halves])
    decided = _Decisions.concat([_Decisions.of(batch) for batch in decisions])
    first = decided.find_first(half.transactions, start)
    is_joined = first >= 0
    if is_joined.any():
        yield _make_rows(packed=pa.array([half.pack(is_joined, decided.ends[first])], pa.binary()))
    if len(half.hashed):
        yield _pack_ids(half.hashed, half.stored_us)
    loose = np.concatenate([half.list_loose(~is_joined), decided.list_loose(start)])
    if len(loose):
        parts = (loose["transaction"]["position"] % _PARTS).astype(np.int64)
        order = np.argsort(parts, kind="stable")
        yield _make_parts("loose", parts[order], loose[order])
    yield half.list_undecided()


@dataclass(frozen=True, slots=True)
class _Halves:
    """Half messages, as columns: ids of transactions (16 bytes), checks, times, hashes of their own ids (empty: not
    read); and ids and states, of undecided ones only."""

    transactions: np.ndarray
    checks: np.ndarray
    stored_us: np.ndarray
    hashed: np.ndarray
    id: pa.Array
    state: pa.Array

    @classmethod
    def of(cls, batch: pa.RecordBatch, ids: pa.Array | None) -> _Halves:
        state = batch.column("state")
        is_open = pc.fill_null(pc.is_in(state, pa.array(UNDECIDED)), False)
        nothing = pa.scalar(None, pa.utf8())
        return cls(
            _open_transactions(batch),
            batch.column("checks").to_numpy().astype(np.int64),
            batch.column("stored").cast(pa.int64()).to_numpy(),
            np.empty(0, np.int64) if ids is None else summing.hash_ids(ids),
            pa.nulls(len(batch), pa.utf8()) if ids is None else pc.if_else(is_open, ids.cast(pa.utf8()), nothing),
            pc.if_else(is_open, state, nothing),
        )

    @classmethod
    def concat(cls, every: Sequence[_Halves]) -> _Halves:
        if not every:
            none, nothing = np.empty(0, np.int64), pa.nulls(0, pa.utf8())
            return cls(np.empty(0, TRANSACTION_ID_DTYPE), none, none, none, nothing, nothing)
        arrays = [[one.transactions, one.checks, one.stored_us, one.hashed] for one in every]
        texts = [pa.concat_arrays([getattr(one, name) for one in every]) for name in ("id", "state")]
        return cls(*map(np.concatenate, zip(*arrays, strict=True)), *texts)

    def pack(self, chosen: np.ndarray, ends: np.ndarray) -> bytes:
        """Return the transactions of the chosen half messages as a packed value. ``ends``: of each half message."""
        position = self.transactions["position"][chosen]
        order = np.argsort(position, kind="stable")
        begins = _find_begins(position[order])
        stored_us = np.minimum.reduceat(self.stored_us[chosen][order], begins)
        checks = np.maximum.reduceat(self.checks[chosen][order], begins)
        return timeline.pack(stored_us, checks, ends[chosen][order][begins])

    def list_loose(self, chosen: np.ndarray) -> np.ndarray:
        """Return the chosen half messages as _LOOSE."""
        loose = np.empty(int(chosen.sum()), _LOOSE)
        loose["transaction"], loose["stored_us"] = self.transactions[chosen], self.stored_us[chosen]
        loose["checks"], loose["end"] = self.checks[chosen], timeline.NO_END
        return loose

    def list_undecided(self) -> pa.RecordBatch:
        """Return the undecided half messages as rows."""
        is_open = self.state.is_valid()
        data = pa.py_buffer(self.transactions[is_open.to_numpy(zero_copy_only=False)].tobytes())
        transaction = pa.Array.from_buffers(pa.binary(16), data.size // 16, [None, data]).cast(pa.binary())
        return _make_rows(transaction=transaction, id=self.id.filter(is_open), state=self.state.filter(is_open))


@dataclass(frozen=True, slots=True)
class _Decisions:
    """Decisions, as columns: ids of transactions, and ends."""

    transactions: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> _Decisions:
        decided_us = batch.column("decided").cast(pa.int64()).to_numpy()
        codes = [
            pc.index_in(batch.column(name), pa.array(words)).to_numpy().astype(np.int64)
            for name, words in (("state", STATES), ("decided_by", DECIDERS))
        ]
        return cls(_open_transactions(batch), timeline.make_ends(decided_us, *codes))

    @classmethod
    def concat(cls, every: Sequence[_Decisions]) -> _Decisions:
        """Join lists of decisions, in the order of their transactions, the first decision of each first."""
        transactions = np.concatenate([np.empty(0, TRANSACTION_ID_DTYPE), *[one.transactions for one in every]])
        ends = np.concatenate([np.empty(0, np.int64), *[one.ends for one in every]])
        order = np.lexsort((ends, transactions["position"]))
        return cls(transactions[order], ends[order])

    def find_first(self, transactions: np.ndarray, start: int) -> np.ndarray:
        """Return for each of the transactions the place of its first decision; -1 for one without decision, and for one
        that began before position ``start``."""
        position = self.transactions["position"].astype(np.int64)
        wanted = transactions["position"].astype(np.int64)
        place = np.searchsorted(position, wanted)
        place[place == len(position)] = -1
        is_found = (place >= 0) & (wanted >= start)
        is_found[is_found] = self.transactions[place[is_found]] == transactions[is_found]
        return np.where(is_found, place, -1)

    def list_loose(self, start: int) -> np.ndarray:
        """Return the decisions about transactions that began before position ``start`` as _LOOSE. All half messages of
        the others are in the range, or none is read."""
        chosen = self.transactions["position"].astype(np.int64) < start
        loose = np.empty(int(chosen.sum()), _LOOSE)
        loose["transaction"], loose["end"] = self.transactions[chosen], self.ends[chosen]
        loose["stored_us"], loose["checks"] = _DECISION, 0
        return loose


def _open_transactions(batch: pa.RecordBatch) -> np.ndarray:
    values = batch.column("transaction_id").cast(pa.binary(16))
    return np.frombuffer(values.buffers()[1], TRANSACTION_ID_DTYPE, len(values), 16 * values.offset)


def _pack_ids(hashed: np.ndarray, stored_us: np.ndarray) -> pa.RecordBatch:
    """Return rows with the ids by part, each once."""
    order = np.argsort(hashed.view(np.uint64), kind="stable")
    sorted_ = hashed[order]
    begins = _find_begins(sorted_)
    ids = np.stack([sorted_[begins], np.minimum.reduceat(stored_us[order], begins)], axis=1)
    return _make_parts("ids", (ids[:, 0].view(np.uint64) // np.uint64(2**64 // _PARTS)).astype(np.int64), ids)


def _make_parts(name: str, parts: np.ndarray, values: np.ndarray) -> pa.RecordBatch:
    """Return a row per part with its values, in the column ``name``. ``parts``, sorted: of each value."""
    begins = _find_begins(parts)
    pieces = [piece.tobytes() for piece in np.split(values, begins[1:])]
    return _make_rows(part=pa.array(parts[begins], pa.int32()), **{name: pa.array(pieces, pa.binary())})


def _find_begins(values: np.ndarray) -> np.ndarray:
    """Return the places at which runs of equal values begin; there is at least one value."""
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


def _make_rows(**columns: pa.Array) -> pa.RecordBatch:
    """Return a batch of ROWS with these columns; the others are null."""
    size = len(next(iter(columns.values())))
    arrays = [columns[name] if name in columns else pa.nulls(size, kind) for name, (_, kind) in _ROWS.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(_ROWS))


def join_loose(rows: DataFrame) -> DataFrame:
    """Convert rows of :func:`read_transactions` to a frame of transactions: joined ones, and the loose ones, which are
    shuffled."""
    join = make_udf(_join_values, pa.binary())
    joined = rows.where("loose IS NOT NULL").groupBy("part").agg(join("loose").alias("packed")).select("packed")
    return rows.select("packed").unionByName(joined).where("octet_length(packed) > 0")


def count_ids(rows: DataFrame) -> int:
    """Return how many different ids the rows of :func:`read_transactions` have."""
    count = make_udf(_count_different, pa.int64())
    counted = rows.where("ids IS NOT NULL").groupBy("part").agg(count("ids").alias("number"))
    return int(counted.agg(f.coalesce(f.sum("number"), f.lit(0))).collect()[0][0])


def find_times(rows: DataFrame, hashes: Sequence[int] | None = None) -> DataFrame:
    """Return ``hashed, stored_us`` of half messages: at least the first one of each id that has one of these hashes
    (None: of each)."""
    wanted = None if hashes is None else np.array(hashes, np.int64)

    def select(values: pa.Array) -> pa.Array:
        found = [ids if wanted is None else ids[np.isin(ids[:, 0], wanted)] for ids in _open_ids(values)]
        every = np.concatenate([np.empty((0, 2), np.int64), *found])
        pairs = pa.StructArray.from_arrays([pa.array(column) for column in every.T], fields=list(_PAIR))
        return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, found)]), pa.int32()), pairs)

    pairs = make_udf(select, pa.list_(_PAIR))("ids")
    return rows.where("ids IS NOT NULL").select(f.explode(pairs).alias("pair")).select("pair.*")


def _open_ids(values: pa.Array) -> Iterator[np.ndarray]:
    """Yield the hashes and times of each value, in two columns."""
    for value in values:
        yield np.frombuffer(value.as_buffer(), np.int64).reshape(-1, 2)


def _count_different(values: pa.Array) -> int:
    return len(np.unique(np.concatenate([ids[:, 0] for ids in _open_ids(values)])))


def _join_values(values: pa.Array) -> bytes:
    """Join all loose half messages and decisions of some transactions; return them packed."""
    loose = np.concatenate([np.frombuffer(value.as_buffer(), _LOOSE) for value in values])
    named = loose["transaction"]
    loose = loose[np.lexsort((named["position"], named["epoch"], named["shard"]))]
    begins = _find_begins(loose["transaction"])
    ends = np.where(loose["end"] == timeline.NO_END, _DECISION, loose["end"])
    stored_us, ends = (np.minimum.reduceat(column, begins) for column in (loose["stored_us"], ends))
    checks = np.maximum.reduceat(loose["checks"], begins)
    has_half = stored_us < _DECISION
    ends = np.where(ends == _DECISION, timeline.NO_END, ends)
    return timeline.pack(stored_us[has_half], checks[has_half], ends[has_half])
