"""Holds repeats against the log: a row gets the receipt of an earlier message only if it has that message's content.

Repeats are rare, a resend after a broken connection, so their messages are read from the log again, in one read for a
request. A repeat of what stands in a damaged frame is answered with DAMAGED, because nobody can say any more whether it
is the same. Where the message has left with retention since, its topic and id alone were compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.arrays import Int64s, UInt8s
from escrowmq.ledger.columns.codes import MESSAGE_ID_TAKEN, OK
from escrowmq.ledger.events import Repeats
from escrowmq.ledger.messages.contents import CONTENT, differing, refused
from escrowmq.log.seam import StoredLog

DAMAGED = int(Code.DAMAGED)


@dataclass(frozen=True, slots=True)
class Unchecked:
    """An answer of schema PRODUCED to ``batch``, of which some rows are repeats that were not compared yet."""

    answer: pa.RecordBatch
    batch: pa.RecordBatch
    repeats: Repeats

    def slice(self, start: int, rows: int) -> Unchecked | pa.RecordBatch:
        """Return the answer to some rows of the batch."""
        low, high = np.searchsorted(self.repeats.rows, (start, start + rows)).tolist()
        answer = self.answer.slice(start, rows)
        if low == high:
            return answer
        mine = Repeats(self.repeats.rows[low:high] - start, self.repeats.positions[low:high])
        return Unchecked(answer, self.batch.slice(start, rows), mine)

    def checked(self, log: StoredLog) -> pa.RecordBatch:
        """Return the answer as it is to be given. Any thread, any time after the round's events are appended."""
        verdicts = judge(log, self.batch, self.repeats)
        answer = self.answer
        for status in np.unique(verdicts[verdicts != OK]).tolist():
            answer = refused(answer, self.repeats.rows[verdicts == status], status)
        return answer


def judge(log: StoredLog, batch: pa.RecordBatch, repeats: Repeats) -> UInt8s:
    """One code per repeat: OK (the same message), MESSAGE_ID_TAKEN or DAMAGED."""
    given = batch.select(list(CONTENT)).take(pa.array(repeats.rows))
    places = np.unique(repeats.positions)  # rising: one pass over the frames, each read once
    at = np.searchsorted(places, repeats.positions)
    try:
        return _compare(log, given, places, at)
    except EscrowError:  # one has left the log just now: that says nothing of the others
        judged = [_judge_one(log, given.slice(row, 1), place) for row, place in enumerate(repeats.positions.tolist())]
        return np.array(judged, np.uint8)


def _compare(log: StoredLog, given: pa.RecordBatch, places: Int64s, at: Int64s) -> UInt8s:
    """``places``: positions to read; ``at``: which of them each row repeats."""
    stored, damaged = log.salvage(places, CONTENT)
    if not np.array_equal(at, np.arange(len(places))):
        stored = stored.take(pa.array(at))
    verdicts = np.where(differing(given, stored), MESSAGE_ID_TAKEN, OK).astype(np.uint8)
    verdicts[np.isin(at, list(damaged))] = DAMAGED
    return verdicts


def _judge_one(log: StoredLog, given: pa.RecordBatch, position: int) -> int:
    try:
        return int(_compare(log, given, np.array([position]), np.zeros(1, np.int64))[0])
    except EscrowError as problem:
        return OK if problem.code is Code.RANGE_PURGED else DAMAGED
