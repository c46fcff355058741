"""SQL over topics and system views: DuckDB reads the rows as Arrow, and only the columns that a query needs.

Needs the extra ``sql``. Every query has a database of its own, in memory, that reads no files and changes nothing.
Tables have the columns of format "escrow", with times in UTC without a zone (DuckDB would load an extension for zones):
topics, ``"%half"`` and the other system views, and ``"group:GROUP/TOPIC"``, the messages of a topic that a consumer
group was to handle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.spark import brokers, columns
from escrowmq.spark.options import ReadOptions, absolute, read_options
from escrowmq.spark.planning import OffsetRange, first_offsets, last_offsets, ranges
from escrowmq.wire import GROUP_ACT_VIEW_NAME

_SIDE = "group:"
MEMORY = "2GB"
"""The most that a query holds in memory, for sorting, grouping and joining. Its result is streamed."""
BATCH_ROWS = 8192
_CONFIG: dict[str, Any] = {
    **{"enable_external_access": False, "python_enable_replacements": False},
    **{"memory_limit": MEMORY, "temp_directory": ""},  # nothing is written
}
_QUOTES = 'names with other characters than letters, digits and _ stand in "double quotes"'
_SHOW_SCANS = "SET disabled_optimizers = 'filter_pushdown,statistics_propagation,empty_result_pullup'"
"""With these, a plan over empty tables has a scan of each table, with all columns that the query needs of it."""
_DELIVERED = """
CREATE VIEW {side} AS
WITH acts AS (SELECT * FROM "{acts}" WHERE "group" = {group} AND topic = {topic}),
settled AS (
  SELECT shard, queue, "offset", arg_max(act, position) AS act, max(position) AS at,
    arg_max(struct_pack({packed}), position) FILTER (act = 'edit') AS instead
  FROM acts WHERE act IN ('discard', 'edit') GROUP BY ALL),
standing AS (
  SELECT *, act = 'discard' AND NOT EXISTS (
    SELECT 1 FROM acts r WHERE r.act = 'reset' AND r.shard = s.shard AND r.queue = s.queue AND r.position > s.at
      AND r."offset" <= s."offset") AS is_gone
  FROM settled s)
SELECT t.* REPLACE ({replaced}, CASE WHEN e.instead IS NULL THEN t.transaction_id END AS transaction_id)
FROM {source} t LEFT JOIN standing e ON t.shard = e.shard AND t.queue = e.queue AND t."offset" = e."offset"
WHERE e.is_gone IS NOT TRUE
"""
"""The rules are those of escrowmq.pipeline.audit.delivered."""


@dataclass
class _Source:
    """A topic or system view at one moment, which DuckDB can read several times, through ``__arrow_c_stream__``."""

    options: ReadOptions
    found: list[OffsetRange]
    chosen: list[columns.Column]
    problem: EscrowError | None = None

    @property
    def schema(self) -> pa.Schema:
        """The chosen columns in Arrow."""
        return columns.arrow_schema(self.chosen)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.RecordBatchReader.from_batches(self.schema, self._read()).__arrow_c_stream__(requested_schema)

    def _read(self) -> Iterator[pa.RecordBatch]:
        options, schema = self.options, self.schema
        wanted = columns.wire_columns(options.first_source, self.chosen)
        try:
            for one in self.found:
                for batch in brokers.read(one, wanted, {}, options.timeout, options.token_file):
                    yield columns.as_spark(batch, self.chosen, one.partition.shard, schema)
        except EscrowError as problem:
            self.problem = problem
            raise


def query(url: str, sql: str, options: Mapping[str, str] | None = None) -> pa.Table:
    """Return the whole result of :func:`stream`, in memory. Raises as that."""
    with stream(url, sql, options) as found:
        return found.read_all()


@contextmanager
def stream(url: str, sql: str, options: Mapping[str, str] | None = None) -> Iterator[pa.RecordBatchReader]:
    """Context manager: the result of one SELECT over the brokers or the folder at ``url``, in batches. ``options`` are
    those of format "escrow": timeout, tokenFile. Raises UNKNOWN_TOPIC, Misuse(BAD_ARGUMENT) with DuckDB's words for
    anything but a SELECT that it can run, also for one that needs more than MEMORY, and the errors of reading."""
    given = {**(options or {}), "url": absolute(url)}
    sources: dict[str, _Source] = {}
    try:
        with duckdb.connect(config={**_CONFIG}) as database:
            tables = _list_tables(database, sql)
            views = sorted(name for name in tables if name.startswith(_SIDE))
            names = tables.difference(views).union(*map(_list_needed, views))
            sources, unknown = _plan(names, given)
            try:
                _choose_columns(sources, views, sql)
            except duckdb.CatalogException:
                if unknown:
                    raise unknown[0] from None
                raise
            for name, source in sources.items():
                database.register(name, source)
            _create_views(database, views)
            yield database.execute(sql).to_arrow_reader(BATCH_ROWS)
    except (duckdb.Error, OSError, pa.ArrowException) as problem:  # in a later batch Arrow raises DuckDB's errors
        if isinstance(problem, OSError) and problem.errno is not None:  # an error of the caller
            raise
        if failed := next((one.problem for one in sources.values() if one.problem), None):
            raise failed from problem
        hint = _QUOTES if isinstance(problem, duckdb.CatalogException) else ""
        text = str(problem).partition("\n\n")[0].strip()
        if "Out of Memory" in text:
            hint = f"a query may use {MEMORY}: name fewer columns, or select with WHERE before sorting and joining"
        raise Misuse(Code.BAD_ARGUMENT, text, hint) from None


def _list_tables(database: duckdb.DuckDBPyConnection, sql: str) -> set[str]:
    """Return all names of tables in a SELECT; some may be those of its own parts. Raises Misuse(BAD_ARGUMENT)."""
    [(text,)] = database.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    parsed = json.loads(text)
    if parsed.get("error_type") == "parser":
        raise Misuse(Code.BAD_ARGUMENT, parsed["error_message"], _QUOTES)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise Misuse(Code.BAD_ARGUMENT, "not one SELECT", "a query at a time, and it changes nothing")
    return {node["table_name"] for node in _walk(parsed["statements"]) if node.get("type") == "BASE_TABLE"}


def _list_needed(view: str) -> tuple[str, str]:
    """Return the sources of a side ``group:GROUP/TOPIC``. Raises Misuse(BAD_ARGUMENT)."""
    group, _, topic = view.removeprefix(_SIDE).partition("/")
    if not group or not topic:
        raise error(Code.BAD_ARGUMENT, f"{view!r} names no group and topic", 'such as "group:cart/orders"')
    return topic, GROUP_ACT_VIEW_NAME


def _plan(names: Iterable[str], given: Mapping[str, str]) -> tuple[dict[str, _Source], list[EscrowError]]:
    """Return the sources with these names, and an error for each name without one, which may be a name of the query
    itself."""
    sources: dict[str, _Source] = {}
    unknown: list[EscrowError] = []
    with brokers.opened(given["url"], given.get("tokenFile")) as links:
        for name in sorted(names):
            try:
                options = read_options({**given, "topic": name})
                chosen = columns.choose(name, None)
                there = brokers.topic_partitions(links, options)
            except EscrowError as problem:
                if problem.code not in (Code.UNKNOWN_TOPIC, Code.BAD_TOPIC_NAME, Code.BAD_SETTING):
                    raise
                unknown.append(problem)
            else:
                found = ranges(there, first_offsets(there, options.start), last_offsets(there, options.end))
                sources[name] = _Source(options, found, chosen)
    return sources, unknown


def _choose_columns(sources: Mapping[str, _Source], views: Iterable[str], sql: str) -> None:
    """Leave in each source the columns that the query needs, which the plan of DuckDB says."""
    with duckdb.connect(config={**_CONFIG}) as scratch:
        for name, source in sources.items():
            empty = source.schema.empty_table()
            scratch.register("empty", empty)
            scratch.execute(f"CREATE TABLE {_quote(name)} AS FROM empty")
            scratch.unregister("empty")
        _create_views(scratch, views)
        scratch.execute(_SHOW_SCANS)
        row = scratch.execute(f"EXPLAIN (FORMAT json) {sql}").fetchone()
    needed: dict[str, set[str]] = {}
    for scan in _walk(json.loads(row[1] if row else "[]")):
        if "Table" in scan:
            wanted = scan["Projections"]
            needed.setdefault(scan["Table"], set()).update([wanted] if isinstance(wanted, str) else wanted)
    for name, source in sources.items():
        for table in (f"memory.main.{name}", f"memory.main.{_quote(name)}"):
            if table in needed:  # one that is not scanned is only described
                chosen = [
                    one for one in source.chosen if _quote(one.name) in needed[table] or one.name in needed[table]
                ]
                source.chosen = chosen or [one for one in source.chosen if one.name == "shard"]


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _walk(one)


def _create_views(database: duckdb.DuckDBPyConnection, views: Iterable[str]) -> None:
    content = ("key", "tag", "properties", "body", "message_id")
    replaced = ", ".join(
        f"CASE WHEN e.instead IS NULL THEN t.{name} ELSE e.instead.{name} END AS {name}" for name in content
    )
    packed = ", ".join(f"{name} := {name}" for name in content)
    for view in views:
        group, _, topic = view.removeprefix(_SIDE).partition("/")
        words = {
            "side": _quote(view),
            "source": _quote(topic),
            "acts": GROUP_ACT_VIEW_NAME,
            "replaced": replaced,
            "packed": packed,
        }
        database.execute(_DELIVERED.format(**words, group=_text(group), topic=_text(topic)))


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
