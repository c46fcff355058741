"""SQLAlchemy over Django's databases: an engine that connects as Django does, and Django's own connection, lent.

The statements of :mod:`escrowmq.outbox` exist once, in SQLAlchemy. :func:`connection` runs them on the connection that
holds the transaction of ``transaction.atomic``. SQLAlchemy gets it in a wrapper that it can neither commit, roll back
nor close: Django alone ends its transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.db.transaction import TransactionManagementError
from django.db.utils import load_backend
from sqlalchemy.exc import DBAPIError

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.seam import Target

_engines: dict[tuple[str, ...], sa.Engine] = {}
"""By alias and address, because a test runner changes the address of an alias."""


def engine_of(using: str | None = None) -> sa.Engine:
    """Return the SQLAlchemy engine of a database of ``settings.DATABASES``; None: the default one.

    It connects with Django's own options, and keeps no connection. Raises Misuse(BAD_ARGUMENT) for a database that the
    outbox does not support.
    """
    alias = using or DEFAULT_DB_ALIAS
    of = connections.settings[alias]
    key = (alias, *(str(of[name]) for name in ("ENGINE", "NAME", "HOST", "PORT", "USER")))
    if key not in _engines:
        _engines[key] = make_engine(alias, poolclass=sa.NullPool)
    return _engines[key]


def make_engine(alias: str, **options: Any) -> sa.Engine:
    """Return a new engine as :func:`engine_of` does, with ``options`` of ``create_engine``."""
    of = connections.settings[alias]
    name = str(of["NAME"])
    address: dict[str, Any] = {"host": of["HOST"] or None, "port": int(of["PORT"]) if of["PORT"] else None}
    if (driver := _driver(alias)).startswith("sqlite"):
        address = {"query": {"uri": "true"}} if name.startswith("file:") else {}
    url = sa.URL.create(driver, username=of["USER"] or None, database=name, **address)
    return sa.create_engine(url, creator=lambda: _connect(alias), **options)


@contextmanager
def connection(using: str | None = None) -> Iterator[sa.Connection]:
    """Context manager: Django's connection inside ``transaction.atomic``, for the ``_tx`` functions of
    :mod:`escrowmq.outbox`.

    Commits nothing. Raises Misuse(NO_TRANSACTION) outside of ``atomic`` and after an error that Django remembers. Other
    errors of the database become those of ``django.db``.
    """
    wrapper = transaction.get_connection(using)
    if not wrapper.in_atomic_block:
        hint = "use `with transaction.atomic():` around the change and this call"
        raise Misuse(Code.NO_TRANSACTION, "there is no transaction.atomic block", hint)
    try:
        wrapper.validate_no_broken_transaction()
    except TransactionManagementError as problem:
        raise Misuse(Code.NO_TRANSACTION, str(problem), "leave the atomic block") from problem
    with lend(wrapper) as lent:
        yield lent


@contextmanager
def lend(wrapper: Any) -> Iterator[sa.Connection]:
    """Context manager: the connection of a Django wrapper as SQLAlchemy's, in or outside of a transaction."""
    wrapper.ensure_connection()
    engine = engine_of(wrapper.alias)
    if getattr(engine.dialect, "server_version_info", None) is None:  # an engine's first connection would do it
        engine.dialect.initialize(_to_connection(engine, _Lent(wrapper.connection)))
    raw = _Lent(wrapper.connection)
    try:
        yield _to_connection(engine, raw)  # never closed: that would roll back
    except DBAPIError as problem:
        if problem.orig is None:
            raise
        with wrapper.wrap_database_errors:
            raise problem.orig from problem
    finally:
        if wrapper.in_atomic_block and (raw.was_rolled_back or _is_aborted(wrapper)):
            wrapper.set_rollback(True)


class Database:
    """Django's database for ``once=`` of handlers and :func:`escrowmq.outbox.inbox.consume`: ``begin()`` is
    ``transaction.atomic``."""

    is_ambient = True
    """Models find the transaction without a parameter."""

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Context manager: a transaction, whose connection :func:`connection` describes."""
        transaction.get_connection(self.using).close_if_unusable_or_obsolete()
        with transaction.atomic(self.using), connection(self.using) as lent:
            yield lent


class _Lent:
    """A driver's connection, for SQLAlchemy, without the calls that end transactions."""

    is_valid, is_detached = True, False

    def __init__(self, raw: Any) -> None:
        self.driver_connection, self.was_rolled_back = raw, False

    @property
    def dbapi_connection(self) -> Any:
        return self

    def rollback(self) -> None:
        self.was_rolled_back = True

    def commit(self) -> None:
        """Leave it to Django."""

    def close(self) -> None:
        """Leave it to Django."""

    def invalidate(self, *_: object, **__: object) -> None:
        """Leave it to Django, which closes a connection after an error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver_connection, name)


def _is_aborted(wrapper: Any) -> bool:
    """Return whether an error has ended PostgreSQL's transaction, or its savepoint."""
    if wrapper.vendor != "postgresql" or wrapper.connection is None:
        return False
    return bool(wrapper.connection.info.transaction_status.name == "INERROR")


def _to_connection(engine: sa.Engine, raw: Any) -> sa.Connection:
    return sa.Connection(engine, connection=raw)


def _connect(alias: str) -> Any:
    """Return a new connection of the driver, set up by Django, and with the driver's own manner of transactions."""
    of = connections.settings[alias]
    options = {name: value for name, value in of["OPTIONS"].items() if name != "pool"}
    wrapper = load_backend(of["ENGINE"]).DatabaseWrapper({**of, "OPTIONS": options}, alias)
    try:
        wrapper.connect()
        wrapper.set_autocommit(False)
    except Error as problem:
        raise problem.__cause__ or problem from None  # SQLAlchemy knows the errors of the driver
    return wrapper.connection


def _driver(alias: str) -> str:
    """Return SQLAlchemy's name of the driver that Django uses."""
    wrapper = connections[alias]
    module = wrapper.Database.__name__
    known = {
        ("sqlite", "sqlite3"): "sqlite",
        ("sqlite", "sqlite3.dbapi2"): "sqlite",
        ("postgresql", "psycopg"): "postgresql+psycopg",
        ("mysql", "pymysql"): "mysql+pymysql",
        ("mysql", "MySQLdb"): "mysql+mysqldb",
    }
    if found := known.get((wrapper.vendor, module)):
        return found
    text = f"the database {alias!r} is {wrapper.vendor} by {module}"
    raise Misuse(Code.BAD_ARGUMENT, text, "SQLite, PostgreSQL by psycopg 3, MariaDB or MySQL")


def broker_url(given: str | None = None) -> str:
    """Return the broker's URL: the given one, else that of ``settings.ESCROWMQ``. Raises ImproperlyConfigured."""
    if url := given or _setting("URL"):
        return str(url)
    raise ImproperlyConfigured("no broker: settings.ESCROWMQ = {'URL': 'escrow://HOST:PORT'}")


@contextmanager
def open_relay(alias: str, target: Target) -> Iterator[Relay]:
    """Context manager: a relay of a database, not started, with the options of ``settings.ESCROWMQ['RELAY']``."""
    engine = make_engine(alias)
    try:
        yield Relay(engine, target, **_setting("RELAY", {}))
    finally:
        engine.dispose()


def _setting(name: str, default: Any = None) -> Any:
    given = getattr(settings, "ESCROWMQ", {})
    if unknown := sorted(set(given) - {"URL", "RELAY"}):
        raise ImproperlyConfigured(f"settings.ESCROWMQ has no {unknown[0]!r}: URL, RELAY")
    return given.get(name, default)
