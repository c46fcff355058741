"""The manifest of a run folder, ``manifest.json``: its files, tables and log, and the comparisons to make.

Everything is named relative to the run folder, so that a folder can be moved or copied as a whole::

    {
      "log": "broker",                        data folder of the broker; or a URL of one that is running
      "files":  {"placed": {"path": "orders.parquet", "id": "order_id", "where": {"cancelled": "false"}}},
      "tables": {"orders": {"database": "orders.db", "table": "orders", "id": "order_id", "where": {},
                            "unique": true}},   no id is twice: believed if an index of the database says so
      "topics": ["orders"],                   keyed by the id; bodies are JSON objects
      "ids": {"points": "message_id"},        of topics where the id is not the key (optional)
      "comparisons": [
        {"expected": "table:orders", "found": "topic:orders", "columns": ["units"], "judges": ["lost", ...]}
      ],
      "consumers": {"cart": "carts"},         consumer → the table that its effects are in
      "events": "events.jsonl"                what happened when; kills among it (optional)
    }
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from escrowmq.errors import Code, Misuse
from escrowmq.message.names import is_name

NAME = "manifest.json"
_HINT = "docs/audit.md has its fields; `escrowmq demo` makes one"
KINDS = ("lost", "repeated", "altered", "leaked")
"""What a comparison can find wrong with an id (see :mod:`escrowmq.pipeline.audit.frames`)."""

IDS = ("key", "message_id")
"""Where the id of a topic's messages can be; message ids are compared in hex."""

MESSAGE_COLUMNS = ("message_id", "transaction_id", "tag", "properties", "body")
"""Columns that every topic has beside the fields of its bodies."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one of the SQLite databases. ``where`` keeps the rows whose columns equal these texts. ``unique``
    states that no id occurs twice, so repeats need not be searched for; it is used only if an index of the database
    confirms it."""

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
    topic NAME that a consumer group was to handle, after discards and edits by operators)."""

    expected: str
    found: str
    columns: tuple[str, ...]
    judges: tuple[str, ...] = KINDS

    @property
    def sides(self) -> tuple[str, str]:
        return self.expected, self.found


def of_group(name: str) -> tuple[str, str]:
    """Return the consumer group and topic of a side ``group:GROUP/TOPIC``."""
    group, _, topic = name.partition("/")
    return group, topic


Described = TypeVar("Described", Table, File)


def _describe(kind: type[Described], what: str, name: str, value: dict[str, Any]) -> Described:
    """Parse one table or file. Raises ValueError that names a missing or unknown field."""
    known = {one.name: one for one in fields(kind)}
    if unknown := sorted(set(value) - set(known)):
        raise ValueError(f"{what} {name!r} has a field {unknown[0]!r}, which is not one of {', '.join(known)}")
    needed = [one for one in known if known[one].default is MISSING and known[one].default_factory is MISSING]
    if missing := [one for one in needed if one not in value]:
        raise ValueError(f"{what} {name!r} has no field {missing[0]!r}")
    return kind(**value)


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

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a run folder. Raises Misuse(BAD_ARGUMENT) with the mistake."""
        path = folder / NAME
        if not path.is_file():
            text = f"{folder} is not a run folder: it has no {NAME}"
            raise Misuse(Code.BAD_ARGUMENT, text, "`escrowmq demo` makes one")
        try:
            return cls.of(folder, json.loads(path.read_text()))
        except (KeyError, ValueError, TypeError, AttributeError) as problem:
            why = f"it has no field {problem}" if isinstance(problem, KeyError) else problem
            raise Misuse(Code.BAD_ARGUMENT, f"{path} cannot be used: {why}", _HINT) from problem

    @classmethod
    def of(cls, folder: Path, raw: dict[str, Any]) -> Manifest:
        """Parse the JSON form. Raises ValueError, KeyError or TypeError if it is invalid."""
        manifest = cls(
            folder=folder,
            log=raw["log"],
            tables={name: _describe(Table, "table", name, value) for name, value in raw["tables"].items()},
            topics=tuple(raw["topics"]),
            comparisons=tuple(
                Comparison(c["expected"], c["found"], tuple(c["columns"]), tuple(c.get("judges", KINDS)))
                for c in raw["comparisons"]
            ),
            consumers=dict(raw.get("consumers", {})),
            files={name: _describe(File, "file", name, value) for name, value in raw.get("files", {}).items()},
            events=raw.get("events"),
            ids=dict(raw.get("ids", {})),
        )
        manifest._check()
        return manifest

    @property
    def log_url(self) -> str:
        """The URL of the run's log: of a broker, or of its data folder."""
        return self.log if "://" in self.log else f"file:{(self.folder / self.log).resolve()}"

    def label(self, side: str) -> str:
        """Return the display name of a side: ``cart.db carts``, ``topic orders``, ``orders.parquet``."""
        kind, _, name = side.partition(":")
        if kind == "table":
            return f"{self.tables[name].database} {self.tables[name].table}"
        if kind == "file":
            return self.files[name].path
        if kind == "group":
            group, topic = of_group(name)
            return f"topic {topic} for consumer group {group}"
        return f"topic {name}" if kind == "topic" else f"committed half messages of {name}"

    def _check(self) -> None:
        for topic, id in self.ids.items():
            if topic not in self.topics or id not in IDS:
                ids = " or ".join(IDS)
                raise ValueError(f"the id of {topic!r} is {id!r}; ids are {ids} of the topics of the manifest")
        for name, table in self.tables.items():
            kind, url, _ = table.database.partition("://")
            if url:
                raise ValueError(
                    f"table {name!r} is in a database by URL ({kind}://...), and the audit reads SQLite files beside "
                    "the manifest; compare others with escrowmq.pipeline.audit.compare (docs/audit.md)"
                )
        known: dict[str, Collection[str]] = {"table": self.tables, "file": self.files}
        known |= dict.fromkeys(("topic", "half"), self.topics)
        for comparison in self.comparisons:
            for side in comparison.sides:
                kind, _, name = side.partition(":")
                group, topic = of_group(name) if kind == "group" else ("", "")
                if name not in known.get(kind, ()) and not (is_name(group) and topic in self.topics):
                    raise ValueError(f"a comparison names {side!r}, which is not described")
            if unknown := set(comparison.judges) - set(KINDS):
                raise ValueError(f"a comparison judges {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
        judged = {comparison.found for comparison in self.comparisons}
        if unknown := {table for table in self.consumers.values() if f"table:{table}" not in judged}:
            raise ValueError(f"no comparison looks into the consumers' tables {', '.join(sorted(unknown))}")
