"""Proof of leading: a request that appends nothing is answered only while the proof is recent.

A frame is acknowledged only if no other node has claimed the log, so a request that appends needs no further proof. A
look, an empty receive and a refusal append nothing: they could come from a leader that was suspended or cut off while
another node took over. Every acknowledged record, heartbeats included, proves that this node led when the record was
sent. Its age is measured by a clock that runs while the machine is suspended.
"""

from __future__ import annotations

from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.seam import ReplicatedLog
from escrowmq.platform.clock import uptime

SHARE = 0.5
"""The age of a valid proof, at most, as a part of the silence after which a standby claims. So a leader stops answering
before that, with as much again for clocks of different speeds and messages in flight.
"""
CONFIRM_SECONDS = 1.0  # how long an answer waits for a new proof


class LeaderProof:
    """The proof for one term of leading; a :class:`escrowmq.broker.writer.shard.Proof`."""

    def __init__(self, log: ReplicatedLog, silence: float) -> None:
        self._log = log
        self._bound = SHARE * silence

    @property
    def age(self) -> float:
        """Seconds since this node was surely the leader."""
        return uptime() - self._log.proved_at

    def is_fresh(self) -> bool:
        """Return whether the last proof of leading is recent enough to answer without appending to the log."""
        return self.age <= self._bound and not self._log.fenced

    def renew(self) -> None:
        """Obtain a new proof of leading from the log; waits up to ``CONFIRM_SECONDS``. Raises Overloaded(NOT_LEADER) if
        its brokers do not answer."""
        try:
            self._log.confirm(CONFIRM_SECONDS)
        except EscrowError as problem:
            if problem.code is not Code.TIMED_OUT:
                raise
            text = f"this broker led {self.age:.1f} s ago, and cannot prove that it still does: {problem.message}"
            raise error(Code.NOT_LEADER, text, "", 0.2) from problem
