"""The options of format "escrow": names, meanings, and a clear error for every wrong one. Imports no Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.settings import BYTES, SECONDS, nearest, parse_quantity
from escrowmq.wire import ACK_VIEW_NAME, GROUP_ACT_VIEW_NAME, OP_VIEW_NAME

EARLIEST, LATEST = "earliest", "latest"

Start = str | int | dict[str, int]
"""``earliest``, ``latest``, microseconds since 1970, or offsets by topic partition (``"topic/shard/queue"``, see
planning.TopicPartition).
"""

READING = {
    "url": "the brokers, escrow://HOST:PORT[,HOST:PORT...], or file:FOLDER for a data folder without a broker (also: "
    "load(URL))",
    "topic": "a topic, several with commas between, or one system view: %half, %op, %acks, %group-acts, "
    "%dead-letters.GROUP",
    "topicPattern": "instead of topic: topics whose name matches this regular expression, new ones from the beginning",
    "start": "earliest (default of batches and of new queries), latest, a time (ISO 8601), or JSON {partition: offset}",
    "end": "batch only: latest (default), a time, or JSON {partition: offset}, each the first that is not read",
    "columns": "names with commas between: only these are read and sent (else all; schema(...) does the same)",
    "maxRowsPerPartition": "a range of a queue with more rows is cut (default 250000)",
    "maxRowsPerTrigger": "streaming: rows of one micro-batch, shared among queues by what waits in them (default: all)",
    "minRowsPerTrigger": "streaming: wait for this many rows before a micro-batch, at most maxTriggerDelay (default 1)",
    "maxTriggerDelay": "streaming: how long minRowsPerTrigger waits after a micro-batch: 30s, 5min (default 15min)",
    "maxBytesPerTrigger": "streaming: bytes of bodies of one micro-batch: 64MiB; at least one message (default: all)",
    "onPurged": "messages that left the log before they were read: fail (default), or skip: count and name them",
    "key": "only messages with this key",
    "tags": "only messages with one of these tags, || between",
    "queues": "of topics: only these queues, numbers with commas between",
    "storedFrom": "a time: only rows stored then or later (%op: decided, %acks: acknowledged, %group-acts: done)",
    "storedUntil": "a time: only rows stored (decided, acknowledged, done) before then",
    "group": "of %acks and %group-acts: only rows of this consumer group",
    "incomplete": "of a folder that may lack what was acknowledged last: warn (default) logs it, refuse raises",
    "tokenFile": "a file with the token, on the driver and on every worker (default: the variable ESCROWMQ_TOKEN_FILE)",
    "timeout": "seconds to wait for a broker (default 30)",
}
WRITING = {
    "url": "the brokers, escrow://HOST:PORT[,HOST:PORT...] (also: save(URL), start(URL))",
    "topic": "the topic of every row; without it the rows have a column topic",
    "group": "the producer group (default: spark.QUERY for streams, spark for batches)",
    "write_id": "batch only: a name under which a repeat of this very write is recognised and dropped",
    "adopt": "streams only: true to go on with a query whose batches so far the brokers do not know (default false)",
    "immunity": "seconds until the broker asks about undecided rows (default 3600)",
    "tokenFile": "a file with the token, on the driver and on every worker (default: the variable ESCROWMQ_TOKEN_FILE)",
    "timeout": "seconds to wait for a broker (default 30)",
}
_A_TIME = "a time such as 2026-01-31T12:00:00+00:00"
OF_SPARK = {"path", "checkpointlocation", "queryname"}
"""Options of Spark itself, in lower case, which Spark passes to every source and sink."""
OF_KAFKA = {
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "startingoffsets": "start",
    "endingoffsets": "end",
    "startingtimestamp": "start",
    "endingtimestamp": "end",
    "maxoffsetspertrigger": "maxRowsPerTrigger",
    "minoffsetspertrigger": "minRowsPerTrigger",
    "failondataloss": "onPurged",
    "kafka.bootstrap.servers": "url",
    "minpartitions": "maxRowsPerPartition",
    "assign": "queues",
}
"""Options of Spark's Kafka source, in lower case, and our equivalents."""
OF_STREAMS = ("maxRowsPerTrigger", "minRowsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger")
"""Options of streaming reads alone."""


_WITHOUT_KEYS = (OP_VIEW_NAME, ACK_VIEW_NAME, GROUP_ACT_VIEW_NAME)
"""Views whose rows the broker cannot filter by key or tag."""
_OF_GROUPS = (ACK_VIEW_NAME, GROUP_ACT_VIEW_NAME)
"""Views whose rows the broker can filter by consumer group."""


def _parse_start(name: str, text: str, words: tuple[str, ...]) -> Start:
    """Parse a word, a time, or offsets by topic partition."""
    word = text.strip().lower()
    if word in words:
        return word
    if word.startswith("{"):
        return _parse_offsets(name, text)
    return _parse_time(name, text, f"{', '.join(words)}, {_A_TIME}, or JSON {{partition: offset}}")


def _parse_time(name: str, text: str, right: str = _A_TIME) -> int:
    """Convert a time (ISO 8601; UTC if it has no zone) to microseconds since 1970. Raises Misuse(BAD_SETTING) with the
    valid forms, ``right``."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", right) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _parse_offsets(name: str, text: str) -> dict[str, int]:
    try:
        found: Any = json.loads(text)
    except ValueError as problem:
        raise Misuse(Code.BAD_SETTING, f"{name} is not JSON: {problem}") from None
    if not found or any(isinstance(at, bool) or not isinstance(at, int) or at < 0 for at in found.values()):
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", 'offsets look like {"orders/0000002a/0": 100}')
    return dict(found)


def _parse_names(name: str, text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(","))


def _parse_tags(name: str, text: str) -> tuple[str, ...]:
    if not (found := tuple(tag for tag in text.split("||") if tag)):
        raise Misuse(Code.BAD_SETTING, f"tags = {text!r}", "tags with || between")
    return found


def _parse_queues(name: str, text: str) -> tuple[int, ...]:
    parts = _parse_names(name, text)
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise Misuse(Code.BAD_SETTING, f"queues = {text!r}", "numbers of queues with commas between, such as 0,3")
    return tuple(sorted({int(part) for part in parts}))


def _parse_count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", "a whole number, at least 1")
    return int(text)


def _parse_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", "a positive number of seconds")
    return seconds


def _parse_quantity(unit: str, name: str, text: str) -> float:
    """Parse a positive amount of a unit of :mod:`escrowmq.settings`."""
    try:
        found = parse_quantity(text, unit)
    except ValueError as problem:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", str(problem)) from None
    if found <= 0:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", "more than 0")
    return found


def _parse_pattern(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as problem:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}: {problem}", "a regular expression of Python") from None
    return text


def _is_second(words: tuple[str, str], name: str, text: str) -> bool:
    """Parse an option with two valid words."""
    if (word := text.strip().lower()) not in words:
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", " or ".join(words))
    return word == words[1]


def _option(option: str, default: Any = None, parse: Callable[[str, str], Any] = lambda name, text: text) -> Any:
    """Return a dataclass field that an option sets, by the parser of its text."""
    return field(default=default, metadata={"option": option, "parse": parse})


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read: ``sources`` are topics, or one system view, or none if ``pattern`` chooses the topics.
    ``timeout`` and ``trigger_delay`` in seconds, ``stored_from`` and ``stored_until`` in microseconds since 1970.
    ``queues`` empty: all."""

    url: str
    sources: tuple[str, ...]
    start: Start = EARLIEST
    end: Start = LATEST
    columns: tuple[str, ...] | None = _option("columns", None, _parse_names)
    partition_rows: int = _option("maxRowsPerPartition", 250_000, _parse_count)
    pattern: str | None = _option("topicPattern", None, _parse_pattern)
    trigger_rows: int | None = _option("maxRowsPerTrigger", None, _parse_count)
    trigger_bytes: float | None = _option("maxBytesPerTrigger", None, partial(_parse_quantity, BYTES))
    waiting_rows: int = _option("minRowsPerTrigger", 1, _parse_count)
    trigger_delay: float = _option("maxTriggerDelay", 900.0, partial(_parse_quantity, SECONDS))
    skip_purged: bool = _option("onPurged", False, partial(_is_second, ("fail", "skip")))
    key: str | None = _option("key")
    tags: tuple[str, ...] = _option("tags", (), _parse_tags)
    queues: tuple[int, ...] = _option("queues", (), _parse_queues)
    stored_from: int | None = _option("storedFrom", None, _parse_time)
    stored_until: int | None = _option("storedUntil", None, _parse_time)
    group: str | None = _option("group")
    refuse_incomplete: bool = _option("incomplete", False, partial(_is_second, ("warn", "refuse")))
    token_file: str | None = _option("tokenFile")
    timeout: float = _option("timeout", 30.0, _parse_seconds)

    @property
    def first_source(self) -> str:
        """The topic or system view that the columns are those of; empty for the topics of a pattern."""
        return self.sources[0] if self.sources else ""

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of a read request (see :class:`escrowmq.wire.ReadRequest`), which the broker applies. System
        views have no offsets by time, so for them times in ``start`` and ``end`` become filters, too."""
        view = self.first_source.startswith("%")
        since, until = (at if view and isinstance(at, int) else None for at in (self.start, self.end))
        wanted = {
            "key": self.key,
            "tags": list(self.tags) or None,
            "stored_from_us": max((at for at in (since, self.stored_from) if at is not None), default=None),
            "stored_until_us": min((at for at in (until, self.stored_until) if at is not None), default=None),
            "group": self.group,
        }
        return {name: value for name, value in wanted.items() if value is not None}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write. Times are in seconds."""

    url: str
    topic: str | None = _option("topic")
    group: str | None = _option("group")
    write_id: str | None = _option("write_id")
    immunity: float = _option("immunity", 3600.0, _parse_seconds)
    token_file: str | None = _option("tokenFile")
    timeout: float = _option("timeout", 30.0, _parse_seconds)
    checkpoint: str | None = _option("checkpointLocation")
    adopt: bool = _option("adopt", False, partial(_is_second, ("false", "true")))


def read_options(options: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
    """Parse the options of a read; with ``streaming`` None of either kind. Raises Misuse(BAD_SETTING) that names the
    wrong option and the nearest valid one."""
    given = _select_known(options, READING)
    sources = tuple(name.strip() for name in given.get("topic", "").split(",") if name.strip())
    if bool(sources) == ("topicpattern" in given):
        text = "options 'topic' and 'topicPattern' were given" if sources else "option 'topic' is missing"
        raise Misuse(Code.BAD_SETTING, text, "a topic, a system view such as %half, or topicPattern")
    if len(sources) > 1 and any(name.startswith("%") for name in sources):
        raise Misuse(Code.BAD_SETTING, "a system view is read alone", "one DataFrame for each, then join them")
    if len(set(sources)) < len(sources):
        raise Misuse(Code.BAD_SETTING, f"option 'topic' names a topic twice: {given['topic']!r}")
    if streaming and "end" in given:
        hint = "use trigger(availableNow=True) to stop at what is there"
        raise Misuse(Code.BAD_SETTING, "a stream has no 'end'", hint)
    if streaming is False and (name := next((name for name in OF_STREAMS if name.lower() in given), None)):
        hint = "maxRowsPerPartition cuts the ranges of a batch"
        raise Misuse(Code.BAD_SETTING, f"{name!r} is of streams", hint)
    _check_filters(sources[0] if sources else "", given)
    found = ReadOptions(
        url=_read_url(given),
        sources=sources,
        start=_parse_start("start", given.get("start", EARLIEST), (EARLIEST, LATEST)),
        end=_parse_start("end", given.get("end", LATEST), (LATEST,)),
        **_parse_each(given, ReadOptions),
    )
    if found.waiting_rows > (found.trigger_rows or found.waiting_rows):
        raise Misuse(Code.BAD_SETTING, "minRowsPerTrigger is more than maxRowsPerTrigger")
    return found


def _check_filters(source: str, given: Mapping[str, str]) -> None:
    """Raise Misuse(BAD_SETTING) for a filter that the broker cannot apply to this source."""
    filtered = "filter its rows with where(...)"
    for names, is_unfit, hint in (
        (("key", "tags"), source in _WITHOUT_KEYS, filtered),
        (("queues",), source.startswith("%"), filtered),
        (("group",), source not in _OF_GROUPS, f"{' and '.join(_OF_GROUPS)} have"),
        (("maxBytesPerTrigger",), source in _WITHOUT_KEYS, "maxRowsPerTrigger"),
    ):
        for name in names:
            if is_unfit and name.lower() in given:
                raise Misuse(Code.BAD_SETTING, f"{source} has no option {name!r}", hint)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raises Misuse(BAD_SETTING) that names the wrong option and the nearest valid
    one."""
    given = _select_known(options, WRITING)
    url = _read_url(given)
    if url.startswith("file:"):
        text = f"{url!r}: many processes cannot write to one folder"
        raise Misuse(Code.BAD_URL, text, "start `escrowmq serve` on it")
    return WriteOptions(url=url, **_parse_each(given, WriteOptions))


def _select_known(options: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """Return the given options by lower-case name. Raises Misuse(BAD_SETTING) for an option that is not in the
    table."""
    names = {name.lower(): name for name in table}
    given: dict[str, str] = {}
    for name, value in options.items():
        lower = name.lower()
        if lower == "token":
            text = "a token in an option would be part of every plan of Spark"
            raise Misuse(Code.BAD_SETTING, text, "use the option 'tokenFile', or the variable ESCROWMQ_TOKEN_FILE")
        if lower not in names and lower not in OF_SPARK:
            wanted = f"did you mean {OF_KAFKA[lower]!r}?" if lower in OF_KAFKA else nearest(lower, list(names))
            raise Misuse(Code.BAD_SETTING, f"no option {name!r}", wanted or f"there are {', '.join(names.values())}")
        given[lower] = str(value)
    return given


def _read_url(given: Mapping[str, str]) -> str:
    url = given.get("url") or given.get("path")
    if not url:
        raise Misuse(Code.BAD_SETTING, "option 'url' is missing", READING["url"])
    # Spark converts the argument of load() to a path: "escrow://host:7700" may come back as "escrow:/host:7700".
    scheme, _, rest = url.partition(":")
    return f"{scheme}://{rest.lstrip('/')}" if scheme in ("escrow", "escrows") else absolute(url)


def absolute(url: str) -> str:
    """Return the URL with an absolute path if it names a folder, because executors run in other working directories."""
    return f"file:{Path(url.removeprefix('file:')).absolute()}" if url.startswith("file:") else url


def _parse_each(given: Mapping[str, str], kind: type[ReadOptions | WriteOptions]) -> dict[str, Any]:
    """Return the fields of the given options."""
    found = {}
    for one in fields(kind):
        if one.metadata and (text := given.get(one.metadata["option"].lower())) is not None:
            found[one.name] = one.metadata["parse"](one.metadata["option"], text)
    return found
