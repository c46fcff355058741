"""Producer-driven modes for exactly-once effects between two databases.

``docs/modes.md`` describes when to use which. None of them needs a callback into the producer.
"""

from escrowmq.outbox.modes.assignments import Place, Slot, divide, fence, list_places, move, slots_of
from escrowmq.outbox.modes.both_reach import Arrival, BothReachConsumer, BothReachProducer, Prepared
from escrowmq.outbox.modes.compensating import Compensating
from escrowmq.outbox.modes.driven import Driven, TableChecker
from escrowmq.outbox.modes.driving import DrivenResult, DrivenResults, Redriven
from escrowmq.outbox.modes.offsets import OffsetConsumer, Taken
from escrowmq.outbox.modes.splitting import SplitTopic, split_topic
from escrowmq.outbox.modes.stuck import (
    StoredPrepare,
    StuckRow,
    commit_stuck,
    discard_prepares,
    list_prepares,
    list_stuck,
    resend_stuck,
    retry_stuck,
    rollback_stuck,
    settle_stuck,
)
from escrowmq.outbox.modes.validation import Verdict, compare

__all__ = [
    "Arrival", "BothReachConsumer", "BothReachProducer", "Compensating", "Driven", "DrivenResult", "DrivenResults",
    "OffsetConsumer", "Place", "Prepared", "Redriven", "Slot", "SplitTopic", "StoredPrepare", "StuckRow",
    "TableChecker", "Taken", "Verdict", "commit_stuck", "compare", "discard_prepares", "divide", "fence", "list_places",
    "list_prepares", "list_stuck", "move", "resend_stuck", "retry_stuck", "rollback_stuck", "settle_stuck", "slots_of",
    "split_topic",
]  # fmt: skip
