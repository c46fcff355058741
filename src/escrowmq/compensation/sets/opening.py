"""From a URL or an engine to a set store. The package of each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any

from escrowmq.compensation.sets.seam import SetStore
from escrowmq.errors import Code, Misuse
from escrowmq.platform.extras import missing_package
from escrowmq.platform.listening import shown_address

if TYPE_CHECKING:
    import sqlalchemy as sa

_REDIS = ("redis", "rediss")
_SQL = ("sqlite", "postgresql", "postgres", "mysql", "mariadb")
_CONNECT_SECONDS = 10


def open_sets(store: str | sa.Engine, name: str, **options: Any) -> SetStore:
    """Return the pair of sets called ``name`` in the store that ``store`` names:
    ``redis://[:PASSWORD@]HOST:PORT/DATABASE`` or ``rediss://``, ``sqlite:///FILE``, ``postgresql://...``,
    ``mariadb://...``, or a SQLAlchemy engine, which stays yours.

    ``options`` are those of ``RedisSets`` or ``SqlSets``. Does not connect yet. Raises Misuse(BAD_URL),
    Misuse(MISSING_PACKAGE) naming the
    extra, Misuse(BAD_SETTING) for an option that the store does not have, Rejected(BAD_GROUP_NAME).
    """
    if not isinstance(store, str):
        return _made("sql", "SqlSets", "outbox", store, name, options)
    scheme = re.split(r"[:+]", store, maxsplit=1)[0]
    if scheme in _REDIS:
        return _made("redis", "RedisSets", "redis", store, name, options)
    if scheme not in _SQL or ":" not in store:
        shown = shown_address(store)
        known = ", ".join(f"{known}://" for known in (*_REDIS, *_SQL))
        raise Misuse(Code.BAD_URL, f"{shown!r} is not the URL of a set store", f"one of {known}")
    return _made("sql", "SqlSets", "outbox", _engine(store), name, {**options, "own": True})


def _engine(url: str) -> sa.Engine:
    engines = _module("escrowmq.outbox.engines", "outbox")
    if re.fullmatch(r"sqlite(\+\w+)?:/*(:memory:)?", url):
        raise Misuse(
            Code.BAD_URL, "a SQLite database in memory is another one for each thread", "name a file: sqlite:///FILE"
        )
    connecting: dict[str, Any] = {}
    if url.startswith("postgres"):
        connecting = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 30_000}
    elif not url.startswith("sqlite"):
        connecting = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": 30, "write_timeout": 30}
    engine: sa.Engine = engines.open_locking(url, connect_args=connecting, pool_pre_ping=not url.startswith("sqlite"))
    return engine


def _made(module: str, kind: str, extra: str, store: Any, name: str, options: dict[str, Any]) -> SetStore:
    made = getattr(_module(f"escrowmq.compensation.sets.{module}", extra), kind)
    known = [n for n, p in inspect.signature(made).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise Misuse(Code.BAD_SETTING, f"{kind} has no option {option!r}", f"one of {', '.join(known)}")
    opened: SetStore = made(store, name, **options)
    return opened


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("escrowmq"):
            raise
        raise missing_package(problem.name or "", "the set store", extra) from problem
