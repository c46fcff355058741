"""Reads of queries as Arrow through ADBC, which makes no Python object of a value (extra ``adbc``); without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import sqlalchemy as sa

from escrowmq.pipeline.sql import texts
from escrowmq.pipeline.sql.tables import BATCH_ROWS


class Refused(Exception):
    """The query cannot be read as Arrow; a cursor reads any."""


def render(connection: sa.Connection, query: str, values: dict[str, Any]) -> str:
    """Return the query with its values as literals. Raises Refused if a value has no literal."""
    try:
        bound = sa.text(query).bindparams(**values)
        plain = str(bound.compile(connection, compile_kwargs={"literal_binds": True}))
    except sa.exc.CompileError:
        raise Refused from None
    return plain.replace("%%", "%") if connection.dialect.paramstyle in ("format", "pyformat") else plain


def fetch_postgres(url: sa.URL, query: str) -> Iterator[list[pa.Array]]:
    """Yield the result of a query in batches of columns. Raises Refused if the driver is not installed."""
    try:
        from adbc_driver_postgresql import dbapi
    except ImportError:
        raise Refused from None
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with dbapi.connect(address) as connection, connection.cursor() as cursor:
        for setting in texts.SETTINGS["postgresql"]:
            cursor.execute(setting)
        cursor.execute(query)
        for batch in cursor.fetch_record_batch():
            yield batch.columns


def fetch_sqlite(file: str, query: str, are_integers: Sequence[bool]) -> Iterator[list[pa.Array]]:
    """Yield the result of a query over a file in batches of columns, as integers (int64) or texts (binary) each. Raises
    Refused at a value of another type, which may be after some batches, and if the driver is not installed.

    No other connection of this process may have the file open: the driver brings a SQLite of its own, and when one
    SQLite closes a file, the locks of another in the process are lost.
    """
    try:
        import adbc_driver_manager as adbc
        from adbc_driver_sqlite import connect  # its module dbapi would load all of pyarrow.dataset
    except ImportError:
        raise Refused from None
    # The first batch decides the types, and its values are converted to them; those of later batches must have them.
    fixed = ", ".join("0" if is_integer else "x''" for is_integer in are_integers)
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {BATCH_ROWS}) SELECT i FROM n"
    try:
        with (
            connect(f"file:{quote(file)}?mode=rw") as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            statement.set_sql_query(f"SELECT {fixed} FROM ({numbers}) UNION ALL {query}")
            stream, _ = statement.execute_query()
            with pa.RecordBatchReader._import_from_c(stream.address) as batches:
                next(batches)
                for batch in batches:
                    yield batch.columns
    except (adbc.Error, OSError, pa.ArrowInvalid):
        raise Refused from None
