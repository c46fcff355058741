"""Offset arithmetic: which ranges of offsets become which Spark partitions, and where a micro-batch ends.

Pure functions: no broker and no Spark. An offset is always the *next* one to read. Topic partitions are ordered by
name, so the same offsets give the same Spark partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from escrowmq.errors import Code, Misuse, error
from escrowmq.spark.options import EARLIEST, LATEST, Start

Offsets = dict[str, int]
"""The next offset to read of each topic partition, by its name. The end of a stream's batch also has notes. Their keys
have a space, and names have none: ``NAME + BEGINS``: where the batch begins to read this partition, if no batch before
it has read it, or offsets are skipped; ``NAME + SKIPPED + " FIRST"``: offsets FIRST to that value were purged, and are
skipped; ``SKIPPED``: how many offsets the query has skipped so far.
"""

BEGINS, SKIPPED = " begins", " skipped"


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One queue of a topic at one broker, or a system view of one broker (``queue`` 0, offsets are log positions).
    ``head`` is the first stored offset, ``end`` the one after the last; ``start_at`` and ``end_at`` are the first
    offsets not older than the times of the options ``start`` and ``end``, -1 where the option is no time."""

    source: str
    shard: int
    queue: int
    broker: str
    head: int
    end: int
    start_at: int = -1
    end_at: int = -1

    @property
    def name(self) -> str:
        """The key in offsets: ``topic/shard/queue``, with the shard in hexadecimal."""
        return f"{self.source}/{self.shard:08x}/{self.queue}"


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets ``start`` .. ``end``-1 of a topic partition."""

    partition: TopicPartition
    start: int
    end: int


def first_offsets(partitions: Iterable[TopicPartition], start: Start) -> Offsets:
    """Return the offsets at which a read begins. Raises Misuse(BAD_SETTING) for offsets of an unknown topic
    partition."""
    return _resolve(list(partitions), start, "start")


def last_offsets(partitions: Iterable[TopicPartition], end: Start) -> Offsets:
    """Return the offsets at which a read ends. Raises as :func:`first_offsets`."""
    return _resolve(list(partitions), end, "end")


def _resolve(partitions: list[TopicPartition], wanted: Start, what: str) -> Offsets:
    if isinstance(wanted, dict):
        known = {partition.name for partition in partitions}
        if unknown := sorted(wanted.keys() - known):
            there = ", ".join(sorted(known)[:4]) + (", ..." if len(known) > 4 else "")
            raise Misuse(Code.BAD_SETTING, f"{what}: there is no {unknown[0]!r}", f"there are {there}")
    elif wanted not in (EARLIEST, LATEST):
        return {partition.name: partition.start_at if what == "start" else partition.end_at for partition in partitions}
    early = wanted == EARLIEST or (wanted != LATEST and what == "start")
    offsets = {partition.name: partition.head if early else partition.end for partition in partitions}
    return offsets | (wanted if isinstance(wanted, dict) else {})


def ranges(partitions: Sequence[TopicPartition], start: Mapping[str, int], end: Mapping[str, int]) -> list[OffsetRange]:
    """Return the ranges between two sets of offsets, without empty ones. A partition that ``start`` does not contain is
    new: it is read from its first message. Raises Rejected(RANGE_PURGED) if part of a range has left the log, so a
    range never returns fewer rows, and Misuse(BAD_SETTING) for offsets of other brokers."""
    found = []
    by_name = {partition.name: partition for partition in partitions}
    for name in sorted(end):
        partition = by_name.get(name)
        first, last = start.get(name, partition.head if partition else 0), end[name]
        if first >= last:
            continue
        if partition is None:
            text = f"there is no {name!r} at these brokers"
            raise Misuse(Code.BAD_SETTING, text, "is the url that of another cluster?")
        if first < partition.head:
            what = f"{name}: offset {first} has left the log; the first is {partition.head}"
            raise error(Code.RANGE_PURGED, what, "start a new query at the earliest, or keep more: retention")
        if last > partition.end:
            text = f"{name} ends at {partition.end}, before {last}"
            raise Misuse(Code.BAD_SETTING, text, "is this another data folder?")
        found.append(OffsetRange(partition, first, last))
    return found


def skip_purged(
    partitions: Iterable[TopicPartition], start: Mapping[str, int], end: Mapping[str, int]
) -> tuple[Offsets, list[OffsetRange]]:
    """Return ``start`` moved to the first stored offset of each partition, and the ranges between it and ``end`` that
    have left the log."""
    gone = [
        OffsetRange(one, start[one.name], min(one.head, end[one.name]))
        for one in partitions
        if one.name in start and start[one.name] < min(one.head, end.get(one.name, 0))
    ]
    return {**start, **{one.partition.name: one.end for one in gone}}, gone


def cut(found: Iterable[OffsetRange], rows: int) -> list[OffsetRange]:
    """Split the ranges into ranges of at most ``rows`` offsets, of nearly equal size."""
    parts: list[OffsetRange] = []
    for whole in found:
        every = whole.end - whole.start
        count = -(-every // rows)
        edges = [whole.start + every * n // count for n in range(count + 1)]
        parts += [OffsetRange(whole.partition, first, stop) for first, stop in pairwise(edges)]
    return parts


def limit_rows(start: Mapping[str, int], end: Mapping[str, int], rows: int | None) -> Offsets:
    """Return the end of a micro-batch: ``end``, or less, so that it has at most ``rows`` offsets. Each partition gets a
    share in proportion to its pending offsets, and at least one offset as long as ``rows`` allows, so no queue
    starves."""
    waiting = {name: max(stop - start.get(name, stop), 0) for name, stop in end.items()}
    total = sum(waiting.values())
    if rows is None or total <= rows:
        return {name: max(stop, start.get(name, stop)) for name, stop in end.items()}
    biggest = sorted((name for name in waiting if waiting[name]), key=lambda name: (-waiting[name], name))
    served = biggest[:rows]
    spare, rest = rows - len(served), total - len(served)
    shares = {name: 1 + spare * (waiting[name] - 1) // rest for name in served}
    for name in served[: rows - sum(shares.values())]:  # the remainder of rounding down
        shares[name] += 1
    return {name: start.get(name, stop) + shares.get(name, 0) for name, stop in end.items()}


def limit_bytes(
    found: Iterable[OffsetRange], most: float, fit: Callable[[OffsetRange, float], tuple[int, int]]
) -> Offsets:
    """Return where ranges end so that their messages have at most ``most`` bytes together. They share equally, and
    shorter ones leave the rest of their share to longer ones. ``fit(range, bytes)`` returns the offset up to which a
    range fits, and the bytes up to there. If the next message of the longest range does not fit its share, that range
    is read alone, and at least that message: so every range has its turn."""
    by_length = sorted(found, key=lambda one: (one.end - one.start, one.partition))
    ends: Offsets = {}
    left = most
    for number, one in enumerate(by_length):
        ends[one.partition.name], used = fit(one, left / (len(by_length) - number))
        left -= used
    if by_length and ends[(longest := by_length[-1]).partition.name] == longest.start:
        stop, used = fit(longest, most)
        ends = {one.partition.name: one.start for one in by_length}
        ends[longest.partition.name] = stop if used else min(stop + 1, longest.end)
    return ends


def known_start(start: Mapping[str, int], partitions: Iterable[TopicPartition]) -> Offsets:
    """Return ``start``, and the head of each partition that is new since then. Raises Misuse(BAD_SETTING) if a
    partition of ``start`` does not exist. Otherwise a checkpoint of other brokers would silently start again from the
    beginning."""
    heads = {partition.name: partition.head for partition in partitions}
    if gone := sorted(start.keys() - heads.keys()):
        text = f"there is no {gone[0]!r} at these brokers, or the query does not read it"
        raise Misuse(Code.BAD_SETTING, text, "is the checkpoint that of another query, or of another cluster?")
    return heads | dict(start)


def ends(offsets: Mapping[str, int]) -> Offsets:
    """Return the offsets without their notes."""
    return {name: at for name, at in offsets.items() if " " not in name}


def add_beginnings(end: Mapping[str, int], beginnings: Mapping[str, int]) -> Offsets:
    """Add to the end of a batch a note of where it begins in each partition that it is the first to read, or whose next
    offsets it skips. Spark stores only ends. Without these notes, a batch that is repeated after a crash would
    determine its beginning again, and find later messages ("latest") or fewer of them (retention). A query that found
    no partition notes that, too: partitions that come later are read from their first message."""
    return {**end, **{name + BEGINS: at for name, at in beginnings.items()}} or {BEGINS: 0}


def add_skipped(end: Offsets, gone: Iterable[OffsetRange], before: Mapping[str, int]) -> Offsets:
    """Add to the end of a batch the offsets that it skips, and how many that makes since the query began."""
    skipped = {f"{one.partition.name}{SKIPPED} {one.start}": one.end for one in gone}
    total = before.get(SKIPPED, 0) + sum(one.end - one.start for one in gone)
    return {**end, **skipped, **({SKIPPED: total} if total else {})}


def find_starts(start: Mapping[str, int], end: Mapping[str, int]) -> Offsets:
    """Return where a batch begins: at the end of the batch before it, or later, where the notes in its own end say."""
    noted = {name.removesuffix(BEGINS): at for name, at in end.items() if name.endswith(BEGINS)}
    before = ends(start)
    return before | {name: max(at, before.get(name, 0)) for name, at in noted.items()}
