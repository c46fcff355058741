"""Spark's filters, as far as ranges or the broker can do them exactly: the rest goes back to Spark. No Spark needed to test it.

``key``, ``tag``: equality (``tag`` also IN). ``queue``: equality. ``offset`` (not of a view), ``stored`` (``decided`` of
``%op``, ``acked`` of ``%acks``): bounds. ``group`` of ``%acks``: equality. Each is evaluated on the same values that Spark would
see, so a filter that is taken is not evaluated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

FAR = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Pushed:
    """What to read of the ranges. ``queue`` None: all; offsets ``low`` .. ``high``-1; times ``since_us`` .. ``until_us``-1."""

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
    """The columns whose filters can be pushed: a system view is read as a whole, so queues and offsets do not narrow it."""
    return [name for name in columns if not (source.startswith("%") and name in ("queue", "offset"))]


def push(filters: Iterable[Any], before: Pushed, columns: Iterable[str]) -> tuple[Pushed, list[Any]]:
    """What of ``filters`` can be done here, on top of ``before``; and those that Spark has to do. ``columns``: :func:`pushable` ones."""
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


def _key(pushed: Pushed, value: Any) -> Taken:
    if not isinstance(value, str) or pushed.key not in (None, value):
        return None
    return replace(pushed, key=value)


def _tag(pushed: Pushed, value: Any) -> Taken:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(tag, str) and tag for tag in values):
        return None
    both = tuple(tag for tag in values if tag in pushed.tags) if pushed.tags else values
    return replace(pushed, tags=both) if both else None


def _queue(pushed: Pushed, value: Any) -> Taken:
    if not _whole(value) or pushed.queue not in (None, value):
        return None
    return replace(pushed, queue=value)


def _low(pushed: Pushed, value: Any, more: int) -> Taken:
    return replace(pushed, low=max(pushed.low, value + more)) if _whole(value) else None


def _high(pushed: Pushed, value: Any, more: int) -> Taken:
    return replace(pushed, high=min(pushed.high, value + more)) if _whole(value) else None


def _since(pushed: Pushed, value: Any, more: int) -> Taken:
    at = _microseconds(value)
    return None if at is None else replace(pushed, since_us=max(pushed.since_us or 0, at + more))


def _until(pushed: Pushed, value: Any, more: int) -> Taken:
    at = _microseconds(value)
    return (
        None
        if at is None
        else replace(pushed, until_us=min(FAR if pushed.until_us is None else pushed.until_us, at + more))
    )


def _group(pushed: Pushed, value: Any) -> Taken:
    if not isinstance(value, str) or pushed.group not in (None, value):
        return None
    return replace(pushed, group=value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _microseconds(value: Any) -> int | None:
    """Of a moment with a zone; one without is the session's affair, which is not known here."""
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
    ("EqualTo", "key"): _key,
    ("EqualTo", "tag"): _tag,
    ("In", "tag"): _tag,
    ("EqualTo", "queue"): _queue,
    ("EqualTo", "group"): _group,
    **dict(_bounds("offset", _low, _high)),
    **dict(_bounds("stored", _since, _until)),
    **dict(_bounds("decided", _since, _until)),
    **dict(_bounds("acked", _since, _until)),
}
