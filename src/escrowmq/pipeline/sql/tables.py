"""Reads of a database table: its columns, its key ranges, and the rows of a range as Arrow batches. Imports no Spark.

The ranges begin before the first key and end after the last, so rows that are inserted between planning and reading are
read, too. Each range is one query, so the whole is not a snapshot of one moment.

URLs may contain passwords: every URL that is shown or logged goes through :func:`safe_url`.
"""

from __future__ import annotations

import itertools
import operator
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.platform.listening import shown_address

BATCH_ROWS = 8192
_AS_URI = "file:"

Where = tuple[str, str, str | int | bool]
"""A column, one of ``= != < <= > >=``, and a value. A read's conditions must all hold."""
Bounds = tuple[Any, Any]
"""Keys from the first (None: from the beginning) to before the second (None: to the end)."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _to_time(value: Any) -> datetime:
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Kind:
    """A column type in Spark and Arrow, and how a driver's value becomes one of it."""

    spark: str
    arrow: pa.DataType
    make: Callable[[Any], Any]


_KINDS: tuple[tuple[type[Any], Kind], ...] = (
    (sa.Boolean, Kind("BOOLEAN", pa.bool_(), bool)),
    (sa.Integer, Kind("BIGINT", pa.int64(), int)),
    (sa.Float, Kind("DOUBLE", pa.float64(), float)),
    (sa.Numeric, Kind("DECIMAL(38,9)", pa.decimal128(38, 9), lambda value: Decimal(str(value)))),
    (sa.DateTime, Kind("TIMESTAMP", pa.timestamp("us", tz="UTC"), _to_time)),
    (sa.LargeBinary, Kind("BINARY", pa.binary(), bytes)),
)
_TEXT = Kind("STRING", pa.utf8(), str)
KINDS = {kind.spark.lower(): kind for kind in (*(kind for _, kind in _KINDS), _TEXT)}
"""By Spark's simple name of the type."""


@dataclass(frozen=True, slots=True, repr=False)
class SqlRead:
    """A read of ``columns`` of the rows of ``table`` at ``url`` that meet all of ``where``, in ranges of the first
    column of the primary key. ``inode``: see :func:`check_there`."""

    url: str
    table: str
    columns: tuple[str, ...]
    where: tuple[Where, ...] = ()
    inode: int | None = None

    def __repr__(self) -> str:
        return f"SqlRead({safe_url(self.url)}, {self.table})"

    def check(self) -> dict[str, str]:
        """Check that the table has the columns of this read; return the Spark type of every column of the table by
        name. Raises as :func:`check`."""
        return check(self.url, self.table, (*self.columns, *(name for name, _, _ in self.where)))

    def ranges(self, rows: int) -> list[tuple[str, Bounds]]:
        """Return the ranges into which the table is cut, each as the name of the key column and its bounds: about
        ``rows`` matching rows per range. Raises Misuse(BAD_ARGUMENT) for a table without a primary key."""
        with engines.opened(self.url) as engine, engine.connect() as connection:
            if keys := sa.inspect(connection).get_pk_constraint(self.table)["constrained_columns"]:
                key, begins = str(keys[0]), self._find_quantiles(connection, keys[0], rows)
            else:
                raise Misuse(Code.BAD_ARGUMENT, f"{self} has no primary key", "a table is read in ranges of it")
        return [(key, bounds) for bounds in itertools.pairwise([None, *begins, None])]

    def batches(self, key: str, bounds: Bounds, kinds: Sequence[Kind]) -> Iterator[list[pa.Array]]:
        """Read the rows of a range of :meth:`ranges`; yield batches, each a list of Arrow arrays of these ``kinds``,
        one per column."""
        query = self._make_query(*self.columns)
        for bound, comparison in zip(bounds, (">=", "<"), strict=True):
            if bound is not None:
                query = query.where(_OPERATORS[comparison](sa.column(key), bound))
        check_there(self.url, self.inode)
        with engines.opened(self.url) as engine, engine.connect() as connection:
            for page in connection.execution_options(yield_per=BATCH_ROWS).execute(query).partitions(BATCH_ROWS):
                named = zip(self.columns, kinds, zip(*page, strict=True), strict=True)
                yield [self._make_array(*one) for one in named]

    def _make_query(self, *columns: str) -> sa.Select[Any]:
        query: Any = sa.select(*(sa.column(name) for name in columns)).select_from(sa.table(self.table))
        limited: sa.Select[Any] = query.where(
            *(_OPERATORS[sign](sa.column(name), value) for name, sign, value in self.where)
        )
        return limited

    def _find_quantiles(self, connection: sa.Connection, key: str, rows: int) -> list[Any]:
        """Return the keys at which ranges of ``rows`` matching rows begin, without the first."""
        number = sa.func.row_number().over(order_by=sa.column(key)).label("n")
        counted = self._make_query(key).add_columns(number).subquery()
        first = sa.select(counted.c[0]).where((counted.c.n - 1) % rows == 0).order_by(counted.c.n)
        return list(dict.fromkeys(connection.scalars(first)))[1:]

    def _make_array(self, name: str, kind: Kind, values: Sequence[Any]) -> pa.Array:
        try:
            return pa.array([None if value is None else kind.make(value) for value in values], kind.arrow)
        except (TypeError, ValueError, ArithmeticError) as problem:  # SQLite's columns hold any type
            what = f"{self}: column {name!r} holds something that is no {kind.spark}: {problem}"
            raise Misuse(Code.BAD_ARGUMENT, what) from None


def even_cuts(lowest: int, highest: int, rows: int, size: int) -> list[int]:
    """Return where to cut the key values ``lowest`` .. ``highest`` so that each part has about ``size`` of the ``rows``
    rows. Parts are even in key values, not in rows: gaps make some smaller, but one distant value cannot produce a
    million parts."""
    step = -(-(highest - lowest + 1) // -(-rows // size))
    return list(range(lowest, highest + 1, step))[1:]


def check(url: str, table: str, columns: Sequence[str]) -> dict[str, str]:
    """Check that a table has ``columns``; return the Spark type of every column of it by name. Raises
    Misuse(BAD_ARGUMENT) for a missing table or column, or a file that is no database; Misuse(BAD_URL); and
    Unknown(DISCONNECTED) if the database is unavailable."""
    return {name: _find_kind(type_).spark for name, type_ in reflect(url, table, columns)[1].items()}


def reflect(url: str, table: str, columns: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Check that a table has ``columns``; return the name of the database's dialect, and the SQLAlchemy type of every
    column of the table by name. Raises as :func:`check`."""
    check_there(url)
    with engines.opened(url) as engine, engine.connect() as connection:
        try:
            found = {one["name"]: one["type"] for one in sa.inspect(connection).get_columns(table)}
        except sa.exc.NoSuchTableError:
            raise Misuse(Code.BAD_ARGUMENT, f"{safe_url(url)} has no table {table!r}") from None
        except sa.exc.OperationalError:
            raise
        except sa.exc.DatabaseError as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"cannot read {safe_url(url)}: {problem.orig}") from None
    if lacking := [name for name in columns if name not in found]:
        what = f"table {table!r} of {safe_url(url)} has no column {', '.join(lacking)}"
        raise Misuse(Code.BAD_ARGUMENT, what, f"it has {', '.join(found)}")
    return engine.dialect.name, found


def readonly_url(file: Path) -> str:
    """Return the URL that opens a SQLite file read-only, even while it is in use."""
    # SQLAlchemy unquotes once, SQLite again
    return f"sqlite:///{_AS_URI}{quote(quote(str(file.absolute())))}?mode=ro&uri=true"


def absolute(url: str) -> str:
    """Return the URL with an absolute path if it names a SQLite file, because executors run in other working
    directories."""
    parsed = engines.open_engine(url).url
    if (file := _find_file(parsed)) is None or str(parsed.database).startswith(_AS_URI):
        return url
    return parsed.set(database=str(Path(file).absolute())).render_as_string(hide_password=False)


def inode(url: str) -> int | None:
    """Return the inode of a SQLite file; None for other databases, and for a missing file."""
    file = _find_file(sa.make_url(url))
    return None if file is None or not Path(file).is_file() else Path(file).stat().st_ino


def check_there(url: str, same: int | None = None) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a SQLite file that is missing on this machine, because SQLite would create an
    empty one. ``same`` is its :func:`inode` where it was first opened. A file with another inode is a different file
    that has the same path on this machine."""
    file = _find_file(sa.make_url(url))
    if file is None:
        return
    found, host = inode(url), socket.gethostname()
    rest = "on a cluster every worker must have the same file under this path; else use a database server"
    if found is None:
        raise Misuse(Code.BAD_ARGUMENT, f"{host} has no database {file}: {rest}")
    if same not in (None, found):
        raise Misuse(Code.BAD_ARGUMENT, f"{file} of {host} is another file than that of the driver: {rest}")


def safe_url(url: str) -> str:
    """Return a URL without its password, for display."""
    parsed = sa.make_url(url)
    file = _find_file(parsed)
    return shown_address(parsed.render_as_string(hide_password=False)) if file is None else f"sqlite:///{file}"


def _find_file(url: sa.URL) -> str | None:
    """Return the path of a SQLite file; None for other databases, and for one in memory."""
    name = url.database or ""
    if name.startswith(_AS_URI):
        name = unquote(name.removeprefix(_AS_URI))
    return None if url.get_backend_name() != "sqlite" or not name or name.startswith(":") else name


def _find_kind(found: Any) -> Kind:
    """Return the types in Spark and Arrow for a column type that SQLAlchemy reflected; unknown types are read as text.
    The BOOL of MariaDB is a TINYINT of width 1."""
    if getattr(found, "display_width", None) == 1:
        found = sa.Boolean()
    return next((kind for type_, kind in _KINDS if isinstance(found, type_)), _TEXT)
