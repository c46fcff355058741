"""Decides that a group gets another message in place of a dead letter.

One event has the new message and its place, so both are stored or neither; an edit whose message id is known is a
repeat.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.commands import EditDead, Rules
from escrowmq.ledger.events import Decision, Event
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.order import numbers
from escrowmq.ledger.groups.settling import keyed_events
from escrowmq.ledger.messages.admission import check_limits, topics_of
from escrowmq.ledger.messages.dedup import Dedup
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.table import NONE
from escrowmq.message.hashes import hash_keys
from escrowmq.schemas import STORED, Kind


def decide_edit(
    command: EditDead, groups: Groups, topics: Topics, dedup: Dedup, rules: Rules, next_position: int
) -> Decision:
    """Decide that a group gets another message in place of a dead letter, as a retry. Answer: OK, or ALREADY_EXISTS for
    a repeat. Raises UNKNOWN_GROUP, NOT_FOUND, CONFLICT, MESSAGE_ID_TAKEN, or the code of an exceeded limit."""
    group = groups.group(command.group)
    queue_id, offset, batch = command.queue_id, command.offset, command.batch
    cursor, place = group.cursor(queue_id), topics.queues[queue_id].place
    identity = batch.column("message_id")
    edit = cursor.edited.get(offset)
    if edit is not None and edit.message_id == identity[0].as_py():
        return Decision((), Code.ALREADY_EXISTS)
    letter = cursor.dead.letter(offset)
    where = f"{place.topic}/{place.queue}/{offset}"
    if letter is None:
        raise error(Code.NOT_FOUND, f"{where} is no dead letter of {command.group}")
    if command.dead_us not in (None, letter[0]):
        why = f"{where} was delivered to {command.group} and died again since it was shown"
        raise error(Code.CONFLICT, why, "look at it again: `escrowmq dead-letters show`")
    if refused := int(check_limits(batch, topics, rules)[0]):
        raise error(Code(refused))
    if dedup.find(identity, topics_of(batch, topics).numbers).positions[0] != NONE:
        raise error(Code.MESSAGE_ID_TAKEN)
    at = {"queue": place.queue, "queue_id": queue_id, "offset": offset, "position": next_position}
    made: dict[str, int] = {"visible_us": 0, "due_us": 0, "transaction": NONE, "epoch": 0, "group": group.ordinal, **at}
    schema = STORED[Kind.EDITED]
    columns = [pa.array([made[f.name]], f.type) if f.name in made else batch.column(f.name) for f in schema]
    events = [Event(Kind.EDITED, pa.RecordBatch.from_arrays(columns, schema=schema))]
    if group.subscription.ordered:
        offsets: Int64s = np.array([offset], np.int64)
        events += keyed_events([(group.ordinal, queue_id, offsets, numbers(hash_keys(batch.column("key"))))])
    return Decision(tuple(events), Code(code.OK))
