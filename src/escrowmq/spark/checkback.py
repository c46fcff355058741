"""Check-back answers for a stream whose driver died, from the checkpoint of its query.

The batches of a stream run one after the other. A commit file that is newer than a prepared row shows that the query
has finished with the batch of that row: if the row is still undecided, it belongs to a failed attempt, and no later
commit will include it. Without such a file the batch may still be committed, by this driver or by its successor.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from escrowmq.model import ROLLBACK, UNKNOWN, Check, Outcome

SKEW = timedelta(minutes=2)
"""Tolerated difference between the clocks of executors and of the file system of the checkpoint."""

_log = logging.getLogger(__name__)


class CheckpointChecker:
    """The checker of one query. ``checkpoint`` is its checkpointLocation (a path or URI)."""

    def __init__(self, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint

    def decide_batch(self, checks: Sequence[Check]) -> list[Outcome]:
        """Return ROLLBACK for transactions of batches that the query has finished, UNKNOWN for all others, which are in
        progress."""
        moved = None if self.checkpoint is None else find_last_commit(self.checkpoint)
        if moved is None:
            return [UNKNOWN] * len(checks)
        ends = [max((message.born + SKEW for message in check.messages), default=moved) for check in checks]
        return [ROLLBACK if end < moved else UNKNOWN for end in ends]


def find_last_commit(checkpoint: str) -> datetime | None:
    """Return the commit time of the query's newest batch; None if there is none, or the checkpoint is unreadable
    here."""
    try:
        return max(list_commits(checkpoint), default=None)
    except Unreadable as problem:
        _log.warning("%s", problem)
        return None


def list_commits(checkpoint: str) -> list[datetime]:
    """Return the commit times of the batches that the checkpoint lists, in no order. Raises Unreadable. A process with
    a Spark session reads through Hadoop: any file system, with Spark's settings and credentials. Processes of executors
    cannot use Java, so they read through Arrow."""
    why = ""
    for list_files in (_list_by_spark, _list_by_arrow):
        try:
            files = list_files(checkpoint)
        except Exception as problem:  # from many libraries; whatever it is, it must not end a query
            why = str(problem).strip()[:300]
        else:
            if files is not None:
                return [at for name, at in files if name.isdecimal()]
    raise Unreadable(f"cannot read the checkpoint {checkpoint} from here: {why}")


def warn_if_unreadable(checkpoint: str | None) -> None:
    """Log a warning, once per process and from a thread, if this process cannot read the checkpoint and so cannot
    answer check-backs."""
    if checkpoint not in _checked:
        _checked.add(checkpoint)
        threading.Thread(target=_check_readable, args=(checkpoint,), name="escrowmq-checkpoint", daemon=True).start()


_checked: set[str | None] = set()


def _check_readable(checkpoint: str | None) -> None:
    try:
        if checkpoint is None:
            raise Unreadable("the sink has no option checkpointLocation")
        list_commits(checkpoint)
    except Unreadable as problem:
        _log.warning(
            "%s: if the driver dies, this process answers 'unknown' to what becomes of its last batch; run a "
            "CheckpointChecker where the checkpoint can be read",
            problem,
        )


class Unreadable(Exception):
    """A checkpoint that this process cannot read. The message names it and gives the reason."""


def to_arrow_uri(checkpoint: str) -> str:
    """Convert the checkpoint's URI for Arrow, which has one scheme for S3 where Hadoop has several. A path stays the
    same."""
    scheme, colon, rest = checkpoint.partition("://")
    return f"s3://{rest}" if colon and scheme.lower() in ("s3a", "s3n") else checkpoint


def _list_by_arrow(checkpoint: str) -> list[tuple[str, datetime]]:
    from pyarrow import fs

    name = to_arrow_uri(checkpoint)
    if "://" in name or name.startswith("file:"):
        system, path = fs.FileSystem.from_uri(name)
    else:
        system, path = fs.LocalFileSystem(), name
    files = system.get_file_info(fs.FileSelector(f"{path.rstrip('/')}/commits"))
    return [(file.base_name, file.mtime.astimezone(UTC)) for file in files if file.mtime is not None]


def _list_by_spark(checkpoint: str) -> list[tuple[str, datetime]] | None:
    """List the commit files through the Java process of this process's session. Returns None without a session."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    jvm: Any = context._jvm if context is not None else None
    if context is None or jvm is None:
        return None
    folder = jvm.org.apache.hadoop.fs.Path(f"{checkpoint.rstrip('/')}/commits")
    files = folder.getFileSystem(context._jsc.hadoopConfiguration()).listStatus(folder)
    seconds = {file.getPath().getName(): file.getModificationTime() / 1000 for file in files}
    return [(name, datetime.fromtimestamp(at, UTC)) for name, at in seconds.items()]
