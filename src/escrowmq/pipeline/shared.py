"""Checks that Spark's workers see a folder of the driver's machine. Where they do not, each would write into a folder
of its own, and Spark would find nothing to complain about.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASKS_PER_CORE = 2
"""So that each worker has some, also if one is quicker."""
_HINT = (
    "a folder that every worker sees under this path, or a file system that Spark knows: hdfs://HOST/..., "
    "s3a://BUCKET/..."
)


def on_cluster(spark: SparkSession) -> bool:
    """Return whether the session's master is a cluster, rather than this process's own Java."""
    return not str(spark.sparkContext.master).startswith("local")


def local_folder(spark: SparkSession, name: str) -> Path | None:
    """Return the local folder that Spark resolves ``name`` (a path or a URL) to; None for another file system."""
    jvm: Any = spark._jvm
    assert jvm is not None  # a session has one
    path = jvm.org.apache.hadoop.fs.Path(name)
    system = path.getFileSystem(spark._jsc.hadoopConfiguration())
    if system.getUri().getScheme() != "file":
        return None
    return Path(system.makeQualified(path).toUri().getPath())


def check_shared(spark: SparkSession, name: str, what: str) -> None:
    """Raise Misuse(BAD_ARGUMENT) if a worker does not see a folder into which Spark is to write. ``what`` names it in
    the error. Creates a file there, checks for it in some tasks, and removes it. If the check fails, folders that were
    created are removed, too. Does nothing without a cluster, or for other file systems."""
    if not on_cluster(spark) or (folder := local_folder(spark, name)) is None:
        return
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle, mark = tempfile.mkstemp(prefix=".escrowmq-", dir=folder)
    os.close(handle)
    try:
        count = spark.sparkContext.defaultParallelism * _TASKS_PER_CORE
        look = partial(_name_if_blind, mark)
        blind = spark.sparkContext.parallelize(range(count), count).mapPartitions(look).collect()
    finally:
        os.unlink(mark)
    if blind:
        with contextlib.suppress(OSError):  # another process has written there meanwhile
            for one in made:
                one.rmdir()
        hosts = ", ".join(sorted(set(blind)))
        text = f"{what}: workers of the cluster ({hosts}) do not see the folder {folder}"
        raise Misuse(Code.BAD_ARGUMENT, text, _HINT)


def _name_if_blind(mark: str, _: Iterable[int]) -> Iterator[str]:
    """Yield the name of the machine on which this task runs if the file ``mark`` is missing there, else nothing."""
    if not os.path.exists(mark):
        yield socket.gethostname()
