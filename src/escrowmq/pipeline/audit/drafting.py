"""Drafts a manifest from databases and topics: which tables have the ids of a topic, and which columns its fields.

Nothing is guessed from names alone: a table belongs to a topic if some of the first messages' ids are in one of its
columns. Columns are compared if a field of the bodies has their name. Tables of EscrowMQ are left out: they have ids of
messages too, and their rows are purged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.outbox.tables import metadata
from escrowmq.pipeline.audit.manifest import HINT, NAME, fill_in
from escrowmq.pipeline.audit.tables import is_unique
from escrowmq.pipeline.sql import texts
from escrowmq.pipeline.sql.tables import absolute, readonly_url
from escrowmq.pipeline.sql.text_reads import Text, TextRead, reflect_texts
from escrowmq.platform.listening import is_secret
from escrowmq.spark import brokers
from escrowmq.spark.options import absolute as broker_url
from escrowmq.spark.options import read_options
from escrowmq.wire import ReadRequest

SAMPLED = 50
"""Messages of each queue that are read."""


@dataclass(slots=True)
class Sampled:
    """The first messages of a topic: their ids by where they are, and the fields of their JSON bodies."""

    topic: str
    ids: dict[str, set[str]] = field(default_factory=lambda: {"key": set(), "message_id": set()})
    fields: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table with the ids of a topic, in its column ``id``. ``where_id`` is where messages have them."""

    database: str
    table: str
    id: str
    where_id: str
    columns: tuple[str, ...]
    unique: bool


def draft(folder: Path, log: str, topics: Sequence[str], databases: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Draft the manifest of a run folder for a log (a broker's URL or a data folder) and write it there. The first of
    ``databases`` (URLs, or SQLite files) is the producer's, the others are consumers'. Returns the manifest as JSON
    values, and notes for the user. Raises Misuse(BAD_ARGUMENT) if the folder has one, or no table has the ids of a
    topic, and the errors of databases and brokers."""
    path = folder / NAME
    if path.exists():
        raise Misuse(Code.BAD_ARGUMENT, f"{path} exists", "remove it, or name another folder")
    log = broker_url(log)
    sampled = [_sample(log, topic) for topic in topics]
    raw: dict[str, Any] = {"title": folder.absolute().name, "log": log, "tables": {}, "topics": list(topics)}
    raw |= {"ids": {}, "comparisons": [], "consumers": {}}
    notes: list[str] = []
    for number, database in enumerate(databases):
        written, note = name_database(database, folder)
        notes += [note] if note else []
        for candidate in _find_candidates(database, written, sampled, folder):
            topic, found = candidate
            if raw["ids"].setdefault(topic, found.where_id) == found.where_id:
                _add(raw, topic, found, is_producer=number == 0)
            else:  # the ids of a topic are one or the other
                notes.append(f"left out: table {found.table} has {found.where_id} of topic {topic}, not its id")
    for one in sampled:
        if not any(f"topic:{one.topic}" in (c["expected"], c["found"]) for c in raw["comparisons"]):
            empty = not one.ids["message_id"]
            what = f"topic {one.topic} is empty" if empty else f"no table has the ids of topic {one.topic}"
            notes.append(what)
    if not raw["comparisons"]:
        raise Misuse(Code.BAD_ARGUMENT, "; ".join(notes) or "no topics", HINT)
    raw["comparisons"] += [
        {"expected": f"half:{topic}", "found": f"topic:{topic}", "columns": ["message_id", "body"]} for topic in topics
    ]
    raw["ids"] = {topic: where for topic, where in raw["ids"].items() if where != "key"}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: value for name, value in raw.items() if value != {}}, indent=2) + "\n")
    return raw, notes


def _add(raw: dict[str, Any], topic: str, found: Candidate, *, is_producer: bool) -> None:
    name = found.table if found.table not in raw["tables"] else f"{found.table} {len(raw['tables']) + 1}"
    there = (found.database, found.table)
    known = next((n for n, t in raw["tables"].items() if (t["database"], t["table"]) == there), name)
    raw["tables"][known] = {"database": found.database, "table": found.table, "id": found.id}
    if found.unique:
        raw["tables"][known]["unique"] = True
    sides = [f"table:{known}", f"topic:{topic}"]
    expected, other = sides if is_producer else sides[::-1]
    raw["comparisons"].append({"expected": expected, "found": other, "columns": list(found.columns)})
    if not is_producer:
        raw["consumers"][known] = known


def _sample(log: str, topic: str) -> Sampled:
    """Read the first messages of each queue of a topic from the log at URL ``log``; return their ids and the fields of
    their bodies."""
    found = Sampled(topic)
    with brokers.opened(log) as links:
        at = {link.address: link for link in links}
        for one in brokers.topic_partitions(links, read_options({"url": log, "topic": topic})):
            request = {"source": topic, "queue": one.queue, "start": one.head, "end": min(one.end, one.head + SAMPLED)}
            request |= {"columns": ["key", "message_id", "body"], "max_rows": SAMPLED}
            rows = at[one.broker].read(cast(ReadRequest, request)).read_all().to_pylist() if one.end > one.head else []
            for row in rows:
                if row["key"] is not None:
                    found.ids["key"].add(row["key"] if isinstance(row["key"], str) else row["key"].decode())
                found.ids["message_id"].add(bytes(row["message_id"]).hex())
                with suppress(ValueError):
                    body = json.loads(row["body"])
                    found.fields |= body.keys() if isinstance(body, dict) else set()
    return found


def _find_candidates(
    database: str, written: str, sampled: Iterable[Sampled], folder: Path
) -> list[tuple[str, Candidate]]:
    """Return the tables of a database that have some of the sampled ids of a topic, as pairs of topic and table.
    ``written``: the database's name in the manifest."""
    url = absolute(fill_in(database)) if "://" in database or database.startswith("$") else readonly_url(Path(database))
    with engines.opened(url) as engine, engine.connect() as connection:
        names = [name for name in sa.inspect(connection).get_table_names() if name not in metadata.tables]
    found = []
    for one in sampled:
        for table in names:
            natives = reflect_texts(url, table, [])
            columns = tuple(name for name in natives if name in one.fields or name in ("message_id", "transaction_id"))
            if (id := _find_id(url, table, natives, one)) is not None:
                read = TextRead(url, table, (Text(id[0], natives[id[0]], "text"),))
                compared = tuple(name for name in columns if name != id[0])
                found.append((one.topic, Candidate(written, table, *id, compared, is_unique(read))))
    return found


def _find_id(url: str, table: str, natives: dict[str, str], sampled: Sampled) -> tuple[str, str] | None:
    """Return the column of a table that has most of a topic's sampled ids, and where messages have them: ``key`` or
    ``message_id``. None if no column has any."""
    best, most = None, 0
    for where, ids in sampled.ids.items():
        for name, native in natives.items():
            if native not in ("text", "integer", "uuid", "bytes", "decimal") or not ids:
                continue
            read = TextRead(url, table, (Text(name, native, texts.id_kind(native)),))
            count = read.count_ids(sorted(ids))
            if count > most:
                best, most = (name, where), count
    return best


def name_database(database: str, folder: Path) -> tuple[str, str]:
    """Return the name of a database (a URL, or a SQLite file) for a manifest: secrets become environment variables,
    files within ``folder`` relative. The second text is a note which variables the user must set; "" if none."""
    if "://" not in database and not database.startswith("$"):
        path = Path(database).absolute()
        return (str(path.relative_to(folder.absolute())) if path.is_relative_to(folder.absolute()) else str(path)), ""
    if database.startswith("$"):
        return database, ""
    url = sa.make_url(database)
    names: list[str] = []

    def hide(value: str, what: str) -> str:
        if value.startswith("$"):
            return value
        names.append(re.sub(r"\W", "_", f"{url.database}_{what}".upper()))
        return f"${{{names[-1]}}}"

    password = None if not url.password else hide(str(url.password), "password")
    query = {name: hide(str(value), f"query_{name}") if is_secret(name) else value for name, value in url.query.items()}
    if not names:
        return database, ""
    hidden = url.set(password=password, query=query).render_as_string(hide_password=False)
    hidden = re.sub(r"%24%7B(\w+)%7D", r"${\1}", hidden)
    return hidden, f"export {' '.join(names)} as written in the URL of {url.database}"
