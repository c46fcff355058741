"""Ends without an answer for the caller (``confirm="oneway"``): counts, and a line in the log.

Such an end is sent, and sent again, like any other. Its answer is not given to a function of the user's, because it
comes on a thread that other callers need.
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
"""Minimum interval of lines about ends that did not take effect; each line gives their number since the last."""

Confirm = Literal["answered", "oneway"]
"""Whether a single end waits for the broker's answer."""


def is_oneway(confirm: Confirm) -> bool:
    """Return whether ``confirm`` is "oneway": an end does not wait for its answer. Raises Misuse(BAD_ARGUMENT) for a
    value other than the two."""
    if confirm not in ("answered", "oneway"):
        raise Misuse(Code.BAD_ARGUMENT, f"confirm = {confirm!r}", '"answered" or "oneway"')
    return confirm == "oneway"


class Tally:
    """Counts one producer's ends that did not take effect (``refused``), or may not have (``unknown``). Thread-safe."""

    def __init__(self, group: str) -> None:
        self.refused = self.unknown = 0
        self._group = group
        self._lock = threading.Lock()
        self._unlogged = 0
        self._next_line = 0.0

    def on_result(self, row: Row, result: Any) -> None:
        """Count the result of one end (a code or an EscrowError) if it had no effect, or may have had none; log such
        ends at intervals. ``row``: transaction id and outcome."""
        raw, number = row
        outcome = Outcome(number)
        try:
            if isinstance(result, EscrowError):
                raise result
            if outcome is not Outcome.UNKNOWN:  # which requests nothing
                require(outcome, result)
        except EscrowError as failed:
            problem = failed
        else:
            return
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
        text = "%d ends of %s that nobody waited for did not take effect as far as is known; the last, %s of %s: %s"
        _log.warning(text, count, self._group, outcome.name, TransactionId.from_bytes(raw), problem)
