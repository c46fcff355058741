"""The values in requests, options and answers: what each means, in which unit, and within which bounds.

A ``TypedDict`` of :mod:`escrowmq.wire` is the one description of a JSON object. Texts in an ``Annotated`` type are what the
generated page ``docs/protocol.md`` says of a field; :class:`Bounds` are checked by the broker when a request comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

LARGEST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest value of a number, both allowed. Whole numbers without bounds go from 0 to 2^63-1."""

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
