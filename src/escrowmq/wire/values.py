"""Values in requests, options and answers: meaning, unit and bounds.

A ``TypedDict`` of :mod:`escrowmq.wire` is the only description of a JSON object. Texts in an ``Annotated`` type
describe the field on the generated page ``docs/reference/protocol.md``; the broker checks :class:`Bounds` of incoming
requests. :func:`fields_of` returns both for every field of such a type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive minimum and maximum of a number. Integers without bounds range from 0 to 2^63-1."""

    least: int = 0
    most: int = LARGEST_NUMBER


MAX_SESSION = (1 << 32) - 1
MAX_QUEUE = (1 << 31) - 1
MAX_PAGE = 10_000

TimeUs = Annotated[int, "microseconds since 1970"]
Seconds = Annotated[float, "seconds"]
Pair = tuple[int, int]
Offset = Annotated[int, "offset in a queue"]
Head = Annotated[Offset, "the first that is stored"]
End = Annotated[Offset, "the one that the next message gets"]
Position = Annotated[int, "position in the broker's log"]
QueueNumber = Annotated[int, Bounds(0, MAX_QUEUE), "number of a queue within its topic, from 0"]
QueueId = Annotated[int, "number of the queue among all queues of the broker"]
Session = Annotated[int, Bounds(0, MAX_SESSION), "number of a producer session"]
SessionNumber = Annotated[Session, Bounds(1, MAX_SESSION)]
ProducerGroup = Annotated[str, "name of a producer group"]
ConsumerGroup = Annotated[str, "name of a consumer group"]
TopicName = Annotated[str, "name of a topic"]
Instance = Annotated[str, "name of one process within its group"]
TransactionText = Annotated[str, "transaction id as printed"]
MessageId = Annotated[str, "32 hex digits"]
PageLimit = Annotated[int, Bounds(1, MAX_PAGE), "entries per page, 1,000 unless given"]


@dataclass(frozen=True, slots=True)
class Value:
    """One type of value. ``kind`` is without ``Annotated`` and ``None``; ``null``: null is allowed."""

    kind: Any
    null: bool
    bounds: Bounds
    meaning: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The words of a ``Literal``; empty for other kinds."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def items(self) -> list[Value]:
        """Item types of a list (one) or a tuple (several); empty for other kinds."""
        return [value_of(item) for item in get_args(self.kind)] if get_origin(self.kind) in (list, tuple) else []


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object."""

    name: str
    required: bool
    value: Value


def value_of(hint: Any, bounds: Bounds = Bounds(), meaning: str = "") -> Value:
    """Interpret a type hint: outer bounds replace inner ones, outer meanings precede inner ones."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return value_of(inner[0], bounds, meaning)
    if origin is Annotated:
        texts = [extra for extra in reversed(inner[1:]) if isinstance(extra, str)]
        limits = [extra for extra in inner[1:] if isinstance(extra, Bounds)]
        return value_of(inner[0], (limits or [bounds])[-1], "; ".join([meaning, *texts] if meaning else texts))
    if origin in (Union, UnionType) and NoneType in inner:
        (kind,) = (one for one in inner if one is not NoneType)
        found = value_of(kind, bounds, meaning)
        return Value(found.kind, True, found.bounds, found.meaning)
    if origin in (Union, UnionType):  # of literals
        return Value(Literal[tuple(word for one in inner for word in get_args(one))], False, bounds, meaning)
    return Value(hint, False, bounds, meaning)


@cache
def fields_of(shape: Any) -> tuple[Field, ...]:
    """Return the fields of a TypedDict; none for a plain mapping."""
    hints = get_type_hints(shape, include_extras=True) if is_typeddict(shape) else {}
    return tuple(Field(name, get_origin(hint) is not NotRequired, value_of(hint)) for name, hint in hints.items())
