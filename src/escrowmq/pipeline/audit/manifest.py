"""The manifest of a run folder, ``manifest.json``: its databases, files and log, and the comparisons to make.

Its fields are described in docs/audit-manifest.md.

Files are named relative to the run folder, so that a folder can be moved or copied as a whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.message.names import is_name
from escrowmq.pipeline.sql.tables import absolute, readonly_url
from escrowmq.settings import nearest

NAME = "manifest.json"
HINT = "docs/audit-manifest.md has its fields; `escrowmq audit --init` writes one"
KINDS = ("lost", "repeated", "altered", "leaked")
"""What a comparison can find wrong with an id (see :mod:`escrowmq.pipeline.audit.frames`)."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")

ALL = "*"
"""Stands for all columns of a table."""

IDS = ("key", "message_id")
"""Where the id of a topic's messages can be; message ids are compared in hex."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``database`` is a SQLite file or a URL, in which ``${NAME}`` is an environment variable. ``where`` keeps
    the rows whose columns equal these texts. ``unique`` states that no id occurs twice, so repeats need not be searched
    for; it is used only if an index of the database confirms it."""

    database: str
    table: str
    id: str
    where: dict[str, str] = field(default_factory=dict)
    unique: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file with the expected rows, written before any database had them. ``path`` is in the run folder, or a
    URL that Spark knows (``hdfs://...``)."""

    path: str
    id: str
    where: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides that must hold the same ids with the same ``columns``. Sides are ``file:``, ``table:``, ``topic:``,
    ``half:NAME`` (the half messages of topic NAME whose transaction committed) or ``group:GROUP/NAME`` (the messages of
    topic NAME that a consumer group was to handle, after discards and edits by operators).

    ``columns`` may be ALL. Those of ``exclude`` are not compared. Numbers may differ by the ``tolerance`` of their
    column, times by ``clock_skew`` seconds."""

    expected: str
    found: str
    columns: tuple[str, ...]
    judges: tuple[str, ...] = KINDS
    tolerance: dict[str, float] = field(default_factory=dict)
    clock_skew: float = 0
    exclude: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[str, str]:
        return self.expected, self.found

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that are compared, without ALL and the excluded ones."""
        return tuple(name for name in self.columns if name not in (ALL, *self.exclude))


def of_group(name: str) -> tuple[str, str]:
    """Split ``GROUP/TOPIC``, the name of a side ``group:``, into consumer group and topic."""
    group, _, topic = name.partition("/")
    return group, topic


def fill_in(text: str) -> str:
    """Return a URL with ``${NAME}`` replaced by environment variables. Raises Misuse(BAD_SETTING) if one is not set."""
    for name in _VARIABLE.findall(text):
        if name not in os.environ:
            raise Misuse(Code.BAD_SETTING, f"the manifest needs the environment variable {name}", f"export {name}=...")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a run folder."""

    folder: Path
    log: str
    tables: dict[str, Table]
    topics: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    consumers: dict[str, str]
    files: dict[str, File] = field(default_factory=dict)
    events: str | None = None
    ids: dict[str, str] = field(default_factory=dict)
    title: str = ""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a run folder. Raises Misuse(BAD_ARGUMENT) with the mistake."""
        path = folder / NAME
        if not path.is_file():
            text = f"{folder} is not a run folder: it has no {NAME}"
            raise Misuse(Code.BAD_ARGUMENT, text, HINT)
        try:
            raw = json.loads(path.read_text())
        except ValueError as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"{path} cannot be used: {problem}", HINT) from problem
        if problems := find_problems(raw):
            text = "; ".join(what for _, what in problems)
            raise Misuse(Code.BAD_ARGUMENT, f"{path} cannot be used: {text}", HINT)
        return cls.of(folder, raw)

    @classmethod
    def of(cls, folder: Path, raw: dict[str, Any]) -> Manifest:
        """Build the manifest of ``folder`` from its JSON form, in which :func:`find_problems` must have found no
        error."""
        return cls(
            folder=folder,
            title=raw.get("title", ""),
            log=raw["log"],
            tables={name: Table(**value) for name, value in raw["tables"].items()},
            topics=tuple(raw["topics"]),
            comparisons=tuple(Comparison(**_freeze(one)) for one in raw["comparisons"]),
            consumers=dict(raw.get("consumers", {})),
            files={name: File(**value) for name, value in raw.get("files", {}).items()},
            events=raw.get("events"),
            ids=dict(raw.get("ids", {})),
        )

    @property
    def log_url(self) -> str:
        """The URL of the run's log: of a broker, or of its data folder."""
        return (
            self.log
            if "://" in self.log or self.log.startswith("file:")
            else f"file:{(self.folder / self.log).resolve()}"
        )

    def table_url(self, name: str) -> str:
        """Return the URL of a table's database, with environment variables filled in. A file is opened read-only."""
        database = self.tables[name].database
        if "://" in database or database.startswith("$"):
            return absolute(fill_in(database))
        return readonly_url((self.folder / database).resolve())

    def label(self, side: str) -> str:
        """Return the display name of a side: ``cart.db carts``, ``topic orders``, ``orders.parquet``."""
        kind, _, name = side.partition(":")
        if kind == "table":
            return f"{self._name_database(name)} {self.tables[name].table}"
        if kind == "file":
            return self.files[name].path
        if kind == "group":
            group, topic = of_group(name)
            return f"topic {topic} for consumer group {group}"
        return f"topic {name}" if kind == "topic" else f"committed half messages of {name}"

    def _name_database(self, name: str) -> str:
        """Return a display name, without users and secrets, of the database of table ``name``: ``cart.db``,
        ``postgresql://HOST/DATABASE``."""
        database = self.tables[name].database
        if "://" not in database and not database.startswith("$"):
            return database
        url = sa.make_url(self.table_url(name))
        if url.get_backend_name() == "sqlite":
            return Path(url.database or "").name
        return f"{url.get_backend_name()}://{url.host or ''}/{url.database or ''}"


def _freeze(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}


Problem = tuple[tuple[str | int, ...], str]
"""The path of a value of the JSON, and what is wrong with it."""

_FIELDS: dict[str, dict[str, tuple[type, bool]]] = {
    "the manifest": {
        **{"title": (str, False), "log": (str, True), "tables": (dict, True), "topics": (list, True)},
        **{"comparisons": (list, True), "consumers": (dict, False), "files": (dict, False), "events": (str, False)},
        **{"ids": (dict, False)},
    },
    "table": {
        **{"database": (str, True), "table": (str, True), "id": (str, True), "where": (dict, False)},
        **{"unique": (bool, False)},
    },
    "file": {"path": (str, True), "id": (str, True), "where": (dict, False)},
    "comparison": {
        **{"expected": (str, True), "found": (str, True), "columns": (list, True), "judges": (list, False)},
        **{"tolerance": (dict, False), "clock_skew": (float, False), "exclude": (list, False)},
    },
}
"""Fields by what has them: type, and whether it is required."""
_NAMES = {str: "a text", dict: "an object", list: "a list", bool: "true or false", float: "a number"}


def find_problems(raw: Any) -> list[Problem]:
    """Return all errors in the JSON form of a manifest, each as the path of its field and a text. Opens no database or
    file."""
    found = list(_check_fields("the manifest", "it", raw, ()))
    if found:
        return found
    for kind in ("table", "file"):
        for name, value in raw.get(f"{kind}s", {}).items():
            found += _check_fields(kind, f"{kind} {name!r}", value, (f"{kind}s", name))
    for number, value in enumerate(raw["comparisons"]):
        wrong = list(_check_fields("comparison", f"comparison {number + 1}", value, ("comparisons", number)))
        found += wrong or _check_comparison(raw, value, ("comparisons", number))
    for topic, id in raw.get("ids", {}).items():
        if topic not in raw["topics"] or id not in IDS:
            text = f"the id of {topic!r} is {id!r}; ids are {' or '.join(IDS)} of the topics of the manifest"
            found.append((("ids", topic), text))
    judged = {value.get("found") for value in raw["comparisons"] if isinstance(value, dict)}
    for consumer, table in raw.get("consumers", {}).items():
        if f"table:{table}" not in judged:
            found.append((("consumers", consumer), f"no comparison looks into the consumers' tables {table}"))
    return found


def _check_fields(kind: str, what: str, value: Any, at: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield an error for each field of an object that is missing, unknown or of a wrong type. ``kind``: which fields it
    has; ``what``: its name in the text; ``at``: its path."""
    known = _FIELDS[kind]
    if not isinstance(value, dict):
        yield at, f"{what} is not an object"
        return
    for name in value.keys() - known.keys():
        text = f"{what} has a field {name!r}, which is not one of {', '.join(known)}"
        yield (*at, name), text + (f" ({hint})" if (hint := nearest(name, list(known))) else "")
    for name, (type_, is_required) in known.items():
        if name not in value:
            if is_required:
                yield at, f"{what} has no field {name!r}"
        elif not _is_a(type_, value[name]):
            yield (*at, name), f"{what} has a field {name!r} that is not {_NAMES[type_]}"
        elif name in ("where", "consumers", "ids", "topics", "columns", "judges", "exclude"):
            inner = value[name].items() if type_ is dict else enumerate(value[name])
            for key, one in inner:
                if not isinstance(one, str):
                    yield (*at, name, key), f"{what}: {key!r} of {name!r} is not a text"


def _is_a(type_: type, value: Any) -> bool:
    if type_ is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, type_)


def _check_comparison(raw: Any, value: Any, at: tuple[str | int, ...]) -> Iterator[Problem]:
    known = {"table": raw["tables"], "file": raw.get("files", {}), "topic": raw["topics"], "half": raw["topics"]}
    for field_ in ("expected", "found"):
        kind, _, name = value[field_].partition(":")
        group, topic = of_group(name) if kind == "group" else ("", "")
        if name not in known.get(kind, ()) and not (is_name(group) and topic in raw["topics"]):
            yield (*at, field_), f"a comparison names {value[field_]!r}, which is not described"
    if unknown := set(value.get("judges", ())) - set(KINDS):
        yield (*at, "judges"), f"a comparison judges {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}"
    yield from _check_columns(value, at)


def _check_columns(value: Any, at: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield the errors of ``columns``, ``exclude``, ``tolerance`` and ``clock_skew`` of a comparison (``value``, at
    path ``at``) that the manifest itself shows."""
    columns, excluded = value["columns"], value.get("exclude", ())
    if ALL in columns:
        if len(columns) > 1:
            yield (*at, "columns"), f"{ALL!r} stands for all columns, so no others can be named"
        if not any(value[side].startswith("table:") for side in ("expected", "found")):
            yield (*at, "columns"), f"{ALL!r} stands for all columns of a table, and neither side is one"
    else:
        for number, name in enumerate(excluded):
            if name not in columns:
                yield (*at, "exclude", number), f"excluded column {name!r} is not one of {', '.join(columns)}"
    for name, limit in value.get("tolerance", {}).items():
        if name in excluded or (name not in columns and ALL not in columns):
            yield (*at, "tolerance", name), f"column {name!r} has a tolerance, but it is not compared"
        if not _is_a(float, limit) or not (limit == 0 or 1e-18 <= limit <= 10**18):
            yield (*at, "tolerance", name), f"the tolerance of {name!r} is a number from 1e-18 to 1e18, or 0"
    skew = value.get("clock_skew", 0)
    if not (skew == 0 or 1e-6 <= skew <= 10**9):
        yield (*at, "clock_skew"), "the clock skew is a number of seconds from 1e-6 to 1e9, or 0"
