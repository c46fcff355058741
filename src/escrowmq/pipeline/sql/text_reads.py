"""Reads of a table as canonical text, or as checksums of it, in ranges of its keys, from any database.

Each range is one query, and its rows are streamed in batches: neither a process nor the driver ever holds a table.
With the extra ``adbc``, rows of PostgreSQL come as Arrow, at a sixth of the processor time of a cursor, and those of
SQLite that are summed, or searched for some windows, at a third. Imports no Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.pipeline.sql import arrow_reads, texts
from escrowmq.pipeline.sql.id_windows import NO_ID, SAMPLED_OF, find_window
from escrowmq.pipeline.sql.summing import SUM_KINDS, WindowSums, find_windows, make_columns, to_canonical
from escrowmq.pipeline.sql.tables import BATCH_ROWS, Bounds, check_there, even_cuts, reflect, safe_url

_DIALECTS = ("sqlite", "postgresql", "mariadb", "mysql")
_PAGE_BYTES = 8192
_ROW_BYTES = 100  # a guess, on which only the size of ranges depends
_FILE = "SELECT file FROM pragma_database_list, pragma_encoding WHERE seq = 0 AND encoding = 'UTF-8'"
_MOST_FOUND = 2 * BATCH_ROWS
"""Up to so many rows of a range are fetched by their row ids."""


@dataclass(frozen=True, slots=True)
class Text:
    """A column that is read as text of a kind, see :mod:`escrowmq.pipeline.sql.texts`; ``native`` is its own kind."""

    name: str
    native: str
    kind: str


@dataclass(frozen=True, slots=True)
class Sum:
    """A checksum over the id and some columns, by their numbers, for one side of a comparison."""

    comparison: int
    expected: bool
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class TextRead:
    """A read of ``columns``, of which the first is the id, of the rows of ``table`` at ``url`` whose columns equal the
    texts of ``where``. ``windows`` is the number of hash windows of ids, ``portable`` their kind (see
    :mod:`escrowmq.pipeline.audit.windows`); ``only`` limits the rows to some of them, and ``sample`` to so many of
    SAMPLED_OF parts of the ids. With ``sums``, checksums are read instead of rows, with ``is_summed_here`` computed
    from the rows, not by the database. ``inode``: see :func:`escrowmq.pipeline.sql.tables.check_there`."""

    url: str
    table: str
    columns: tuple[Text, ...]
    where: tuple[tuple[str, str, str], ...] = ()
    windows: int = 1
    portable: bool = True
    only: tuple[int, ...] | None = None
    sample: int | None = None
    sums: tuple[Sum, ...] = ()
    is_summed_here: bool = False
    inode: int | None = None

    def __repr__(self) -> str:
        return f"TextRead({safe_url(self.url)}, {self.table})"

    def ranges(self, rows: int) -> list[tuple[str, Bounds]]:
        """Return the ranges into which the table is cut, each as its key (a column, ``rowid`` or ``ctid``; "" for a
        single range) and bounds, with about ``rows`` rows per range."""
        with _connected(self.url) as connection:
            key = self._find_key(connection)
            if key is None:
                return [("", (None, None))]
            if key == "ctid":
                begins: Sequence[Any] = self._cut_pages(connection, rows)
            elif isinstance(lowest := self._find_lowest(connection, key), int):
                begins = self._cut_evenly(connection, key, lowest, rows)
            else:
                begins = list(self._walk(connection, key, lowest, rows))
            return [(key, bounds) for bounds in itertools.pairwise([None, *begins, None])]

    def batches(self, key: str, bounds: Bounds, *, keeps_integers: bool = False) -> Iterator[list[pa.Array]]:
        """Read the rows of a range of :meth:`ranges`; yield batches, each a list of Arrow arrays of texts, one per
        column. Invalid UTF-8 gets replacement characters. ``keeps_integers``: a column of integers may be one of
        int64."""
        check_there(self.url, self.inode)
        rows = self._find_rows(key, bounds)
        with _connected(self.url) as connection:
            dialect = connection.dialect.name
            query, values = self._select(connection, key, bounds, rows)
            if dialect == "postgresql":
                with suppress(arrow_reads.Refused):
                    plain = arrow_reads.render(connection, query, values)
                    yield from arrow_reads.fetch_postgres(connection.engine.url, plain)
                    return
            result: Any = connection.execution_options(yield_per=BATCH_ROWS).execute(sa.text(query), values)
            if dialect == "sqlite":  # the driver's own rows of bytes: nothing is made of them one by one
                result.cursor.connection.text_factory = bytes
                result = result.cursor
            while page := result.fetchmany(BATCH_ROWS):
                yield [_make_texts(column, keeps_integers) for column in zip(*page, strict=True)]

    def read_sums(self, key: str, bounds: Bounds) -> list[pa.Array]:
        """Return the checksums of a range: columns ``comparison, window, expected, rows, sum0, sum1``, one row per
        checksum and window that has rows."""
        lines = self._sum_here(key, bounds) if self.is_summed_here else self._sum_there(key, bounds)
        return make_columns(lines, SUM_KINDS)

    def _sum_here(self, key: str, bounds: Bounds) -> list[tuple[int, ...]]:
        try:
            return self._add(self._fetch_sqlite(key, bounds))
        except arrow_reads.Refused:
            return self._add(self.batches(key, bounds, keeps_integers=True))

    def _add(self, batches: Iterator[list[pa.Array]]) -> list[tuple[int, ...]]:
        """Return the sums of all rows of ``batches``: comparison, window, expected, rows, and both sums."""
        found = WindowSums(self.windows, len(self.sums), portable=self.portable)
        kinds = [column.kind for column in self.columns[1:]]
        sums = {n: [number - 1 for number in one.columns] for n, one in enumerate(self.sums)}
        for ids, *cells in batches:
            found.add(to_canonical(ids, "text"), list(zip(cells, kinds, strict=True)), sums)
        return [
            (one.comparison, window, int(one.expected), *values)
            for n, one in enumerate(self.sums)
            for _, window, *values in found.lines(n)
        ]

    def _find_rows(self, key: str, bounds: Bounds) -> list[int] | None:
        """Return the row ids of the rows of a range that are in the windows ``only``, if they are at most _MOST_FOUND
        and the table is one of SQLite that can be read as Arrow; otherwise None."""
        if self.only is None or key != "rowid":
            return None
        narrow = replace(self, columns=(self.columns[0], Text(key, "integer", "number")), only=None)
        found: list[int] = []
        with suppress(arrow_reads.Refused), closing(narrow._fetch_sqlite(key, bounds)) as batches:
            for ids, rows in batches:
                windows = find_windows(to_canonical(ids, "text"), self.windows, self.portable)
                found += rows.filter(pa.array(np.isin(windows, self.only))).to_pylist()
                if len(found) > _MOST_FOUND:
                    return None
            return found
        return None

    def _fetch_sqlite(self, key: str, bounds: Bounds) -> Generator[list[pa.Array]]:
        """Read the rows of a range as :meth:`batches`, with integers as int64, as Arrow. Raises Refused if that cannot
        be, perhaps after some batches."""
        check_there(self.url, self.inode)
        with _connected(self.url) as connection:  # closed before another SQLite opens the file
            has_rows = key == "rowid" and connection.dialect.name == "sqlite"
            if not has_rows or not (file := connection.scalar(sa.text(_FILE))):
                raise arrow_reads.Refused
            query = arrow_reads.render(connection, *self._select(connection, key, bounds))
        are_integers = [column.native in ("integer", "boolean") for column in self.columns]
        for columns in arrow_reads.fetch_sqlite(file, query, are_integers):
            yield [one if one.type == pa.int64() else _decode(one) for one in columns]

    def _sum_there(self, key: str, bounds: Bounds) -> Iterator[tuple[int, ...]]:
        with _connected(self.url) as connection:
            quote, dialect = _quoting(connection), connection.dialect.name
            cells = [texts.select_text(dialect, quote(c.name), c.native, c.kind) for c in self.columns]
            digests = [texts.digest(dialect, cells[0], [cells[n] for n in one.columns]) for one in self.sums]
            named = ", ".join(f"{digest} AS d{n}" for n, digest in enumerate(digests))
            window = f"{texts.window(dialect, cells[0], self.windows)} AS w"
            inner, values = self._make_query(quote, dialect, f"{window}, {named}", key, bounds)
            halves = [half for n in range(len(digests)) for half in texts.sum_halves(dialect, f"d{n}")]
            # OFFSET 0: otherwise PostgreSQL computes each digest once per use
            fence = " OFFSET 0" if dialect == "postgresql" else ""
            query = f"SELECT w, count(*), {', '.join(halves)} FROM ({inner}{fence}) AS rows_of_range GROUP BY w"
            found = [tuple(map(int, row)) for row in connection.execute(sa.text(query), values)]
        for n, one in enumerate(self.sums):
            for row in found:
                yield (one.comparison, row[0], int(one.expected), row[1], *row[2 + 2 * n : 4 + 2 * n])

    def count_ids(self, ids: Sequence[str]) -> int:
        """Return how many of these ids, given as texts, occur in the table's id column."""
        with _connected(self.url) as connection:
            quote, dialect, id = _quoting(connection), connection.dialect.name, self.columns[0]
            text = texts.select_exact(dialect, quote(id.name), id.native)
            query = f"SELECT count(DISTINCT {text}) FROM {quote(self.table)} WHERE {text} IN :ids"
            wanted = sa.text(query).bindparams(sa.bindparam("ids", list(ids), expanding=True))
            return int(connection.scalar(wanted) or 0)

    def _select(
        self, connection: sa.Connection, key: str, bounds: Bounds, rows: Sequence[int] | None = None
    ) -> tuple[str, Any]:
        """Return the SQL that reads the texts of a range, and the values of its parameters by name. ``rows`` as in
        :meth:`_make_query`."""
        quote, dialect = _quoting(connection), connection.dialect.name
        selected = [texts.select_text(dialect, quote(c.name), c.native, c.kind) for c in self.columns]
        return self._make_query(quote, dialect, ", ".join(selected), key, bounds, rows)

    def _make_query(
        self, quote: Any, dialect: str, selected: str, key: str, bounds: Bounds, rows: Sequence[int] | None = None
    ) -> tuple[str, Any]:
        """Return the SQL that reads the expressions ``selected`` of the rows of a range, and the values of its
        parameters by name. ``quote``: of :func:`_quoting`. ``rows``: the row ids of the rows that are in ``only``; None
        if they are not known."""
        conditions, values = [], {}
        for n, (name, native, text) in enumerate(self.where):
            conditions.append(f"{texts.select_exact(dialect, quote(name), native)} = :w{n}")
            values[f"w{n}"] = text
        for name, sign, bound in zip(("low", "high"), (">=", "<"), bounds, strict=True):
            if bound is not None and key == "ctid":
                conditions.append(f"ctid {sign} CAST(:{name} AS tid)")
                values[name] = f"({bound},0)"
            elif bound is not None:
                conditions.append(f"{quote(key)} {sign} :{name}")
                values[name] = bound
        id = texts.select_text(dialect, quote(self.columns[0].name), self.columns[0].native, self.columns[0].kind)
        if rows is not None:
            conditions.append(f"{quote(key)} IN ({', '.join(map(str, rows))})")
        if self.only is not None:  # of these rows, too: they may have changed since their ids were read
            window = texts.window(dialect, id, self.windows, self.portable)
            conditions.append(f"{window} IN ({', '.join(map(str, sorted(self.only)))})")
        if self.sample is not None:
            conditions.append(f"{texts.window(dialect, id, SAMPLED_OF)} < {self.sample}")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {selected} FROM {quote(self.table)}{where}", values

    def _find_key(self, connection: sa.Connection) -> str | None:
        """Return the column, or the address of rows (``rowid``, ``ctid``), by which ranges are cut; None for a single
        range."""
        dialect = connection.dialect.name
        if dialect == "sqlite":
            plain = "SELECT 1 FROM pragma_table_list WHERE name = ? AND type = 'table' AND NOT wr"  # wr: no row ids
            hidden = "SELECT 1 FROM pragma_table_xinfo(?) WHERE lower(name) = 'rowid'"  # behind a column of the user
            found = connection.exec_driver_sql(f"{plain} AND NOT EXISTS ({hidden})", (self.table, self.table)).first()
            return "rowid" if found else None
        same = {name for name, _, _ in self.where}
        keys = sa.inspect(connection).get_pk_constraint(self.table)["constrained_columns"]
        if usable := [str(key) for key in keys if key not in same]:
            return usable[0]
        if dialect != "postgresql":
            return None
        ordinary = sa.text("SELECT relkind = 'r' FROM pg_class WHERE oid = to_regclass(:name)")
        return "ctid" if connection.scalar(ordinary, {"name": _quoting(connection)(self.table)}) else None

    def _find_lowest(self, connection: sa.Connection, key: str) -> Any:
        return connection.scalar(sa.select(sa.func.min(sa.column(key))).select_from(sa.table(self.table)))

    def _cut_evenly(self, connection: sa.Connection, key: str, lowest: int, rows: int) -> list[int]:
        """Return the integer keys at which ranges begin, evenly spaced, with about ``rows`` rows each. Rows are
        counted, so that one distant key does not make many ranges."""
        column: sa.ColumnClause[Any] = sa.column(key)
        found = sa.select(sa.func.max(column), sa.func.count()).select_from(sa.table(self.table))
        highest, count = connection.execute(found).one()
        return even_cuts(lowest, highest, count, rows) if count else []

    def _cut_pages(self, connection: sa.Connection, rows: int) -> list[int]:
        size = sa.text("SELECT pg_relation_size(to_regclass(:name))")
        pages = connection.scalar(size, {"name": _quoting(connection)(self.table)}) // _PAGE_BYTES
        step = max(rows * _ROW_BYTES // _PAGE_BYTES, 1)
        return list(range(step, pages, step))

    def _walk(self, connection: sa.Connection, key: str, lowest: Any, rows: int) -> Iterator[Any]:
        """Yield the keys at which ranges of ``rows`` rows begin, after ``lowest``: each is found in the index from the
        one before."""
        column: sa.ColumnClause[Any] = sa.column(key)
        while lowest is not None:
            after = sa.select(column).select_from(sa.table(self.table)).where(column > lowest)
            if (lowest := connection.scalar(after.order_by(column).limit(1).offset(rows - 1))) is not None:
                yield lowest


def reflect_texts(url: str, table: str, columns: Sequence[str]) -> dict[str, str]:
    """Check that a table has ``columns``; return the native kind of every column of it by name. Raises as
    :func:`escrowmq.pipeline.sql.tables.check`."""
    dialect, found = reflect(url, table, columns)
    return {name: texts.find_native(type_, dialect) for name, type_ in found.items()}


def can_sum(url: str) -> bool:
    """Return whether the database at ``url`` computes checksums: MySQL, MariaDB, or PostgreSQL with the encoding
    UTF-8."""
    with _connected(url) as connection:
        if connection.dialect.name == "postgresql":
            return bool(connection.scalar(sa.text("SHOW server_encoding")) == "UTF8")
        return connection.dialect.name in ("mysql", "mariadb")


@contextmanager
def _connected(url: str) -> Iterator[sa.Connection]:
    """Context manager: a connection whose settings make texts independent of the server's configuration."""
    with engines.opened(url) as engine, engine.connect() as connection:
        if engine.dialect.name not in _DIALECTS:
            hint = ", ".join(_DIALECTS)
            raise Misuse(Code.BAD_URL, f"the audit does not read databases of kind {engine.dialect.name}", hint)
        for setting in texts.SETTINGS.get(engine.dialect.name, ()):
            connection.exec_driver_sql(setting)
        if engine.dialect.name == "sqlite":
            sqlite: Any = connection.connection.driver_connection
            sqlite.create_function(texts.WINDOW_FUNCTION, 3, _find_window, deterministic=True)
        yield connection


def _quoting(connection: sa.Connection) -> Any:
    """Return a function that quotes a name for use in ``sa.text``."""
    mark = connection.dialect.identifier_preparer.initial_quote
    return lambda name: f"{mark}{name.replace(mark, 2 * mark)}{mark}".replace(":", r"\:")


def _make_texts(column: Sequence[Any], keeps_integers: bool) -> pa.Array:
    """Return values of a driver as texts: texts, bytes of texts, or numbers of SQLite. ``keeps_integers``: a column of
    integers stays one."""
    try:
        if set(map(type, column)) <= _INTEGERS:
            integers = pa.array(column, pa.int64())
            return integers if keeps_integers else integers.cast(pa.utf8())
        return _decode(pa.array(column, pa.binary()))
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # of several types
        return pa.array([_make_text(value) for value in column], pa.utf8())


def _decode(column: pa.Array) -> pa.Array:
    """Return bytes as texts, with replacement characters for invalid UTF-8."""
    try:
        return column.cast(pa.utf8())
    except pa.ArrowInvalid:
        return pa.array([_make_text(value) for value in column.to_pylist()], pa.utf8())


_INTEGERS = {int, type(None)}


def _find_window(id: Any, count: int, portable: int) -> int:
    return find_window(NO_ID if id is None else _make_text(id) or "", count, bool(portable))


def _make_text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if value is None or isinstance(value, str) else repr(value)
