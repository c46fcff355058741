"""The interface of a log that several brokers follow, one of which appends: what the broker uses while it does not lead, and while it does."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from escrowmq.log.seam import CommitLog, Frame, StoredLog


class Replica(Protocol):
    """A node of a replicated log, while it does not lead. For one thread, but for ``log`` and ``leader``, which any may look at.

    ``follow`` raises Corrupt or Unknown(LOG_FAILED, TIMED_OUT) where it cannot go on; the node is then closed and opened anew.
    """

    @property
    def leader(self) -> str | None:
        """URL of the node that claimed the log, or gave a sign of life, last; None: nobody has, or it has released the log."""

    @property
    def log(self) -> StoredLog:
        """The local copy: readable while it follows, from any thread."""

    def follow(self, timeout: float) -> list[Frame]:
        """Frames that count and have come into the copy now, in their order; waits ``timeout`` seconds at most for the first."""

    def silent_for(self) -> float:
        """Seconds since anything came from a leader; of one that has released the log, or of a log that nobody has led, infinity."""

    def is_behind(self) -> bool | None:
        """Whether there is more than was followed, asked of those who keep the log now; None: they do not answer."""

    def restarted(self) -> bool:
        """Whether the copy was begun anew since this was asked last, because what it lacked has left the log: what was computed from it is to be
        computed again."""

    def take_over(self, version: str) -> ReplicatedLog:
        """Claim the log, follow it up to the claim, and open it: the node leads, and the replica belongs to the log. Fenced if another node has
        claimed it meanwhile."""

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """As :meth:`escrowmq.log.seam.CommitLog.save_snapshot`, into the copy."""

    def bytes_since_snapshot(self) -> int:
        """Bytes of the copy's frames from its newest snapshot on."""

    def close(self) -> None:
        """Follow no more; the folder is given back."""


class ReplicatedLog(CommitLog, Protocol):
    """An open replicated log: this node leads until another one claims it."""

    @property
    def fenced(self) -> bool:
        """Whether another node is known to have claimed the log."""

    @property
    def proved_at(self) -> float:
        """``time.monotonic()`` when the last record was sent of which it is known that it counts: until then this node led for certain."""

    def confirm(self, timeout: float) -> None:
        """Return when a record counts that was sent after the call began. Unknown(TIMED_OUT), Corrupt(LOG_FAILED)."""

    def caught_up(self) -> list[Frame]:
        """The frames that the take-over met, the one of its opening included."""

    def close(self, *, clean: bool = True) -> None:
        """As :meth:`escrowmq.log.seam.CommitLog.close`; ``clean``: the log is released, so that another node takes over at once."""
