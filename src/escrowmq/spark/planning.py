"""Offset arithmetic: which ranges of which queues become which Spark partitions, and how far a micro-batch goes.

Pure: no broker and no Spark. An offset is always the *next* one. The order of places, and so of partitions, is fixed by
their names: the same ranges give the same partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from escrowmq.errors import Code, Misuse, error
from escrowmq.spark.options import EARLIEST, LATEST, Start

Offsets = dict[str, int]
"""By place: the next offset to read. The end of a batch of a stream also has, under ``NAME + BEGINS``, where it begins to read a
place that no batch before it has read."""

BEGINS = " begins"
"""Behind the name of a place, which has no blanks."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One queue of a topic at one broker, or a system view of one broker (``queue`` 0, offsets are log positions).

    ``head`` is the first offset that is stored, ``end`` that behind the last; ``start_at`` and ``end_at`` are the first offsets not
    older than the times that were asked for, -1 if none was.
    """

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
        """How offsets name it: ``topic/shard/queue``, the shard in hexadecimal."""
        return f"{self.source}/{self.shard:08x}/{self.queue}"


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets ``start`` .. ``end``-1 of a place."""

    place: Place
    start: int
    end: int


def first_offsets(places: Iterable[Place], start: Start) -> Offsets:
    """Where reading begins."""
    return _resolve(list(places), start, "start")


def last_offsets(places: Iterable[Place], end: Start) -> Offsets:
    """Where reading ends."""
    return _resolve(list(places), end, "end")


def _resolve(places: list[Place], wanted: Start, what: str) -> Offsets:
    if isinstance(wanted, dict):
        known = {place.name for place in places}
        if unknown := sorted(wanted.keys() - known):
            there = ", ".join(sorted(known)[:4]) + (", ..." if len(known) > 4 else "")
            raise Misuse(Code.BAD_SETTING, f"{what}: there is no {unknown[0]!r}", f"there are {there}")
        rest = {place.name: place.head if what == "start" else place.end for place in places}
        return rest | wanted
    if wanted == EARLIEST:
        return {place.name: place.head for place in places}
    if wanted == LATEST:
        return {place.name: place.end for place in places}
    return {place.name: place.start_at if what == "start" else place.end_at for place in places}


def ranges(places: Sequence[Place], start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """What lies between two offsets, empty ranges left out.

    A place that ``start`` does not know is new: it is read from its first message. Raises Rejected(RANGE_PURGED) if part of a
    range has left the log: it never gives fewer rows.
    """
    found = []
    by_name = {place.name: place for place in places}
    for name in sorted(end):
        place = by_name.get(name)
        first, last = start.get(name, place.head if place else 0), end[name]
        if first >= last:
            continue
        if place is None:
            raise Misuse(
                Code.BAD_SETTING, f"there is no {name!r} at these brokers", "is the url that of another cluster?"
            )
        if first < place.head:
            what = f"{name}: offset {first} has left the log; the first is {place.head}"
            raise error(Code.RANGE_PURGED, what, "start a new query at the earliest, or keep more: retention")
        if last > place.end:
            raise Misuse(Code.BAD_SETTING, f"{name} ends at {place.end}, before {last}", "is this another data folder?")
        found.append(Range(place, first, last))
    return found


def cut(found: Iterable[Range], rows: int) -> list[Range]:
    """Ranges of at most ``rows`` offsets each, as even as can be."""
    pieces = []
    for whole in found:
        count = -(-(whole.end - whole.start) // rows)
        size, rest = divmod(whole.end - whole.start, count)
        at = whole.start
        for number in range(count):
            stop = at + size + (number < rest)
            pieces.append(Range(whole.place, at, stop))
            at = stop
    return pieces


def limited(start: Mapping[str, int], end: Mapping[str, int], rows: int | None) -> Offsets:
    """As far as ``end``, with at most ``rows`` offsets in all: every place gets a share by what waits in it, at least one
    while there is something left to share, so that no queue starves."""
    waiting = {name: max(stop - start.get(name, stop), 0) for name, stop in end.items()}
    total = sum(waiting.values())
    if rows is None or total <= rows:
        return {name: max(stop, start.get(name, stop)) for name, stop in end.items()}
    shares = {name: min(count, max(rows * count // total, 1)) if count else 0 for name, count in waiting.items()}
    over = sum(shares.values()) - rows
    for name in sorted(shares, key=lambda name: (-shares[name], name)):  # at least one each can be too many
        if over <= 0:
            break
        taken = min(over, shares[name])
        shares[name] -= taken
        over -= taken
    left = -over
    for name in sorted(waiting, key=lambda name: (shares[name] - waiting[name], name)):
        more = min(left, waiting[name] - shares[name])
        shares[name] += more
        left -= more
    return {name: start.get(name, stop) + shares[name] for name, stop in end.items()}


def known_start(start: Mapping[str, int], places: Iterable[Place]) -> Offsets:
    """``start`` with the places that came since, from their first message on. Raises Misuse(BAD_SETTING) if one of ``start`` is gone:
    a checkpoint of other brokers would else begin anew without a word."""
    heads = {place.name: place.head for place in places}
    if gone := sorted(start.keys() - heads.keys()):
        raise Misuse(
            Code.BAD_SETTING,
            f"there is no {gone[0]!r} at these brokers, or the query does not read it",
            "is the checkpoint that of another query, or of another cluster?",
        )
    return heads | dict(start)


def ends(offsets: Mapping[str, int]) -> Offsets:
    """The ends alone."""
    return {name: at for name, at in offsets.items() if not name.endswith(BEGINS)}


def noted(end: Mapping[str, int], beginnings: Mapping[str, int]) -> Offsets:
    """The end of a batch that is the first to read some places, with where it begins to.

    Spark remembers only ends. Without these notes a batch that runs again, after a crash, would look anew for where it begins,
    and find later messages ("latest"), or fewer of them (retention).
    """
    return {**end, **{name + BEGINS: at for name, at in beginnings.items()}}


def begun(start: Mapping[str, int], end: Mapping[str, int]) -> Offsets:
    """Where a batch begins: at the ends of the one before, else as its own end noted it."""
    return {name.removesuffix(BEGINS): at for name, at in end.items() if name.endswith(BEGINS)} | ends(start)
