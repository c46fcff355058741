"""Filter push-down: filters that offsets or the broker can evaluate exactly; Spark evaluates the others.

``key``, ``tag``: equality (``tag`` also IN). ``queue``: equality. ``offset`` (not of a view), ``stored`` (``decided`` of
``%op``, ``acked`` of ``%acks``, ``acted`` of ``%group-acts``): bounds. ``group`` of the last two: equality. Each is evaluated on the same values that Spark would
see, so a pushed filter is not evaluated again. Needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

FAR = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Pushed:
    """The filters that were pushed down. ``queue`` None: all; offsets ``low`` .. ``high``-1; times ``since_us`` .. ``until_us``-1."""

    key: str | None = None
    tags: tuple[str, ...] = ()
    queue: int | None = None
    low: int = 0
    high: int = FAR
    since_us: int | None = None
    until_us: int | None = None
    group: str | None = None

    @property
    def request(self) -> dict[str, Any]:
        """The filters of a read request (see :class:`escrowmq.wire.ReadRequest`)."""
        asked = {
            "key": self.key,
            "tags": list(self.tags) or None,
            "stored_from_us": self.since_us,
            "stored_until_us": self.until_us,
            "group": self.group,
        }
        return {name: value for name, value in asked.items() if value is not None}


Taken = Pushed | None
Act = Callable[[Pushed, Any], Taken]
"""Pushes one filter with its value down; None: the filter is left to Spark."""


def pushable(source: str, columns: Iterable[str]) -> list[str]:
    """The columns whose filters can be pushed down. A system view is read as a whole: queues and offsets do not narrow it."""
    return [name for name in columns if not (source.startswith("%") and name in ("queue", "offset"))]


def push(filters: Iterable[Any], before: Pushed, columns: Iterable[str]) -> tuple[Pushed, list[Any]]:
    """``before`` with those of ``filters`` that can be pushed down, and the list of those that cannot. ``columns``: :func:`pushable` ones."""
    there = set(columns)
    pushed, left = before, []
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())
        act = _ACTS.get((type(one).__name__, path[0])) if len(path) == 1 and path[0] in there else None
        taken = act(pushed, one.value) if act is not None else None
        if taken is None:
            left.append(one)
        else:
            pushed = taken
    return pushed, left


def _equal(name: str, fits: Callable[[Any], bool]) -> Act:
    """An equality with a value that ``fits``; a second one with another value is left to Spark."""

    def act(pushed: Pushed, value: Any) -> Taken:
        fresh = fits(value) and getattr(pushed, name) in (None, value)
        return replace(pushed, **{name: value}) if fresh else None

    return act


def _tag(pushed: Pushed, value: Any) -> Taken:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(tag, str) and tag for tag in values):
        return None
    both = tuple(tag for tag in values if tag in pushed.tags) if pushed.tags else values
    return replace(pushed, tags=both) if both else None


def _bounds(
    column: str, low: str, high: str, measure: Callable[[Any], int | None]
) -> Iterator[tuple[tuple[str, str], Act]]:
    """The four comparisons with a column, each of which moves the field ``low`` up or ``high`` (not included) down."""
    yield ("GreaterThanOrEqual", column), lambda p, v: _narrowed(p, low, measure(v), 0)
    yield ("GreaterThan", column), lambda p, v: _narrowed(p, low, measure(v), 1)
    yield ("LessThan", column), lambda p, v: _narrowed(p, high, measure(v), 0)
    yield ("LessThanOrEqual", column), lambda p, v: _narrowed(p, high, measure(v), 1)


def _narrowed(pushed: Pushed, field: str, value: int | None, more: int) -> Taken:
    if value is None:
        return None
    before, bound = getattr(pushed, field), value + more
    rises = field in ("low", "since_us")
    tighter: Any = max(before or 0, bound) if rises else bound if before is None else min(before, bound)
    return replace(pushed, **{field: tighter})


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _offset(value: Any) -> int | None:
    return value if _whole(value) else None


def _microseconds(value: Any) -> int | None:
    """Microseconds since 1970 of a time with a zone. None for one without: it is in the session's zone, which is not known here."""
    if not isinstance(value, datetime) or value.tzinfo is None or value.year < 1970:
        return None
    return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


_ACTS: dict[tuple[str, str], Act] = {
    ("EqualTo", "key"): _equal("key", _text),
    ("EqualTo", "tag"): _tag,
    ("In", "tag"): _tag,
    ("EqualTo", "queue"): _equal("queue", _whole),
    ("EqualTo", "group"): _equal("group", _text),
    **dict(_bounds("offset", "low", "high", _offset)),
    **dict(_bounds("stored", "since_us", "until_us", _microseconds)),
    **dict(_bounds("decided", "since_us", "until_us", _microseconds)),
    **dict(_bounds("acked", "since_us", "until_us", _microseconds)),
    **dict(_bounds("acted", "since_us", "until_us", _microseconds)),
}
