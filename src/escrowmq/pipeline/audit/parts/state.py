"""The state of incremental audits: the sums of the messages that an earlier audit has read, by window.

A log only grows, so the sums of its first part stay valid, and only later messages are read. A part is *settled* if it
cannot change any more: visible messages at once, half messages before the first undecided one. The state is used if the
log still begins at the same offsets and has the same messages where the settled part ends; otherwise everything is
read. Tables may change anywhere: their sums are always computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq import __version__
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.pipeline.audit.manifest import Comparison, Manifest
from escrowmq.pipeline.audit.rows import SETTLED, Grown, Rows, Sums
from escrowmq.pipeline.log import BrokerLog
from escrowmq.pipeline.sql.summing import DIGEST
from escrowmq.pipeline.timeline import UNDECIDED
from escrowmq.spark import brokers
from escrowmq.spark.options import read_options
from escrowmq.spark.planning import TopicPartition
from escrowmq.wire import HALF_VIEW_NAME, Link, ReadRequest

FORMAT = 1
Mark = list[Any]
"""A message by which a log is recognized: ``[position, stored_us, message id in hex]``."""


@dataclass(frozen=True, slots=True)
class Part:
    """The settled part of a topic partition, or of the half messages of a shard: offsets (positions) from ``head`` to
    before ``through``. ``mark`` is a message at ``mark_at``; None if there was none."""

    head: int
    through: int
    mark_at: int = 0
    mark: Mark | None = None


@dataclass(slots=True)
class State:
    """A state file. ``key`` tells of which comparisons the sums are; sums of others are not used."""

    path: Path
    key: str = ""
    parts: dict[str, Part] = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> State:
        """Read a state file. Returns an empty state if there is no file. Raises Misuse(BAD_ARGUMENT) for a file that is
        no state, is damaged, or cannot be written."""
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
            text = path.read_text() if path.exists() else ""
        except (OSError, ValueError) as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"{path} cannot be used as a state: {problem}") from None
        if not path.exists():
            return cls(path)
        try:
            raw = json.loads(text)
            body = raw["state"]
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']}, not {FORMAT}")
            if raw["sha256"] != _hash(body):
                raise ValueError("its checksum is wrong")
            parts = msgspec.convert(body["parts"], dict[str, Part])
            lines = msgspec.convert(body["sums"], list[tuple[int, bool, int, int, int, int]])
            return cls(path, msgspec.convert(body["key"], str), parts, {line[:3]: line[3:] for line in lines})
        except (ValueError, TypeError, KeyError, IndexError) as problem:
            hint = "remove it: the next audit reads everything"
            raise Misuse(Code.BAD_ARGUMENT, f"{path} is not a state of an audit: {problem}", hint) from None

    def write(self) -> None:
        """Write the state to its file, synced; the file is replaced as a whole."""
        parts = {name: asdict(part) for name, part in self.parts.items()}
        body = {"key": self.key, "parts": parts, "sums": [[*at, *values] for at, values in self.sums.items()]}
        text = json.dumps({"format": FORMAT, "sha256": _hash(body), "state": body})
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=self.path.name, delete=False) as file:
            try:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self.path)
            except OSError:
                os.unlink(file.name)
                raise

    def attach(self, sides: Sequence[Rows], key: str, manifest: Manifest, log: BrokerLog) -> list[Rows]:
        """Return the sides; those that only grow use the sums of this state, and pass it the new ones when they are
        summed. ``key`` describes what is summed: a state of another key, or of another log, is emptied first."""
        growing = [rows for rows in sides if rows.growth is not None]
        sources = sorted({source for rows in growing if rows.growth for source in rows.growth.sources})
        with brokers.opened(manifest.log_url) as links:
            at = {link.address: link for link in links}
            there = {one.name: one for one in _list_partitions(links, manifest.log_url, sources)}
            if self.key != key or not all(_is_same(part, there.get(name), at) for name, part in self.parts.items()):
                self.parts, self.sums = {}, {}
            parts = {name: self._find_part(name, one, at) for name, one in there.items()}
        parts |= self._find_settled_halves(log, manifest.topics, there)
        starts = {name: part.through for name, part in self.parts.items()}
        before, self.key, self.parts, self.sums = self.sums, key, parts, {}
        return [self._grow(rows, starts, before) if rows.growth is not None else rows for rows in sides]

    def _grow(self, rows: Rows, starts: Mapping[str, int], before: Sums) -> Rows:
        assert rows.growth is not None
        sources = rows.growth.sources
        mine = {name: at for name, at in starts.items() if _find_source(name) in sources}
        roles = {(role.comparison, role.expected) for speaker in rows.speakers for role in speaker.roles}
        of_mine = {at: values for at, values in before.items() if at[:2] in roles}
        limits = {name: part.through for name, part in self.parts.items() if _find_source(name) in sources}
        read = rows.growth.read

        def read_fresh() -> DataFrame:
            return read(mine).withColumn(SETTLED, _is_before(limits, sources == (HALF_VIEW_NAME,)))

        sum_ = rows.sum_windows and partial(rows.sum_windows, starts=mine, limits=limits)
        return replace(rows, grown=Grown(read_fresh, of_mine, self.sums.update), sum_windows=sum_)

    def _find_part(self, name: str, there: TopicPartition, at: Mapping[str, Link]) -> Part:
        """Return the settled part of the topic partition ``there``: all its messages, if the last of them is readable;
        else as in the state so far. Half messages: as in the state. ``at``: the links by address."""
        known = self.parts.get(name, Part(there.head, there.head))
        if there.end == known.through or there.source == HALF_VIEW_NAME:
            return known
        last = there.end - 1
        mark = _read_mark(at[there.broker], there.source, there.queue, last)
        return known if mark is None else Part(known.head, there.end, last, mark)

    def _find_settled_halves(
        self, log: BrokerLog, topics: Sequence[str], there: Mapping[str, TopicPartition]
    ) -> dict[str, Part]:
        """Return by name of the partition the settled part of each shard's half messages: those before the first
        undecided one."""
        ends = {name: one.end for name, one in there.items() if one.source == HALF_VIEW_NAME}
        if not ends:
            return {}
        starts = {name: part.through for name, part in self.parts.items() if name in ends}
        half = log.half(["shard", "position", "stored", "message_id", "topic", "state"], starts)
        open_ = f.col("state").isin(*UNDECIDED) & f.col("topic").isin(*topics)
        mark = f.struct("position", f.unix_micros("stored").alias("us"), f.lower(f.hex("message_id")).alias("id"))
        found = half.where(_is_before(ends, True)).groupBy("shard")
        settled = found.agg(f.min(f.when(open_, f.col("position"))).alias("first"), f.max(mark).alias("last")).collect()
        by_name = {f"{HALF_VIEW_NAME}/{row['shard']:08x}/0": row for row in settled}
        parts = {}
        for name, end in ends.items():
            known, row = self.parts.get(name, Part(there[name].head, there[name].head)), by_name.get(name)
            if row is None:
                parts[name] = replace(known, through=end)
            else:
                through = end if row["first"] is None else row["first"]
                parts[name] = Part(known.head, through, row["last"]["position"], list(row["last"]))
        return parts


def make_key(
    manifest: Manifest, every: Sequence[Comparison], sides: Sequence[Rows], windows: int, sample: int | None
) -> str:
    """Return a hash that is the same if an audit computes the same sums, for :meth:`State.attach`."""
    roles = [
        (role.comparison, role.expected, role.columns, rows.served, role.comparison in rows.summed)
        for rows in sides
        for speaker in rows.speakers
        for role in speaker.roles
    ]
    of = [c.sides for c in every]
    return _hash([__version__, DIGEST, windows, sample, manifest.ids, manifest.topics, of, sorted(roles)])


def _hash(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _is_before(limits: Mapping[str, int], is_half: bool) -> Column:
    """Return the condition that a message (by offset) or half message (by position) is before the limit of its
    partition. ``limits``: by name of the partition; False for others."""
    source, queue = (f.lit(HALF_VIEW_NAME), f.lit("0")) if is_half else (f.col("topic"), f.col("queue").cast("string"))
    name = f.concat_ws("/", source, f.lpad(f.lower(f.hex("shard")), 8, "0"), queue)
    known = f.create_map(*[f.lit(one) for pair in limits.items() for one in pair])
    place = f.col("position" if is_half else "offset")
    return f.coalesce(place < f.try_element_at(known, name), f.lit(False))


def _find_source(name: str) -> str:
    return name.rsplit("/", 2)[0]


def _list_partitions(links: Sequence[Link], url: str, sources: Sequence[str]) -> list[TopicPartition]:
    found = []
    for source in sources:
        found += brokers.topic_partitions(links, read_options({"url": url, "topic": source}))
    return found


def _is_same(part: Part, there: TopicPartition | None, at: Mapping[str, Link]) -> bool:
    """Return whether the log still has the messages of a part: its offsets, and the message that marks its end.
    ``there``: its partition now, None if it is gone."""
    if there is None or there.head > part.head or there.end < part.through:
        return False
    return part.mark is None or part.mark == _read_mark(at[there.broker], there.source, there.queue, part.mark_at)


def _read_mark(link: Link, source: str, queue: int, at: int) -> Mark | None:
    """Return position, time (µs) and id of the message at an offset, or of the half message at a position; None if it
    is not readable."""
    request: dict[str, Any] = {"source": source, "start": at, "max_rows": 1}
    request["columns"] = ["position", "stored_us", "message_id"]
    if source != HALF_VIEW_NAME:
        request |= {"queue": queue, "end": at + 1}
    try:
        rows = link.read(cast(ReadRequest, request)).read_all().to_pylist()
    except EscrowError:
        return None
    return [rows[0]["position"], rows[0]["stored_us"], bytes(rows[0]["message_id"]).hex()] if rows else None
