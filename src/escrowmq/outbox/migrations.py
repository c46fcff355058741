"""Making and upgrading the tables, step by step, by the version in ``trans_schema``.

Two ways, and a version row is kept either way: :func:`migrate` does it all, or Alembic does, with :data:`metadata` as
(a part of) its ``target_metadata`` and the texts of :func:`ddl` for what a comparison of tables cannot see: the version
and the lanes.

Version 0 is what ``metadata.create_all`` or Alembic's autogenerate leave: tables at most, without their rows. A step
says what it does in statements that do no harm when they are run again, so a step that was cut short is simply
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import schema
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles

from escrowmq.acts.chain import origin
from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.outbox.dialects import insert_if_absent
from escrowmq.outbox.tables import (
    BIG,
    ID,
    LANES,
    NAME,
    PLACE,
    SCHEMA_VERSION,
    content,
    metadata,
    trans_act,
    trans_act_head,
    trans_compensation,
    trans_compensation_case,
    trans_driven,
    trans_lane,
    trans_message,
    trans_recv_log,
    trans_schema,
)

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb")
PATIENCE = 60
"""Seconds that a migration waits for another process that is migrating."""

_LOCK = "escrowmq_migrate"
_LOCK_NUMBER = 0x65736372_6F776D71
_INDEX_EXISTS = 1061


def migrate(engine: sa.Engine | sa.Connection) -> int:
    """Create the tables, or upgrade them; the version that they had before (0: none). Idempotent; safe when several
    processes do it at once.

    With a Connection it works inside the caller's transaction where the database can (MariaDB and MySQL commit at every
    CREATE, and so does this there). Raises Misuse(SCHEMA_VERSION) if the tables are newer than this version of
    escrowmq.
    """
    if isinstance(engine, sa.Connection):
        return _upgrade(engine)
    if not isinstance(engine, sa.Engine):
        hint = "asynchronous engines: await outbox.aio.migrate(engine)"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not a SQLAlchemy engine or connection", hint)
    with _sqlite_alone(engine) if engine.dialect.name == "sqlite" else engine.begin() as connection:
        return _upgrade(connection)


def check_schema(connection: sa.Connection) -> None:
    """Raise Misuse(NO_TABLES) if the tables are not there, Misuse(SCHEMA_VERSION) if they are of another version.

    It never makes a statement fail, so the caller's transaction stays as it is.
    """
    found = _version(connection)
    if found is None:
        raise Misuse(Code.NO_TABLES)
    if found == 0:
        hint = "run `escrowmq outbox migrate` once; under Alembic execute the texts of outbox.ddl(...) too"
        raise Misuse(Code.SCHEMA_VERSION, "the tables have no version row: they were made, but not filled", hint)
    if found < SCHEMA_VERSION:
        text = f"the tables are of version {found}, older than this escrowmq, which has {SCHEMA_VERSION}"
        raise Misuse(Code.SCHEMA_VERSION, text, "run `escrowmq outbox migrate`, or outbox.migrate(engine)")
    if found > SCHEMA_VERSION:
        raise _newer(found)


def ddl(dialect_name: str, from_version: int = 0, to_version: int | None = None) -> list[str]:
    """Return the SQL texts that bring tables of ``from_version`` (0: none) to ``to_version`` (None: this one), the
    version row included.

    ``dialect_name``: sqlite, postgresql, mysql or mariadb. One statement per text, without a final semicolon.
    """
    last = SCHEMA_VERSION if to_version is None else to_version
    if dialect_name not in DIALECTS:
        raise Misuse(Code.BAD_ARGUMENT, f"no tables for {dialect_name!r}", f"one of {', '.join(DIALECTS)}")
    if not 0 <= from_version <= last <= SCHEMA_VERSION:
        raise Misuse(Code.BAD_ARGUMENT, f"no way from version {from_version} to {last}", f"0 to {SCHEMA_VERSION}")
    dialect = sa.create_mock_engine(f"{dialect_name}://", lambda *_, **__: None).dialect
    return [_text(statement, dialect) for statement in _path(dialect, from_version, last)]


def include_object(thing: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """For Alembic's ``context.configure(include_object=...)``: autogenerate leaves the indexes of these tables alone.

    They differ by database in a way that Alembic cannot compare; the texts of :func:`ddl` make them.
    """
    return not (kind == "index" and thing.table.name in metadata.tables)


# The steps


class AddColumn(schema.ExecutableDDLElement):
    """ALTER TABLE ... ADD COLUMN, without harm when it is there already where the database can say so."""

    def __init__(self, column: sa.Column[Any]) -> None:
        self.column = column

    def is_done(self, connection: sa.Connection) -> bool:
        """Return whether the column is there."""
        told = sa.inspect(connection).get_columns(self.column.table.name, schema=translated(connection))
        return any(column["name"] == self.column.name for column in told)


@compiles(AddColumn)
def _add_column(element: AddColumn, compiler: Any, **_: Any) -> str:
    careful = "IF NOT EXISTS " if compiler.dialect.name in ("postgresql", "mariadb") else ""
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {careful}{compiler.get_column_specification(element.column)}"


def _released(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, sa.MetaData(), *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")


_RELEASED = {
    "trans_recv_log": _released(
        "trans_recv_log",
        sa.Column("consumer_group", NAME, primary_key=True),
        sa.Column("message_id", ID, primary_key=True),
        sa.Column("seen_us", BIG, nullable=False),
    ),
    "trans_driven": _released(
        "trans_driven",
        sa.Column("id", ID, primary_key=True),
        sa.Column("producer_group", NAME, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("shard", BIG),
        sa.Column("transaction_id", ID),
        *content(),
        sa.Column("delay_us", BIG, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_us", BIG, nullable=False),
    ),
}
"""Tables as version 1 had them, where ``tables.py`` has them otherwise by now."""
_LATER = {3: (trans_compensation, trans_compensation_case), 4: (trans_act, trans_act_head)}
"""By version: the tables that it brought."""
_LISTED = ("trans_compensation_case_listed", "trans_driven_by_state", "trans_message_listed")
"""Indexes that version 4 brought."""


def _first(dialect: sa.Dialect) -> list[sa.Executable]:
    """0 → 1: everything that there was then."""
    later = {table for tables in _LATER.values() for table in tables}
    first = [table for table in metadata.tables.values() if table not in later]
    rows = [{"lane": lane, "epoch": 0, "leased_until_us": 0} for lane in range(LANES)]
    return [*_made(dialect, first), _insert_missing(dialect, trans_lane, rows)]


def _made(dialect: sa.Dialect, chosen: Sequence[sa.Table], listed: bool = False) -> list[sa.Executable]:
    """Return the statements that make some tables, then their indexes by name; with ``listed``, those alone that
    version 4 brought."""
    tables: list[sa.Executable] = []
    indexes: dict[str, sa.Executable] = {}

    def collect(statement: Any, *_: Any, **__: Any) -> None:
        if isinstance(statement, schema.CreateTable):
            table = _RELEASED.get(statement.element.name, statement.element)
            tables.append(schema.CreateTable(table, if_not_exists=True))
        elif isinstance(statement, schema.CreateIndex) and (str(statement.element.name) in _LISTED) == listed:
            # MySQL has no IF NOT EXISTS here: an index that is there already is passed over when the step is run
            made = schema.CreateIndex(statement.element, if_not_exists=dialect.name != "mysql")
            indexes[str(statement.element.name)] = made

    engine = sa.create_mock_engine(f"{dialect.name}://", collect)
    metadata.create_all(engine, tables=list(chosen), checkfirst=False)
    return [*(() if listed else tables), *(indexes[name] for name in sorted(indexes))]


def _second(_: sa.Dialect) -> list[sa.Executable]:
    """1 → 2: a mark knows the topic of its message, because the same id may name a message of each topic."""
    return [AddColumn(trans_recv_log.c.topic)]


def _third(dialect: sa.Dialect) -> list[sa.Executable]:
    """2 → 3: the tables of the compensation."""
    return _made(dialect, _LATER[3])


def _fourth(dialect: sa.Dialect) -> list[sa.Executable]:
    """3 → 4: the record of acts; a row that is STUCK says why; and lists of what waits are read from an index."""
    first = {"one": 1, "number": 0, "hash": origin(PLACE)}
    columns = [AddColumn(trans_driven.c.was), AddColumn(trans_driven.c.reason)]
    listed = _made(dialect, (trans_message, trans_driven, trans_compensation_case), listed=True)
    return [*_made(dialect, _LATER[4]), _insert_missing(dialect, trans_act_head, [first]), *columns, *listed]


STEPS: dict[int, Callable[[sa.Dialect], list[sa.Executable]]] = {1: _first, 2: _second, 3: _third, 4: _fourth}
"""The step *to* each version. A change of released tables is a new step; the tests keep the texts of each, and those of
released versions stay as they are (``_RELEASED``).
"""


def _path(dialect: sa.Dialect, found: int, last: int) -> Iterator[sa.Executable]:
    for version in range(found + 1, last + 1):
        yield from STEPS[version](dialect)
        yield _insert_missing(dialect, trans_schema, [{"one": 1, "version": version}])
        yield sa.update(trans_schema).where(trans_schema.c.one == 1).values(version=version)


def _insert_missing(dialect: sa.Dialect, table: sa.Table, rows: list[dict[str, Any]]) -> sa.Executable:
    """Insert those rows whose primary key is not there yet."""
    if dialect.name in ("mysql", "mariadb"):
        return mysql.insert(table).values(rows).prefix_with("IGNORE")  # as in the released text of version 1
    return insert_if_absent(dialect.name, table).values(rows)


def _upgrade(connection: sa.Connection) -> int:
    with _lock(connection):
        found = _version(connection) or 0
        if found > SCHEMA_VERSION:
            raise _newer(found)
        for statement in _path(connection.dialect, found, SCHEMA_VERSION):
            if isinstance(statement, AddColumn) and statement.is_done(connection):
                continue  # made whole by create_all, or a step that was cut short had made it
            try:
                connection.execute(statement)
            except DBAPIError as problem:
                # a step that was cut short had made this index
                if not isinstance(statement, schema.CreateIndex) or problem.orig.args[0] != _INDEX_EXISTS:  # type: ignore[union-attr]
                    raise
    return found


# One at a time


@contextmanager
def _lock(connection: sa.Connection) -> Iterator[None]:
    """No other process migrates meanwhile. On SQLite the transaction itself is the lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_NUMBER)))
        yield
    elif connection.dialect.name in ("mysql", "mariadb"):
        name = sa.func.concat(_LOCK, ".", sa.func.database())
        if connection.scalar(sa.select(sa.func.get_lock(name, PATIENCE))) != 1:
            raise Unknown(Code.TIMED_OUT, "another process has been migrating these tables for a minute")
        try:
            yield
            connection.exec_driver_sql("COMMIT")  # the next one must see the version
        finally:
            connection.scalar(sa.select(sa.func.release_lock(name)))
    else:
        yield


@contextmanager
def _sqlite_alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Yield a transaction that holds the write lock from its start: SQLite's driver would commit every CREATE by
    itself."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.begin()
        if connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
            connection.exec_driver_sql("ROLLBACK")  # a listener of the engine's has begun one that holds no lock
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            with suppress(DBAPIError):  # SQLite may have rolled it back already
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")


# What is there


def translated(connection: sa.Connection) -> str | None:
    """Return the database schema into which the connection translates table names (``schema_translate_map``)."""
    names = connection.get_execution_options().get("schema_translate_map") or {}
    return names.get(None)


def _version(connection: sa.Connection) -> int | None:
    """Return the version of the tables; 0: they have no version row; None: they are not there."""
    if not sa.inspect(connection).has_table(trans_schema.name, schema=translated(connection)):
        return None
    return connection.scalar(sa.select(trans_schema.c.version).where(trans_schema.c.one == 1)) or 0


def _newer(found: int) -> Misuse:
    text = f"the tables are of version {found}, newer than this escrowmq, which has {SCHEMA_VERSION}"
    return Misuse(Code.SCHEMA_VERSION, text, "upgrade escrowmq here; nothing was changed")


def _text(statement: sa.Executable, dialect: sa.Dialect) -> str:
    compiled = statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in str(compiled).strip().splitlines())
