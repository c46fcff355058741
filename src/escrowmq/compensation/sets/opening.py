"""Opens a set store by URL or engine. The package of each kind is imported only on use."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any, cast

from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import Code, Misuse
from escrowmq.platform.extras import missing_package
from escrowmq.platform.listening import shown_address

if TYPE_CHECKING:
    import sqlalchemy as sa

_REDIS = ("redis", "rediss")
_SQL = ("sqlite", "postgresql", "postgres", "mysql", "mariadb")


def open_sets(store: str | sa.Engine, name: str, **options: Any) -> SetStore:
    """Open the pair of sets called ``name`` in a store: ``redis://[:PASSWORD@]HOST:PORT/DATABASE`` or ``rediss://``,
    ``sqlite:///FILE``, ``postgresql://...``, ``mariadb://...``, or a SQLAlchemy engine, which the caller closes.
    ``options`` are those of ``RedisSets`` or ``SqlSets``. Does not connect yet. Raises Misuse(BAD_URL),
    Misuse(MISSING_PACKAGE) naming the extra, Misuse(BAD_SETTING) for an unknown option, Rejected(BAD_GROUP_NAME)."""
    if not isinstance(store, str):
        return _make("sql", "SqlSets", "outbox", store, name, options)
    scheme = re.split(r"[:+]", store, maxsplit=1)[0]
    if scheme in _REDIS:
        return _make("redis", "RedisSets", "redis", store, name, options)
    if scheme not in _SQL or ":" not in store:
        shown = shown_address(store)
        known = ", ".join(f"{known}://" for known in (*_REDIS, *_SQL))
        raise Misuse(Code.BAD_URL, f"{shown!r} is not the URL of a set store", f"one of {known}")
    return _make("sql", "SqlSets", "outbox", _open_engine(store), name, {**options, "own": True})


def _open_engine(url: str) -> sa.Engine:
    engines = _import_module("escrowmq.outbox.engines", "outbox")
    if re.fullmatch(r"sqlite(\+\w+)?:/*(:memory:)?", url):
        text = "each thread would have its own SQLite database in memory"
        raise Misuse(Code.BAD_URL, text, "name a file: sqlite:///FILE")
    connect_args: dict[str, Any] = {}
    if url.startswith("postgres"):
        connect_args = {"connect_timeout": 10, "tcp_user_timeout": 30_000}
    elif not url.startswith("sqlite"):
        connect_args = {"connect_timeout": 10, "read_timeout": 30, "write_timeout": 30}
    engine: sa.Engine = engines.open_locking(url, connect_args=connect_args, pool_pre_ping=not url.startswith("sqlite"))
    return engine


def _make(module: str, kind: str, extra: str, store: Any, name: str, options: dict[str, Any]) -> SetStore:
    store_type = getattr(_import_module(f"escrowmq.compensation.sets.{module}", extra), kind)
    known = [n for n, p in inspect.signature(store_type).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise Misuse(Code.BAD_SETTING, f"{kind} has no option {option!r}", f"one of {', '.join(known)}")
    return cast(SetStore, store_type(store, name, **options))


def _import_module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("escrowmq"):
            raise
        raise missing_package(problem.name or "", "the set store", extra) from problem
