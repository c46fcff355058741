"""Readers of all sources of the audit. Each returns an id and the compared columns as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampType

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit import delivered
from escrowmq.pipeline.audit.frames import make_witness
from escrowmq.pipeline.audit.manifest import Comparison, Manifest, of_group
from escrowmq.pipeline.audit.parts.columns import can_sum_here, find_native, make_role
from escrowmq.pipeline.audit.parts.sample import is_sampled
from escrowmq.pipeline.audit.rows import Cell, Growth, Role, Rows, Speaker, once
from escrowmq.pipeline.audit.tables import TableSide, check_columns, read_tables
from escrowmq.pipeline.bodies import MESSAGE_COLUMNS
from escrowmq.pipeline.log import NO_STARTS, BrokerLog
from escrowmq.pipeline.log_rows import LogRead, LogRole, read_log
from escrowmq.pipeline.sql.canonical import canonical, to_micros
from escrowmq.pipeline.sql.summing import STORED
from escrowmq.wire import HALF_VIEW_NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BODY = "_fields"
"""The fields of a JSON body after parsing."""


class Readings:
    """All sides of one run. ``sample``: only so many ids, see :mod:`escrowmq.pipeline.audit.parts.sample`."""

    def __init__(self, spark: SparkSession, manifest: Manifest, log: BrokerLog, sample: int | None = None) -> None:
        self.spark = spark
        self._manifest = manifest
        self.sample = sample
        self.log = log
        self._places: dict[str, DataFrame] = {}
        self._natives: dict[str, dict[str, str | None]] = {}

    def close(self) -> None:
        """Release the cached frames of :meth:`find_places`."""
        for found in self._places.values():
            found.unpersist()
        self._places.clear()

    def find_places(self, group: str) -> DataFrame:
        """Return the places (shard, topic, queue, offset) whose message operators discarded or edited for a consumer
        group, see :func:`escrowmq.pipeline.audit.delivered.find_places`; cached until :meth:`close`."""
        if group not in self._places:
            self._places[group] = delivered.find_places(self.log, group).persist()
        return self._places[group]

    def read_rows(self, comparisons: Sequence[Comparison], *, whole: bool = False) -> list[Rows]:
        """Return the sides of these comparisons in few frames: at most two for all tables, one for all topics, one for
        all half messages, one for each consumer group and each file. ``whole``: not only the sample."""
        sample = None if whole else self.sample
        self._learn_types(comparisons)
        roles: dict[str, list[Role]] = {}
        for number, c in enumerate(comparisons):
            for side, is_expected in zip(c.sides, (True, False), strict=True):
                roles.setdefault(side, []).append(self.make_role(number, c, is_expected))
        of = {
            kind: {side.partition(":")[2]: tuple(its) for side, its in roles.items() if side.startswith(f"{kind}:")}
            for kind in ("table", "topic", "half", "group", "file")
        }
        keys = {role.comparison: role.columns for its in roles.values() for role in its}
        by_spark = sample is not None or not self.log.is_read_in_python
        here = {n for n, c in enumerate(comparisons) if not by_spark and can_sum_here(c, keys[n])}
        made = [self._read_file(name, its) for name, its in of["file"].items()]
        together = (("topic", self._read_topics), ("half", self._read_halves))
        made += self._read_tables(of["table"], sample, here) if of["table"] else []
        read = [(read(of[kind]), kind == "half", of[kind]) for kind, read in together if of[kind]]
        made += [rows if by_spark else self._read_in_python(rows, is_half, its, here) for rows, is_half, its in read]
        by_group: dict[str, dict[str, tuple[Role, ...]]] = {}
        for name, its in of["group"].items():
            group, topic = of_group(name)
            by_group.setdefault(group, {})[topic] = its
        made += [self._read_delivered(group, its) for group, its in by_group.items()]
        return made if sample is None else [_take_sample(rows, sample) for rows in made]

    def read_transactions(self) -> DataFrame:
        """Return the transactions of the topics, or of the sample, as :meth:`BrokerLog.transactions`."""
        return self.log.transactions(self._manifest.topics, self._hex_topics, self.sample)

    def _learn_types(self, comparisons: Sequence[Comparison]) -> None:
        """Look up and store the native kinds of the columns of all tables and files that are compared. Raises Misuse
        for a database, a table, a file or a column that is missing."""
        used: dict[str, set[str]] = {}
        for c in comparisons:
            for side in c.sides:
                used.setdefault(side, set()).update(c.named)
        for side, columns in used.items():
            kind, _, name = side.partition(":")
            if kind == "table":
                self._natives[side] = check_columns(self._manifest, name, columns)
            elif kind == "file":
                schema = self._open_file(name).schema
                self._natives[side] = {field.name: find_native(field.dataType) for field in schema.fields}

    def make_role(self, number: int, comparison: Comparison, is_expected: bool) -> Role:
        """Return the role of the expected side (``is_expected``) or the other side in the comparison with this number:
        its columns, each with the kind in which it is compared, and by how much values may differ. Requires the column
        types that :meth:`_learn_types` stores. Raises Misuse(BAD_ARGUMENT) for columns that cannot be compared so."""
        return make_role(self._manifest, number, comparison, is_expected, self._natives)

    def _read_in_python(
        self, rows: Rows, is_half: bool, roles: Mapping[str, tuple[Role, ...]], here: Collection[int]
    ) -> Rows:
        """Return ``rows`` of topics or half messages (``roles`` by topic) such that the processes that read them select
        windows, and compute the sums of the comparisons ``here``."""
        hex_ids = tuple(topic for topic in self._hex_topics if topic in roles)
        source = HALF_VIEW_NAME if is_half else ",".join(roles)
        needed = self._list_needed(roles) | ({"state"} if is_half else set())
        every = [LogRole(topic, r.comparison, r.expected, r.columns) for topic, its in roles.items() for r in its]
        planned = tuple(role for role in every if role.comparison in here)

        def select_windows(some: set[int], count: int, portable: bool) -> DataFrame:
            options = self.log.make_options(source) | {"columns": ",".join(sorted(needed))}
            found = read_log(self.spark, LogRead(options, hex_ids, count, portable, tuple(sorted(some))))
            return found.where(f.col("state") == "committed") if is_half else found

        def sum_windows(
            count: int, portable: bool, starts: Mapping[str, int] = NO_STARTS, limits: dict[str, int] | None = None
        ) -> DataFrame:
            options = self.log.make_options(source, starts)
            read = LogRead(options, hex_ids, count, portable, None, is_half, planned, limits)
            return read_log(self.spark, read)

        rows = replace(rows, select_windows=select_windows)
        return replace(rows, sum_windows=sum_windows, summed={r.comparison for r in planned}) if planned else rows

    def _read_tables(
        self, roles: Mapping[str, tuple[Role, ...]], sample: int | None, here: Collection[int]
    ) -> list[Rows]:
        """Return the rows of tables in at most two frames: tables of which a server computes checksums, and the others.
        ``roles``: by name of the table in the manifest. ``sample``: as of :class:`Readings`, None for all ids.
        ``here``: as of :func:`read_tables`."""
        sides = [
            TableSide.of(self._manifest, name, its, self._natives[f"table:{name}"], sample)
            for name, its in roles.items()
        ]
        groups = [[side for side in sides if side.summed is summed] for summed in (True, False)]
        return [read_tables(self.spark, group, here) for group in groups if group]

    def _open_file(self, name: str) -> DataFrame:
        """Return file ``name`` of the manifest as a frame: a Parquet file in the run folder, or at a URL that Spark
        knows. Raises Misuse(BAD_ARGUMENT) if it is missing."""
        path = self._manifest.files[name].path
        if "://" not in path:
            here = self._manifest.folder / path
            if not here.exists():
                raise Misuse(Code.BAD_ARGUMENT, f"{here} is missing")
            path = f"file:{here.resolve()}"  # the default file system of a cluster may be another one
        return self.spark.read.parquet(path)

    def _read_file(self, name: str, roles: tuple[Role, ...]) -> Rows:
        """Return the rows of file ``name`` of the manifest, as far as they meet its conditions."""
        file, frame = self._manifest.files[name], self._open_file(name)
        for column, value in file.where.items():
            frame = frame.where(f.col(column).cast("string") == value)

        def make_text(key: str) -> Column:
            kind, _, column = key.partition(" ")
            type_ = frame.schema[column].dataType
            if kind == "time" and isinstance(type_, TimestampType):
                return to_micros(f.col(column))
            return _to_hex(f.col(column)) if isinstance(type_, BinaryType) else f.col(column).cast("string")

        keys = _list_used({name: roles})
        made = [{_name_cell(key): make_text(key) for key in keys}, _make_canonical(keys)]
        return Rows(once(frame), f.col(file.id).cast("string"), (Speaker(roles, _find_cell),), made)

    def _read_topics(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the visible messages of topics as one frame; ``roles`` by topic."""
        rows = self._make_rows(roles, lambda columns: self.log.topics(list(roles), columns))
        columns = self._list_needed(roles) | {"shard", "queue", "offset"}
        growth = Growth(tuple(roles), lambda starts: self.log.topics(list(roles), columns, starts))
        return replace(rows, growth=growth)

    def _read_delivered(self, group: str, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the messages of topics that a consumer group was to handle, as one frame; ``roles`` by topic."""
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
            _open(side, roles).select(
                *delivered.PLACE,
                *([delivered.ACT] if not prefix else []),
                self.id.alias(f"{prefix}id"),
                _to_hex(f.col("message_id")).alias(f"{prefix}message_id"),
                make_witness(role, _find_cell)["digest"].alias(f"{prefix}digest"),
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
        others, own = self._hex_topics, f.col("key")
        return f.when(f.col("topic").isin(*others), _to_hex(f.col("message_id"))).otherwise(own) if others else own

    @property
    def _hex_topics(self) -> list[str]:
        """The topics whose id is the message id, in hexadecimal."""
        return [topic for topic, id in self._manifest.ids.items() if id == "message_id"]

    def _list_needed(self, roles: Mapping[str, tuple[Role, ...]]) -> set[str]:
        """Return the columns of format "escrow" that must be read for these roles. A field of a JSON body needs
        ``body``."""
        own = {key.partition(" ")[2] for key in _list_used(roles)}
        return {*self._id_columns} | {name if name in MESSAGE_COLUMNS else "body" for name in own}

    def _read_halves(self, roles: Mapping[str, tuple[Role, ...]]) -> Rows:
        """Return the half messages of topics whose transaction committed, as one frame; ``roles`` by topic."""
        wanted = f.col("state") == "committed"
        rows = self._make_rows(roles, lambda columns: self.log.half({*columns, "state"}).where(wanted))
        columns = self._list_needed(roles) | {"state", "shard", "position"}
        growth = Growth((HALF_VIEW_NAME,), lambda starts: self.log.half(columns, starts).where(wanted))
        return replace(rows, growth=growth)

    def _make_rows(self, roles: Mapping[str, tuple[Role, ...]], read: Callable[[Collection[str]], DataFrame]) -> Rows:
        """Return messages as the sides of these roles (by topic); ``read(columns)`` reads the messages."""
        speakers = tuple(Speaker(its, _find_cell, f.col("topic") == name) for name, its in roles.items())
        read_all, read_slim = partial(read, self._list_needed(roles)), partial(read, self._id_columns)
        return Rows(cache(read_all), self.id, speakers, _list_made_columns(roles), read_slim)


def _take_sample(rows: Rows, parts: int) -> Rows:
    """Return the rows of a sample. Databases select it themselves."""
    if rows.select_windows is not None:
        return rows
    is_in = is_sampled(rows.known_id, parts)
    read_slim = None if rows.read_slim is None else partial(_filter, rows.read_slim, is_in)
    growth = rows.growth
    if growth is not None:
        growth = Growth(growth.sources, partial(_filter, growth.read, is_in))
    return replace(rows, read=cache(partial(_filter, rows.read, is_in)), read_slim=read_slim, growth=growth)


def _filter(read: Callable[..., DataFrame], is_in: Column, *given: Any) -> DataFrame:
    return read(*given).where(is_in)


def show_cell(key: str, cell: Cell) -> Column:
    """Return the text, for display, of the value of a key (kind and column name). ``cell`` finds the column of a
    key."""
    kind, _, name = key.partition(" ")
    return (_OWN[name]() if kind == STORED else cell(key)).cast("string")


def _list_used(roles: Mapping[str, tuple[Role, ...]]) -> set[str]:
    return {key for its in roles.values() for role in its for key in role.columns}


def _open(frame: DataFrame, roles: Mapping[str, tuple[Role, ...]]) -> DataFrame:
    return Rows(once(frame), f.col("key"), (), _list_made_columns(roles)).open(frame)


def _list_made_columns(roles: Mapping[str, tuple[Role, ...]]) -> list[dict[str, Column]]:
    """Return the columns that are computed once per row, in steps: the fields of the body, plain texts, canonical
    texts."""
    used = _list_used(roles)
    names = {key.partition(" ")[2] for key in used}
    fields = sorted(names - _OWN.keys())
    shape = StructType([StructField(name, StringType()) for name in fields])
    parsed = {_BODY: f.from_json(f.col("body").cast("string"), shape)} if fields else {}
    return [parsed, {_name_cell(key): _make_text(key) for key in used}, _make_canonical(used)]


def _make_canonical(keys: Collection[str]) -> dict[str, Column]:
    """Return Spark columns that convert the plain texts of ``keys`` to canonical texts, under the same names."""
    kinds = {_name_cell(key): key.partition(" ")[0] for key in keys}
    return {name: canonical(name, kind) for name, kind in kinds.items() if kind not in (STORED, "text")}


def _name_cell(key: str) -> str:
    return f"_{key}"


def _find_cell(key: str) -> Column:
    """Return the column of a message or file row that has the text of a key (kind and column name)."""
    return f.col(f"`{_name_cell(key)}`")


def _make_text(key: str) -> Column:
    kind, _, name = key.partition(" ")
    if kind == STORED:
        return _sort_properties() if name == "properties" else f.col(name)
    if name == "body" and kind in ("bytes", "uuid"):
        return _to_hex(f.col(name))
    text = _OWN[name]() if name in _OWN else f.col(_BODY)[name]
    return text.cast("string") if kind != "text" else text


def _sort_properties() -> Column:
    """Return the properties of a message as an array of entries in a fixed order. Few rows need sorting."""
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


_OWN: dict[str, Callable[[], Column]] = {
    "message_id": lambda: _to_hex(f.col("message_id")),
    "transaction_id": _format_transaction,
    "tag": lambda: f.col("tag"),
    "properties": lambda: f.to_json(_sort_properties()),
    "body": lambda: f.col("body"),
}
"""MESSAGE_COLUMNS, each as it is compared with tables."""
