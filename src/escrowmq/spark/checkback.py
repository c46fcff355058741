"""Answers check-backs for a stream whose driver died, from the checkpoint of its query.

A stream's batches come one after the other. A commit file that was written after some rows were prepared says that the
query has moved past their batch: what is still undecided of it has lost, and no later commit will name it. Without such
a file the batch may still be committed, by this driver or by the one that takes over: in progress.
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
"""The clocks of executors and of the checkpoint's file system may differ by so much."""

_log = logging.getLogger(__name__)


class CheckpointChecker:
    """Answers check-backs for the producer group of one query; ``checkpoint`` is its checkpointLocation (a path or
    URI)."""

    def __init__(self, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint

    def decide_batch(self, checks: Sequence[Check]) -> list[Outcome]:
        """ROLLBACK for what the query has moved past, UNKNOWN for everything else: it is in progress."""
        moved = None if self.checkpoint is None else last_commit(self.checkpoint)
        if moved is None:
            return [UNKNOWN] * len(checks)
        ends = [max((message.born + SKEW for message in check.messages), default=moved) for check in checks]
        return [ROLLBACK if end < moved else UNKNOWN for end in ends]


def last_commit(checkpoint: str) -> datetime | None:
    """Return the time at which the query's newest batch was noted as done; None if none was, or the checkpoint
    cannot be read from here."""
    try:
        return max(commits(checkpoint), default=None)
    except Unreadable as problem:
        _log.warning("%s", problem)
        return None


def commits(checkpoint: str) -> list[datetime]:
    """Return the times at which the batches that are still listed were noted as done, in no order. Raises Unreadable.

    A process that has a Spark session reads as Spark does (Hadoop: any file system, with its settings and credentials).
    Executors' processes have no way to Java: they read what Arrow can.
    """
    why = ""
    for list_files in (_by_spark, _by_arrow):
        try:
            files = list_files(checkpoint)
        except Exception as problem:  # from many libraries; whatever it is, it must not end a query
            why = str(problem).strip()[:300]
        else:
            if files is not None:
                return [at for name, at in files if name.isdecimal()]
    raise Unreadable(f"cannot read the checkpoint {checkpoint} from here: {why}")


def look_ahead(checkpoint: str | None) -> None:
    """Log, once per process and from a thread, if this process cannot read the checkpoint and so will not be able to
    answer."""
    if checkpoint not in _looked_at:
        _looked_at.add(checkpoint)
        threading.Thread(target=_look, args=(checkpoint,), name="escrowmq-checkpoint", daemon=True).start()


_looked_at: set[str | None] = set()


def _look(checkpoint: str | None) -> None:
    try:
        if checkpoint is None:
            raise Unreadable("the sink has no option checkpointLocation")
        commits(checkpoint)
    except Unreadable as problem:
        _log.warning(
            "%s: if the driver dies, this process answers 'unknown' to what becomes of its last batch; run a "
            "CheckpointChecker "
            "where the checkpoint can be read",
            problem,
        )


class Unreadable(Exception):
    """A checkpoint that cannot be read from this process; the message names it and says why."""


def for_arrow(checkpoint: str) -> str:
    """Return the checkpoint's name for Arrow, which has one scheme for S3 where Hadoop has several. A path stays as
    it is."""
    scheme, colon, rest = checkpoint.partition("://")
    return f"s3://{rest}" if colon and scheme.lower() in ("s3a", "s3n") else checkpoint


def _by_arrow(checkpoint: str) -> list[tuple[str, datetime]]:
    from pyarrow import fs

    name = for_arrow(checkpoint)
    if "://" in name or name.startswith("file:"):
        system, path = fs.FileSystem.from_uri(name)
    else:
        system, path = fs.LocalFileSystem(), name
    files = system.get_file_info(fs.FileSelector(f"{path.rstrip('/')}/commits"))
    return [(file.base_name, file.mtime.astimezone(UTC)) for file in files if file.mtime is not None]


def _by_spark(checkpoint: str) -> list[tuple[str, datetime]] | None:
    """Return the files as the Java process of this process's session lists them; None without a session."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    jvm: Any = context._jvm if context is not None else None
    if context is None or jvm is None:
        return None
    folder = jvm.org.apache.hadoop.fs.Path(f"{checkpoint.rstrip('/')}/commits")
    files = folder.getFileSystem(context._jsc.hadoopConfiguration()).listStatus(folder)
    return [
        (file.getPath().getName(), datetime.fromtimestamp(file.getModificationTime() / 1000, UTC)) for file in files
    ]
