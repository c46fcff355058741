"""Producer-driven modes for exactly-once effects between two databases.

Several modes; ``docs/modes.md`` says which one when. None of them needs a callback into the producer.
"""

from escrowmq.outbox.modes.assignments import Slot, slots_of
from escrowmq.outbox.modes.both_reach import Arrival, BothReachConsumer, BothReachProducer, Prepared
from escrowmq.outbox.modes.compensating import Compensating
from escrowmq.outbox.modes.driven import Driven, TableChecker
from escrowmq.outbox.modes.driving import DrivenResult, DrivenResults, Redriven
from escrowmq.outbox.modes.offsets import OffsetConsumer, Taken, divide, fence
from escrowmq.outbox.modes.splitting import SplitTopic, split_topic
from escrowmq.outbox.modes.validation import Verdict, compare

__all__ = [
    "Arrival",
    "BothReachConsumer",
    "BothReachProducer",
    "Compensating",
    "Driven",
    "DrivenResult",
    "DrivenResults",
    "OffsetConsumer",
    "Prepared",
    "Redriven",
    "Slot",
    "SplitTopic",
    "TableChecker",
    "Taken",
    "Verdict",
    "compare",
    "divide",
    "fence",
    "slots_of",
    "split_topic",
]
