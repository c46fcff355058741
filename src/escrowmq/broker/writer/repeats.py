"""What the writer reads back from the log: the contents of repeated messages, and keys.

A row gets the receipt of an earlier message only if it has that message's content. Repeats are rare (a resend after a
broken connection), so their messages are read from the log again, in one read per request. A repeat of a message in a
damaged frame is answered with DAMAGED, because the content can no longer be compared. If retention has removed the
message, topic and id alone were compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.arrays import Int64s, UInt8s
from escrowmq.ledger.columns.codes import MESSAGE_ID_TAKEN, OK
from escrowmq.ledger.events import Repeats
from escrowmq.ledger.groups.order import UNKNOWN, numbers
from escrowmq.ledger.messages.contents import CONTENT, differing, refused
from escrowmq.log.seam import StoredLog
from escrowmq.message.hashes import hash_keys

DAMAGED = int(Code.DAMAGED)


@dataclass(frozen=True, slots=True)
class Unchecked:
    """An answer of schema PRODUCED to ``batch``, with repeats that were not compared yet."""

    answer: pa.RecordBatch
    batch: pa.RecordBatch
    repeats: Repeats

    def slice(self, start: int, rows: int) -> Unchecked | pa.RecordBatch:
        """Return the answer to rows ``start`` .. ``start + rows - 1`` of the batch; final if they have no repeats."""
        low, high = np.searchsorted(self.repeats.rows, (start, start + rows)).tolist()
        answer = self.answer.slice(start, rows)
        if low == high:
            return answer
        mine = Repeats(self.repeats.rows[low:high] - start, self.repeats.positions[low:high])
        return Unchecked(answer, self.batch.slice(start, rows), mine)

    def checked(self, log: StoredLog) -> pa.RecordBatch:
        """Return the final answer: a repeat whose content differs from the stored message is refused. Any thread, any
        time after the round's events are appended."""
        verdicts = judge(log, self.batch, self.repeats)
        answer = self.answer
        for status in np.unique(verdicts[verdicts != OK]).tolist():
            answer = refused(answer, self.repeats.rows[verdicts == status], status)
        return answer


def judge(log: StoredLog, batch: pa.RecordBatch, repeats: Repeats) -> UInt8s:
    """Compare repeated messages with the stored ones. Returns one code per repeat: OK (the same content),
    MESSAGE_ID_TAKEN (another) or DAMAGED."""
    return _judge(log, batch.select(list(CONTENT)).take(pa.array(repeats.rows)), repeats.positions)


def _judge(log: StoredLog, given: pa.RecordBatch, positions: Int64s) -> UInt8s:
    places, at = np.unique(positions, return_inverse=True)  # rising: one pass over the frames, each read once
    try:
        stored, damaged = log.salvage(places, CONTENT)
    except EscrowError as problem:  # one has just left the log, which concerns no other
        if len(positions) == 1:
            return np.array([OK if problem.code is Code.RANGE_PURGED else DAMAGED], np.uint8)
        singles = [_judge(log, given.slice(row, 1), one) for row, one in enumerate(positions[:, None])]
        return np.concatenate(singles)
    if not np.array_equal(at, np.arange(len(places))):
        stored = stored.take(pa.array(at))
    verdicts = np.where(differing(given, stored), MESSAGE_ID_TAKEN, OK).astype(np.uint8)
    verdicts[np.isin(at, list(damaged))] = DAMAGED
    return verdicts


def stored_keys(log: StoredLog, positions: Int64s) -> Int64s:
    """Return for each position a number that stands for the message's key, for ordered groups; UNKNOWN if it cannot be
    read. A damaged record hides no other key."""
    try:
        return numbers(hash_keys(log.read(positions, ["key"]).column("key")))
    except EscrowError:
        if len(positions) == 1:
            return np.full(1, UNKNOWN, np.int64)
    return np.concatenate([stored_keys(log, half) for half in np.array_split(positions, 2)])
