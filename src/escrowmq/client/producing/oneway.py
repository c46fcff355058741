"""Ends that nobody waits for (``confirm="oneway"``): who wants them, and what becomes of them, counted and logged.

Such an end joins its lane like any other and is sent again like any other; only its answer has nobody to go to. It is
not given to a function of the user's, because it comes on a thread that other callers need.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Literal

from escrowmq.client.producing.ending import require
from escrowmq.errors import Code, EscrowError, Meaning, Misuse
from escrowmq.model import Outcome, TransactionId
from escrowmq.wire.parcels import Row

_log = logging.getLogger(__name__)
LOG_SECONDS = 10.0
"""At most one line about ends that did not take effect in this time; it says how many there were since the last line.
"""

Confirm = Literal["answered", "oneway"]
"""Whether a single end waits for the broker's answer."""


def is_oneway(confirm: Confirm) -> bool:
    """Return whether an end is not waited for. Raises Misuse(BAD_ARGUMENT) for what is neither."""
    if confirm not in ("answered", "oneway"):
        raise Misuse(Code.BAD_ARGUMENT, f"confirm = {confirm!r}", '"answered" or "oneway"')
    return confirm == "oneway"


class Tally:
    """Counts of one producer's decisions that nobody waited for. Thread-safe."""

    def __init__(self, group: str) -> None:
        self.refused = 0
        """Surely not as it was asked: the transaction stands otherwise, or the end was not taken."""
        self.unknown = 0
        """Without an answer: the broker may have taken them or not."""
        self._group = group
        self._lock = threading.Lock()
        self._unlogged = 0
        self._next_line = 0.0

    def on_result(self, row: Row, result: Any) -> None:
        """Take in the answer to one end, a row of a lane of ends: a code or an EscrowError."""
        raw, number = row
        outcome = Outcome(number)
        try:
            if isinstance(result, EscrowError):
                raise result
            if outcome is not Outcome.UNKNOWN:  # which asks for nothing
                require(outcome, result)
        except EscrowError as problem:
            self._count(TransactionId.from_bytes(raw), outcome, problem)

    def _count(self, transaction: TransactionId, outcome: Outcome, problem: EscrowError) -> None:
        now = time.monotonic()
        with self._lock:
            if problem.meaning is Meaning.UNKNOWN:
                self.unknown += 1
            else:
                self.refused += 1
            self._unlogged += 1
            if now < self._next_line:
                return
            self._next_line = now + LOG_SECONDS
            count, self._unlogged = self._unlogged, 0
        _log.warning(
            "%d ends of %s that nobody waited for did not take effect as far as is known; the last, %s of %s: %s",
            count,
            self._group,
            outcome.name,
            transaction,
            problem,
        )
