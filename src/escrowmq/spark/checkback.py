"""The answer to "what became of these rows?" when the driver that would know is dead: its query's checkpoint.

A stream's batches come one after the other. A commit file that was written after some rows were prepared says that the query has
moved past their batch: what is still undecided of it has lost, and no later commit will name it. Without such a file the batch
may still be committed, by this driver or by the one that takes over: in progress.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from escrowmq.model import ROLLBACK, UNKNOWN, Check, Outcome

SKEW = timedelta(minutes=2)
"""The clocks of executors and of the checkpoint's file system may differ by so much."""

_log = logging.getLogger(__name__)


class CheckpointChecker:
    """A checker for the producer group of one query; ``checkpoint`` is its checkpointLocation (a path or URI)."""

    def __init__(self, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint

    def decide_batch(self, checks: Sequence[Check]) -> list[Outcome]:
        """Roll back what the query has moved past; everything else is in progress."""
        moved = None if self.checkpoint is None else last_commit(self.checkpoint)
        return [self._decide(check, moved) for check in checks]

    @staticmethod
    def _decide(check: Check, moved: datetime | None) -> Outcome:
        if moved is None or not check.messages:
            return UNKNOWN
        return ROLLBACK if max(message.born for message in check.messages) + SKEW < moved else UNKNOWN


def last_commit(checkpoint: str) -> datetime | None:
    """When the query's newest batch was noted as done; None if none was, or the checkpoint cannot be read."""
    from pyarrow import fs

    try:
        system, path = (
            fs.FileSystem.from_uri(checkpoint)
            if "://" in checkpoint or checkpoint.startswith("file:")
            else (
                fs.LocalFileSystem(),
                checkpoint,
            )
        )
        files = system.get_file_info(fs.FileSelector(f"{path.rstrip('/')}/commits"))
    except (OSError, ValueError) as problem:
        _log.warning("cannot read the checkpoint %s: %s", checkpoint, problem)
        return None
    times = [file.mtime for file in files if file.base_name.isdecimal() and file.mtime is not None]
    newest = max(times, default=None)
    return newest.astimezone(UTC) if newest is not None else None
