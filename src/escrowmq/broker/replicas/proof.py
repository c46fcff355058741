"""Proof of leading: a request that appends nothing is answered only while the proof is recent.

A frame is acknowledged only if no other node has claimed the log, so whatever appends needs no further proof. A look, a
receive that finds nothing and a refusal append nothing: they could be given by a leader that was stopped, or cut off,
and does not know yet that another one leads. Every acknowledged record, signs of life included, proves that this node
led when the record was sent. How long ago that is, is measured by a clock that runs while the machine is suspended: a
leader that wakes must find its proof old.
"""

from __future__ import annotations

from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.seam import ReplicatedLog
from escrowmq.platform.clock import uptime

SHARE = 0.5
"""An answer that appends nothing may be as old as this part of the silence after which a standby claims: so whoever
claims by the clock finds that its predecessor has stopped answering, with as much again for clocks that run at
different speeds and for messages under way.
"""
CONFIRM_SECONDS = 1.0  # how long such an answer waits for a proof when the last one is too old


class LeaderProof:
    """Of one time of leading; a :class:`escrowmq.broker.writer.shard.Proof`."""

    def __init__(self, log: ReplicatedLog, silence: float) -> None:
        self._log = log
        self._bound = SHARE * silence

    @property
    def age(self) -> float:
        """Seconds since this node was surely the leader."""
        return uptime() - self._log.proved_at

    def is_fresh(self) -> bool:
        """Return whether the last proof is young enough."""
        return self.age <= self._bound and not self._log.fenced

    def renew(self) -> None:
        """Have the log prove it. Overloaded(NOT_LEADER) if those who keep it do not answer."""
        try:
            self._log.confirm(CONFIRM_SECONDS)
        except EscrowError as problem:
            if problem.code is not Code.TIMED_OUT:
                raise
            text = f"this broker led {self.age:.1f} s ago, and cannot prove that it still does: {problem.message}"
            raise error(Code.NOT_LEADER, text, "", 0.2) from problem
