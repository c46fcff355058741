"""A Spark session for a small machine: quick to start, quiet, on the loopback, authenticated, leaving no files behind.

Local by default, or on a cluster whose master is named. Under ``spark-submit`` the session is what was submitted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.classes import open_spark_folder
from escrowmq.pipeline.cluster import check_master, is_here
from escrowmq.pipeline.java import find_java, write_launcher

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MIB = 1 << 20

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit for the Python programs that it starts."""

SLOW_COMPILER_ROWS = 4_000_000
"""From so many rows on, Java's optimising compiler saves more than it costs. An audit of 122,000 messages took 48 s of
processor time without it, 82 s with it; of one of 10⁶ (2 million rows) the compiler alone took 40 s."""

GENERATED_CODE_ROWS = 60_000
"""From so many rows on, Spark's generated code does. An audit of 1,500 messages took 25 s without it and 33 s with it,
one of 122,000 messages 47 s and 37 s.
"""

STOP_SECONDS = 300
"""Seconds until Java must have ended; it may have an archive of its classes to write."""

_QUIET = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n%ex{short}
# Spark reads the log level of an interpreter here; it prints a notice if it differs from the root's.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# The Hadoop shim warns about native libraries and shutdown races that do not concern a local session.
logger.hadoop.name = org.apache.hadoop
logger.hadoop.level = fatal
# Logs that a cluster has no workers, or none with enough memory; without it a user would wait without a reason.
logger.waiting.name = org.apache.spark.scheduler.TaskSchedulerImpl
logger.waiting.level = warn
"""

_FOR_MUCH = " -XX:+UseParallelGC"  # throughput counts here, pauses do not
_FOR_LITTLE = " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_AUTHENTICATED = {"spark.authenticate": "true"}
"""In a local session Java creates a random secret and keeps it in memory. It is in no setting, so neither in the list
of processes nor in an event log. A cluster has its own secret."""

_PLANNED_ONCE = {"spark.sql.adaptive.enabled": "false"}
"""For this machine: with as many partitions as cores, to plan anew after each stage costs more than it gains."""


@contextlib.contextmanager
def local_session(
    name: str = "escrowmq",
    cores: int | None = None,
    *,
    rows: int | None = None,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    keeps_classes: bool = False,
) -> Iterator[SparkSession]:
    """Context manager: a session on this machine, stopped at the end together with its Java process and temporary
    files.

    ``master`` None means local; otherwise it is a cluster such as ``spark://HOST:PORT``, whose workers start the Python
    in ``PYSPARK_PYTHON`` (default: the path of this one). ``settings`` override ours. A local session listens on the
    loopback only and rejects connections without its secret; with a cluster, the cluster is responsible for that.
    ``cores`` None means all.

    ``rows`` is a rough estimate of the work. A cold Java spends its first half minute compiling, so for less than
    millions of rows it compiles less (see SLOW_COMPILER_ROWS). With ``keeps_classes`` a session on this machine keeps
    the classes that it has loaded for later ones (see :mod:`escrowmq.pipeline.classes`). A session that this process
    already has, or that spark-submit started, is used unchanged and left running.

    Raises Misuse(BAD_SETTING) if PySpark or Java 17 is missing, Misuse(BAD_URL) for an invalid master,
    Misuse(BAD_ARGUMENT) if the existing session has another master, and Unknown(DISCONNECTED) for a master that does
    not answer.
    """
    if (running := _find_session(name)) is not None:
        if master not in (None, running.sparkContext.master):
            text = f"master {master}, but this process has a session on {running.sparkContext.master}"
            hint = "name the cluster where the session is started: spark-submit --master"
            raise Misuse(Code.BAD_ARGUMENT, text, hint)
        yield running
        return
    here = master is None or is_here(master)
    if master is not None:
        check_master(master)
    java = find_java()
    folder = Path(tempfile.mkdtemp(prefix="escrowmq-spark-"))
    local = master is None or master.startswith("local")  # so this process's Java does all the work
    theirs = None if local else os.environ.get("PYSPARK_PYTHON")
    # A cluster's workers may have nothing but the archive of an installation's Python part.
    fixed = open_spark_folder(java, folder) if local else None
    environment = {
        "JAVA_HOME": str(write_launcher(java, folder / "java")),
        "PYSPARK_PYTHON": theirs or sys.executable,  # otherwise workers start another Python, without the packages
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **({"SPARK_LOCAL_IP": "127.0.0.1"} if here else {}),
        "SPARK_CONF_DIR": str(fixed.conf if fixed else folder),
        "SPARK_HOME": str(fixed.home) if fixed else None,  # PySpark's own: a foreign one would be another version
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(_set_environment(environment))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        sharing = stack.enter_context(fixed.share_classes(keeps=keeps_classes)) if fixed else ""
        own = {**_AUTHENTICATED, **_PLANNED_ONCE} if local else {}
        more = {**(_LOOPBACK if here else {}), **own, **(settings or {})}
        spark = _start(name, master or f"local[{cores or os.cpu_count() or 1}]", folder, rows, more, sharing)
        stack.callback(_stop, spark)
        yield spark


def driver_memory_mib(machine_bytes: int) -> int:
    """Return the size of the Java heap in MiB for a machine with ``machine_bytes`` of memory: a quarter, at least 512
    MiB, at most 4 GiB."""
    return int(min(max(machine_bytes // 4 // _MIB, 512), 4096))


def _find_session(name: str) -> SparkSession | None:
    """Return the Spark session that this process already has, or that spark-submit started; None if there is none."""
    if "pyspark" not in sys.modules and SUBMITTED not in os.environ:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SUBMITTED in os.environ:
        return SparkSession.builder.appName(name).getOrCreate()
    if (active := SparkSession.getActiveSession()) is not None or SparkContext._active_spark_context is None:
        return active
    return SparkSession._instantiatedSession  # in a thread other than the one that started it, it is not the active one


def _start(
    name: str, master: str, folder: Path, rows: int | None, more: Mapping[str, str], sharing: str
) -> SparkSession:
    try:
        from pyspark.sql import SparkSession
    except ImportError as problem:
        raise Misuse(Code.BAD_SETTING, "PySpark is not installed", "pip install 'escrowmq[spark,jre]'") from problem
    (folder / "log4j2.properties").write_text(_QUIET)
    (folder / "tmp").mkdir()
    memory = driver_memory_mib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{memory}m",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder / 'tmp'} -XX:-UsePerfData "
        f"-Dlog4j2.configurationFile=file:{folder / 'log4j2.properties'}"
        + (_FOR_MUCH if rows is None or rows >= SLOW_COMPILER_ROWS else _FOR_LITTLE)
        + f" {sharing}",
        "spark.sql.codegen.wholeStage": str(rows is None or rows >= GENERATED_CODE_ROWS).lower(),
        "spark.local.dir": str(folder / "tmp"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": str(max(os.cpu_count() or 1, 2)),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.files.openCostInBytes": str(_MIB),
    }
    builder = SparkSession.builder.master(master).appName(name)
    for setting, value in {**settings, **more}.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _stop(spark: SparkSession) -> None:
    """Stop Spark and wait for its Java process, which PySpark itself leaves running until Python exits.

    A signal to the process group (systemd, `timeout`) ends the Java process first: then there is nothing to stop."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    try:
        spark.stop()
    except (Py4JError, OSError):
        spark.sparkContext.stop()  # what it left in Python
        SparkSession._instantiatedSession = SparkSession._activeSession = None
    gateway = SparkContext._gateway
    if gateway is None:
        return
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    if (process := getattr(gateway, "proc", None)) is not None:
        process.stdin.close()  # Spark's gateway server exits at the end of its input
        process.wait(timeout=STOP_SECONDS)


@contextlib.contextmanager
def _set_environment(values: dict[str, str | None]) -> Iterator[None]:
    """Context manager: set environment variables (None: unset them), and restore the previous values at the end."""
    before = {name: os.environ.pop(name, None) for name in values}
    try:
        os.environ.update({name: value for name, value in values.items() if value is not None})
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
