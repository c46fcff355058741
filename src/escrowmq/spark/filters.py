"""Filter push-down: the filters of Spark that offsets or the broker evaluate exactly; the rest goes back to Spark.

``key``, ``tag``: equality (``tag`` also IN). ``queue``: equality. ``offset`` (not of a view), ``stored`` (``decided`` of
``%op``, ``acked`` of ``%acks``): bounds. ``group`` of ``%acks``: equality. Each is evaluated on the same values that Spark would
see, so a pushed filter is not evaluated again. Needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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


def _equal(name: str, fits: Callable[[Any], bool]) -> Callable[[Pushed, Any], Taken]:
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


def _low(pushed: Pushed, value: Any, more: int) -> Taken:
    return replace(pushed, low=max(pushed.low, value + more)) if _whole(value) else None


def _high(pushed: Pushed, value: Any, more: int) -> Taken:
    return replace(pushed, high=min(pushed.high, value + more)) if _whole(value) else None


def _since(pushed: Pushed, value: Any, more: int) -> Taken:
    at = _microseconds(value)
    return None if at is None else replace(pushed, since_us=max(pushed.since_us or 0, at + more))


def _until(pushed: Pushed, value: Any, more: int) -> Taken:
    if (at := _microseconds(value)) is None:
        return None
    return replace(pushed, until_us=min(FAR if pushed.until_us is None else pushed.until_us, at + more))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _microseconds(value: Any) -> int | None:
    """Microseconds since 1970 of a time with a zone. None for one without: it is in the session's zone, which is not known here."""
    if not isinstance(value, datetime) or value.tzinfo is None or value.year < 1970:
        return None
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _bounds(
    column: str, low: Callable[..., Taken], high: Callable[..., Taken]
) -> Iterator[tuple[tuple[str, str], Any]]:
    yield ("GreaterThanOrEqual", column), lambda p, v: low(p, v, 0)
    yield ("GreaterThan", column), lambda p, v: low(p, v, 1)
    yield ("LessThan", column), lambda p, v: high(p, v, 0)
    yield ("LessThanOrEqual", column), lambda p, v: high(p, v, 1)


_ACTS: dict[tuple[str, str], Callable[[Pushed, Any], Taken]] = {
    ("EqualTo", "key"): _equal("key", _text),
    ("EqualTo", "tag"): _tag,
    ("In", "tag"): _tag,
    ("EqualTo", "queue"): _equal("queue", _whole),
    ("EqualTo", "group"): _equal("group", _text),
    **dict(_bounds("offset", _low, _high)),
    **dict(_bounds("stored", _since, _until)),
    **dict(_bounds("decided", _since, _until)),
    **dict(_bounds("acked", _since, _until)),
}
