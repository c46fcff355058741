"""Readers of all sources of the audit. Each returns an id and the compared columns as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.pipeline import timeline
from escrowmq.pipeline.audit import delivered, frames
from escrowmq.pipeline.audit.frames import make_witness
from escrowmq.pipeline.audit.manifest import MESSAGE_COLUMNS, Comparison, Manifest, of_group
from escrowmq.pipeline.audit.rows import Cell, Role, Rows, Speaker
from escrowmq.pipeline.log import BrokerLog
from escrowmq.pipeline.sql.source import CELLS, SOURCE, read_texts
from escrowmq.pipeline.sql.tables import SqlRead, readonly_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BODY = "_fields"
"""The fields of a JSON body after parsing."""


class Readings:
    """All sides of one run."""

    def __init__(self, spark: SparkSession, manifest: Manifest, log: BrokerLog) -> None:
        self.spark = spark
        self._manifest = manifest
        self.log = log
        self._places: dict[str, DataFrame] = {}

    def close(self) -> None:
        """Release the places that are kept."""
        for found in self._places.values():
            found.unpersist()
        self._places.clear()

    def find_places(self, group: str) -> DataFrame:
        """Return :func:`escrowmq.pipeline.audit.delivered.find_places`, kept until :meth:`close`."""
        if group not in self._places:
            self._places[group] = delivered.find_places(self.log, group).persist()
        return self._places[group]

    def read_rows(self, comparisons: Sequence[Comparison]) -> list[Rows]:
        """Return the sides of these comparisons: one frame each for all tables, all topics and all half messages, and
        one for each file."""
        roles: dict[str, list[Role]] = {}
        for number, c in enumerate(comparisons):
            for side, is_expected in zip(c.sides, (True, False), strict=True):
                roles.setdefault(side, []).append(Role(number, is_expected, compared_columns(c)))
        of = {
            kind: {side.partition(":")[2]: tuple(its) for side, its in roles.items() if side.startswith(f"{kind}:")}
            for kind in ("table", "topic", "half", "group", "file")
        }
        made = [self._read_file(name, its) for name, its in of["file"].items()]
        together = (("table", self._read_tables), ("topic", self._read_topics), ("half", self._read_halves))
        made += [read(of[kind]) for kind, read in together if of[kind]]
        by_group: dict[str, dict[str, tuple[Role, ...]]] = {}
        for name, its in of["group"].items():
            group, topic = of_group(name)
            by_group.setdefault(group, {})[topic] = its
        made += [self._read_delivered(group, its) for group, its in by_group.items()]
        return made

    def read_half(self) -> DataFrame:
        """Return all half messages → ``transaction, checks, stored_us, hashed, id, state``. Rows are small: the id is
        hashed. The id itself and the state are included only for undecided transactions."""
        open_ = f.col("state").isin(*frames.UNDECIDED)
        return timeline.select_half(
            self.log.half(["state", *timeline.HALF_COLUMNS, *self._id_columns]),
            f.xxhash64(self.id).alias("hashed"),
            f.when(open_, self.id).alias("id"),
            f.when(open_, f.col("state")).alias("state"),
        )

    def _read_tables(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the rows of tables: the number of the read, and the cells with the id first."""
        reads = []
        for name, its in roles.items():
            table = self._manifest.tables[name]
            url = readonly_url((self._manifest.folder / table.database).resolve())
            where = tuple((column, "=", text) for column, text in table.where.items())
            reads.append(SqlRead(url, table.table, (table.id, *_list_columns(its)), where, texts=True))
        frame = read_texts(self.spark, reads)  # which also checks that all is there
        speakers = []
        for number, ((name, its), read) in enumerate(zip(roles.items(), reads, strict=True)):
            unique = self._manifest.tables[name].unique and is_unique(read, read.columns[0])
            speakers.append(Speaker(its, _make_cell(read.columns), f.col(SOURCE) == number, unique))
        return Rows(frame, f.col(CELLS)[0], tuple(speakers))

    def _read_file(self, name: str, roles: tuple[Role, ...]) -> Rows:
        """Return the rows of a Parquet file in the run folder, or at a URL that Spark knows."""
        file = self._manifest.files[name]
        path = file.path
        if "://" not in path:
            here = self._manifest.folder / path
            if not here.exists():
                raise Misuse(Code.BAD_ARGUMENT, f"{here} is missing")
            path = f"file:{here.resolve()}"  # the default file system of a cluster may be another one
        frame = self.spark.read.parquet(path)
        for column, value in file.where.items():
            frame = frame.where(f.col(column).cast("string") == value)
        return Rows(frame, f.col(file.id).cast("string"), (Speaker(roles, lambda name: f.col(name).cast("string")),))

    def _read_topics(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the committed messages of topics, as consumers see them."""
        return self._make_rows(roles, lambda columns: self.log.topics(list(roles), columns))

    def _read_delivered(self, group: str, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the messages of topics that a consumer group was to handle."""
        found = delivered.broadcast_if_few(self.find_places(group))
        return self._make_rows(roles, lambda cs: delivered.read_messages(self.log, list(roles), sorted(cs), found))

    def read_versions(self, group: str, topic: str, role: Role) -> DataFrame:
        """Return the messages that were discarded or edited for a group → PLACE, ``_act``; ``id, message_id, digest``
        of the original; ``new_id, new_message_id, new_digest`` of the edited message, null if there is none."""
        roles = {topic: (role,)}
        columns = sorted({*self._list_needed(roles), "message_id", *delivered.PLACE})
        places = delivered.broadcast_if_few(self.find_places(group))
        old = self.log.topics([topic], columns).join(places, list(delivered.PLACE))
        given = {name: f.col(delivered.INSTEAD)[name] for name in delivered.CONTENT if name in columns}
        if "transaction_id" in columns:
            given["transaction_id"] = f.lit(None).cast("binary")
        new = old.withColumns(given)
        versions = [
            side.withColumns(dict(_list_made_columns(roles))).select(
                *delivered.PLACE,
                *([delivered.ACT] if not prefix else []),
                self.id.alias(f"{prefix}id"),
                _to_hex(f.col("message_id")).alias(f"{prefix}message_id"),
                make_witness(role, _message_cell)["digest"].alias(f"{prefix}digest"),
            )
            for prefix, side in (("", old), ("new_", new.where(f.col(delivered.ACT) == "edit")))
        ]
        return versions[0].join(versions[1], list(delivered.PLACE), "left")

    @property
    def _id_columns(self) -> list[str]:
        """The columns from which :attr:`id` is made, and the topic."""
        return ["topic", "key", *(["message_id"] if self._manifest.ids else [])]

    @property
    def id(self) -> Column:
        """The id of a message, from the column that the manifest names for its topic."""
        others = [topic for topic, id in self._manifest.ids.items() if id == "message_id"]
        own = f.col("key")
        return f.when(f.col("topic").isin(*others), _to_hex(f.col("message_id"))).otherwise(own) if others else own

    def _list_needed(self, roles: Mapping[str, tuple[Role, ...]]) -> set[str]:
        """Return the columns of format "escrow" that these roles need. Fields are in the body."""
        own = {name.removeprefix(_STORED) for name in _list_used(roles)}
        return {*self._id_columns} | {name if name in MESSAGE_COLUMNS else "body" for name in own}

    def _read_halves(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the half messages whose transaction committed."""
        wanted = f.col("state") == "committed"
        return self._make_rows(roles, lambda columns: self.log.half({*columns, "state"}).where(wanted))

    def _make_rows(self, roles: Mapping[str, tuple[Role, ...]], read: Callable[[Collection[str]], DataFrame]) -> Rows:
        """Return the rows of messages; ``read`` reads some of their columns."""
        speakers = tuple(Speaker(its, _message_cell, f.col("topic") == name) for name, its in roles.items())
        frame, slim = read(self._list_needed(roles)), read(self._id_columns)
        return Rows(frame, self.id, speakers, _list_made_columns(roles), slim)


def compared_columns(comparison: Comparison) -> tuple[str, ...]:
    """Return the columns of a comparison: in their stored form between two sides of messages, else as text."""
    # Between two sides of messages the stored form is enough, and cheaper than text.
    between_messages = all(side.startswith(("topic:", "half:", "group:")) for side in comparison.sides)
    stored = MESSAGE_COLUMNS if between_messages else ()
    return tuple(_STORED + name if name in stored else name for name in comparison.columns)


def is_unique(read: SqlRead, column: str) -> bool:
    """Return whether no two rows of a read can have the same text in ``column``: a unique index or primary key covers
    it, and all its values there have one type, text or integer."""
    with engines.opened(read.url) as engine, engine.connect() as connection:
        indexed = _find_unique_index(connection, read.table, {column, *(name for name, _, _ in read.where)})
        if indexed is None:
            return False
        for name in indexed:  # 1 and '1', or two nulls, are different to an index
            value: sa.ColumnClause[Any] = sa.column(name)
            types = sa.select(sa.func.typeof(value)).select_from(sa.table(read.table)).distinct()
            kinds = set(connection.scalars(types))
            if len(kinds) > 1 or not kinds <= {"text", "integer"}:
                return False
    return True


def _find_unique_index(connection: sa.Connection, table: str, within: set[str]) -> list[str] | None:
    """Return the columns of a unique index, or of a row id, that has only columns of ``within``; None if there is
    none."""
    listed = 'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial'
    for (index,) in connection.exec_driver_sql(listed, (table,)).all():
        names = list(connection.exec_driver_sql("SELECT name FROM pragma_index_info(?)", (index,)).scalars())
        if within.issuperset(names):  # a null stands for an expression
            return names
    keys = "SELECT name, upper(type) FROM pragma_table_info(?) WHERE pk"
    found = connection.exec_driver_sql(keys, (table,)).all()
    if len(found) == 1 and found[0][1] == "INTEGER" and found[0][0] in within:
        return [found[0][0]]
    return None


def _list_columns(roles: Sequence[Role]) -> list[str]:
    return sorted({name for role in roles for name in role.columns})


def _make_cell(columns: Sequence[str]) -> Cell:
    """Return a function that finds a cell of a table row. ``columns`` are the id, which may occur again, and the
    others."""
    return lambda name: f.col(CELLS)[columns.index(name, 1)]


def _list_used(roles: Mapping[str, tuple[Role, ...]]) -> set[str]:
    return {name for its in roles.values() for name in _list_columns(its)}


def _list_made_columns(roles: Mapping[str, tuple[Role, ...]]) -> dict[str, Column]:
    """Return the columns that are computed once per row, from which the cells of these roles are made."""
    used = _list_used(roles)
    made = {f"_{name}": _OWN[name]() for name in used if name in _OWN}
    if fields := sorted(used - _OWN.keys()):
        shape = StructType([StructField(name, StringType()) for name in fields])
        made[_BODY] = f.from_json(f.col("body").cast("string"), shape)
    return made


def _message_cell(name: str) -> Column:
    """Return a column of a message, or else a field of its JSON body, as text."""
    return f.col(f"_{name}") if name in _OWN else f.col(_BODY)[name]


def _sort_properties() -> Column:
    """Return the properties in a fixed order. Few rows need sorting."""
    entries = f.map_entries(f.col("properties"))
    return f.when(f.size("properties") > 1, f.sort_array(entries)).otherwise(entries)


def _to_hex(column: Column) -> Column:
    return f.lower(f.hex(column))


def _format_transaction() -> Column:
    """Format the 16 bytes of a transaction id as ``str(TransactionId)`` does: SHARD-EPOCH-POSITION, hexadecimal."""
    digits = _to_hex(f.col("transaction_id"))
    epoch, position = (
        f.regexp_replace(f.substring(digits, start, size), "^0+(?=.)", "") for start, size in ((9, 8), (17, 16))
    )
    return f.concat(f.substring(digits, 1, 8), f.lit("-"), epoch, f.lit("-"), position)


_STORED = "stored "
_OWN: dict[str, Callable[[], Column]] = {
    "message_id": lambda: _to_hex(f.col("message_id")),
    "transaction_id": _format_transaction,
    "tag": lambda: f.col("tag"),
    "properties": lambda: f.to_json(_sort_properties()),
    "body": lambda: f.col("body"),
    **{_STORED + name: partial(f.col, name) for name in MESSAGE_COLUMNS},
    _STORED + "properties": _sort_properties,
}
"""MESSAGE_COLUMNS, each as it is compared: with tables as text, and between messages as it is stored."""
