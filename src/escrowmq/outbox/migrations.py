"""Creates and upgrades the tables, step by step, by the version in ``trans_schema``.

Two ways, both with a version row: :func:`migrate` does everything, or Alembic does, with :data:`metadata` as (a part
of) its ``target_metadata`` and the texts of :func:`ddl` for what a comparison of tables cannot see: the version and the
lanes.

Version 0 is the result of ``metadata.create_all`` or Alembic's autogenerate: tables at most, without their rows. The
statements of a step can be repeated without harm, so an interrupted step is simply repeated.
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
from escrowmq.outbox import tables
from escrowmq.outbox.dialects import insert_if_absent
from escrowmq.outbox.tables import SCHEMA_VERSION, metadata, trans_driven, trans_schema

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb")
PATIENCE = 60
"""Timeout (s) of the lock of concurrent migrations."""
_LOCK = "escrowmq_migrate"
_LOCK_NUMBER = 0x65736372_6F776D71
_INDEX_EXISTS = 1061


def migrate(engine: sa.Engine | sa.Connection) -> int:
    """Create the tables, or upgrade them; return their version before (0: none). Idempotent; safe in several processes
    at once.

    With a Connection it works inside the caller's transaction, except on MariaDB and MySQL, which commit at every
    CREATE. Raises Misuse(SCHEMA_VERSION) if the tables are newer than this version of escrowmq.
    """
    if isinstance(engine, sa.Connection):
        return _upgrade(engine)
    if not isinstance(engine, sa.Engine):
        hint = "asynchronous engines: await outbox.aio.migrate(engine)"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not a SQLAlchemy engine or connection", hint)
    with _sqlite_alone(engine) if engine.dialect.name == "sqlite" else engine.begin() as connection:
        return _upgrade(connection)


def check_schema(connection: sa.Connection) -> None:
    """Raise Misuse(NO_TABLES) if the tables are missing, Misuse(SCHEMA_VERSION) if they are of another version.

    No statement fails, so the caller's transaction stays usable.
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
    """Return the SQL texts that upgrade tables and version row of ``from_version`` (0: none) to ``to_version`` (None:
    this one).

    ``dialect_name``: sqlite, postgresql, mysql or mariadb. One statement per text, without a final semicolon.
    """
    last = SCHEMA_VERSION if to_version is None else to_version
    if dialect_name not in DIALECTS:
        raise Misuse(Code.BAD_ARGUMENT, f"no tables for {dialect_name!r}", f"one of {', '.join(DIALECTS)}")
    if not 0 <= from_version <= last <= SCHEMA_VERSION:
        raise Misuse(Code.BAD_ARGUMENT, f"no way from version {from_version} to {last}", f"0 to {SCHEMA_VERSION}")
    dialect = sa.create_mock_engine(f"{dialect_name}://", lambda *_, **__: None).dialect
    compiled = (
        statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})  # type: ignore[attr-defined]
        for statement in _path(dialect, from_version, last)
    )
    return ["\n".join(line.rstrip() for line in str(text).strip().splitlines()) for text in compiled]


def include_object(thing: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """Return False for the indexes of our tables, to exclude them from autogenerate: for Alembic's
    ``context.configure(include_object=...)``.

    They differ by database in a way that Alembic cannot compare; the texts of :func:`ddl` create them.
    """
    return not (kind == "index" and thing.table.name in metadata.tables)


# The steps


class AddColumn(schema.ExecutableDDLElement):
    """ALTER TABLE ... ADD COLUMN, with IF NOT EXISTS where the database supports it."""

    def __init__(self, column: sa.Column[Any]) -> None:
        self.column = column

    def is_done(self, connection: sa.Connection) -> bool:
        """Return whether the column exists."""
        columns = sa.inspect(connection).get_columns(self.column.table.name, schema=translated(connection))
        return any(column["name"] == self.column.name for column in columns)


@compiles(AddColumn)
def _add_column(element: AddColumn, compiler: Any, **_: Any) -> str:
    condition = "IF NOT EXISTS " if compiler.dialect.name in ("postgresql", "mariadb") else ""
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {condition}{compiler.get_column_specification(element.column)}"


_ADDED = {2: (tables.trans_recv_log.c.topic,), 4: (trans_driven.c.was, trans_driven.c.reason)}
"""Columns that a version added: a mark has the topic of its message, because an id may name a message of each topic; a
STUCK row has its reason."""
_LATER = {3: (tables.trans_compensation, tables.trans_compensation_case), 4: (tables.trans_act, tables.trans_act_head)}
"""Tables that a version added: of the compensation; the record of operator actions."""
_LISTED = ("trans_compensation_case_listed", "trans_driven_by_state", "trans_message_listed")
"""Indexes that version 4 added, for lists of rows that need an operator."""


def _create(dialect: sa.Dialect, chosen: Sequence[sa.Table], listed: bool = False) -> list[sa.Executable]:
    """Return the statements that create these tables as they were first released, then their indexes by name, except
    those that version 4 added. With ``listed``, return only the statements that create these added indexes, and no
    tables."""
    added = {column for columns in _ADDED.values() for column in columns}
    creations: list[sa.Executable] = []
    indexes: dict[str, sa.Executable] = {}

    def collect(statement: Any, *_: Any, **__: Any) -> None:
        if isinstance(statement, schema.CreateTable) and not listed:
            table = statement.element
            columns = [column._copy() for column in table.c if column not in added]
            first = sa.Table(table.name, sa.MetaData(), *columns, **tables.ENGINE)
            creations.append(schema.CreateTable(first if len(columns) < len(table.c) else table, if_not_exists=True))
        elif isinstance(statement, schema.CreateIndex) and (str(statement.element.name) in _LISTED) == listed:
            # MySQL has no IF NOT EXISTS here: an existing index is skipped when the step runs
            creation = schema.CreateIndex(statement.element, if_not_exists=dialect.name != "mysql")
            indexes[str(statement.element.name)] = creation

    engine = sa.create_mock_engine(f"{dialect.name}://", collect)
    metadata.create_all(engine, tables=list(chosen), checkfirst=False)
    return [*creations, *(indexes[name] for name in sorted(indexes))]


def _first(dialect: sa.Dialect) -> list[sa.Executable]:
    later = {table for added in _LATER.values() for table in added}
    first = [table for table in metadata.tables.values() if table not in later]
    rows = [{"lane": lane, "epoch": 0, "leased_until_us": 0} for lane in range(tables.LANES)]
    return [*_create(dialect, first), _insert_missing(dialect, tables.trans_lane, rows)]


def _fourth(dialect: sa.Dialect) -> list[sa.Executable]:
    head = _insert_missing(dialect, tables.trans_act_head, [{"one": 1, "number": 0, "hash": origin(tables.PLACE)}])
    listed = _create(dialect, (tables.trans_message, trans_driven, tables.trans_compensation_case), listed=True)
    return [*_create(dialect, _LATER[4]), head, *map(AddColumn, _ADDED[4]), *listed]


STEPS: dict[int, Callable[[sa.Dialect], list[sa.Executable]]] = {
    1: _first,
    2: lambda _: [*map(AddColumn, _ADDED[2])],
    3: lambda dialect: _create(dialect, _LATER[3]),
    4: _fourth,
}
"""The step *to* each version. A change of released tables is a new step; the tests have the released texts of each."""


def _path(dialect: sa.Dialect, found: int, last: int) -> Iterator[sa.Executable]:
    for version in range(found + 1, last + 1):
        yield from STEPS[version](dialect)
        yield _insert_missing(dialect, trans_schema, [{"one": 1, "version": version}])
        yield sa.update(trans_schema).where(trans_schema.c.one == 1).values(version=version)


def _insert_missing(dialect: sa.Dialect, table: sa.Table, rows: list[dict[str, Any]]) -> sa.Executable:
    """Return an INSERT of those rows whose primary key does not exist."""
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
                continue  # by create_all, or by an interrupted step
            try:
                connection.execute(statement)
            except DBAPIError as problem:
                # an interrupted step had created this index
                if not isinstance(statement, schema.CreateIndex) or problem.orig.args[0] != _INDEX_EXISTS:  # type: ignore[union-attr]
                    raise
    return found


@contextmanager
def _lock(connection: sa.Connection) -> Iterator[None]:
    """Context manager: exclude other migrations; on SQLite the transaction itself is the lock. MariaDB and MySQL commit
    at its end, and raise Unknown(TIMED_OUT) after PATIENCE seconds of waiting."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_NUMBER)))
        yield
    elif connection.dialect.name in ("mysql", "mariadb"):
        name = sa.func.concat(_LOCK, ".", sa.func.database())
        if connection.scalar(sa.select(sa.func.get_lock(name, PATIENCE))) != 1:
            raise Unknown(Code.TIMED_OUT, "another process has been migrating these tables for a minute")
        try:
            yield
            connection.exec_driver_sql("COMMIT")  # the next migration must see the version
        finally:
            connection.scalar(sa.select(sa.func.release_lock(name)))
    else:
        yield


@contextmanager
def _sqlite_alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Context manager: a transaction with the write lock from its start, because SQLite's driver would commit every
    CREATE."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.begin()
        if connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
            connection.exec_driver_sql("ROLLBACK")  # begun by a listener of the engine, without a lock
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            with suppress(DBAPIError):  # SQLite may have rolled it back already
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")


def translated(connection: sa.Connection) -> str | None:
    """Return the database schema into which the connection translates table names (``schema_translate_map``); None if
    it does not."""
    names = connection.get_execution_options().get("schema_translate_map") or {}
    return names.get(None)


def _version(connection: sa.Connection) -> int | None:
    """Return the version of the tables; 0: they have no version row; None: they do not exist."""
    if not sa.inspect(connection).has_table(trans_schema.name, schema=translated(connection)):
        return None
    return connection.scalar(sa.select(trans_schema.c.version).where(trans_schema.c.one == 1)) or 0


def _newer(found: int) -> Misuse:
    text = f"the tables are of version {found}, newer than this escrowmq, which has {SCHEMA_VERSION}"
    return Misuse(Code.SCHEMA_VERSION, text, "upgrade escrowmq here; nothing was changed")
