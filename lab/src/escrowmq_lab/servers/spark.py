"""A standalone Spark cluster on this machine (one master, some workers of one core each), and a Spark Connect server.
PyPI: ``pyspark``; Java 17 or newer.

Each worker has its own loopback address: Spark starts the second attempt of a slow task only on another host (and in
local mode never). So all of 127.0.0.0/8 must be local, as on Linux.

The workers can have separate folders, as on separate machines (Linux; as root, or with user namespaces).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import EscrowError
from escrowmq.pipeline.java import find_java, write_launcher
from escrowmq_lab.servers.process import Server, accepts, free_port, started
from escrowmq_lab.servers.seam import Absent

_PACKAGE = "org.apache.spark.deploy"

_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
"""For Java processes that live for a test: halves the processor time of their starts."""

_BEHIND_EMPTY = """\
set -e
exec 3<"$2"  # its own folder, before that is covered, too
mount -t tmpfs none "$1"
mkdir -p "$2"
mount --no-canonicalize --bind /proc/self/fd/3 "$2"
exec 3<&-
shift 2
exec "$@"
"""
"""Shell script: show the first folder as empty except for the second, and execute the remaining words."""


@dataclass
class Cluster:
    """A running cluster; ``url`` is Spark's master."""

    url: str
    master: Server
    workers: list[Server]

    @property
    def executors(self) -> list[int]:
        """Pids of the running executors: children of the workers that are executors and not dead."""
        return [child for worker in self.workers for child in _children(worker.pid) if _is_executor(child)]

    def kill_executor(self, python: int | None = None) -> int:
        """Kill the executor of a Python process, or any, with ``kill -9``. Returns its pid, 0 if there is none."""
        running = self.executors
        if python is not None:
            running = [pid for pid in _ancestors(python) if pid in running]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            return pid
        return 0


@contextlib.contextmanager
def cluster(folder: Path, workers: int = 2, memory: str = "1g", hidden: Path | None = None) -> Iterator[Cluster]:
    """Run a cluster with its logs and work folders in ``folder``; ``memory`` is each worker's. ``hidden``: a folder
    that each worker, with its executors and their Python processes, sees as empty except for its own files. So nothing
    in it is shared with the driver or among workers. Raises :class:`Absent`."""
    alone = _unshare_command() if hidden is not None else []
    home, environment = _spark(folder)
    port, shown = free_port(), free_port()
    url = f"spark://127.0.0.1:{port}"
    starter = str(home / "bin" / "spark-class")
    address = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(shown)]
    with contextlib.ExitStack() as stack:
        master = Server(
            url=url,
            command=[starter, f"{_PACKAGE}.master.Master", *address],
            ready=lambda _: accepts(port) and "Starting Spark master" in _read(folder / "master.log"),
            log=folder / "master.log",
            environment={**environment, "SPARK_MASTER_OPTS": "-Dspark.worker.timeout=600"},  # of a machine that stalls
        )
        stack.enter_context(started(master))
        hands = []
        for number in range(workers):
            log = folder / f"worker-{number}.log"
            host = f"127.0.0.{number + 1}"
            options = ["--cores", "1", "--memory", memory, "--host", host, "--webui-port", str(free_port())]
            own = folder / f"worker-{number}"
            own.mkdir()
            home, environment = _spark(own)
            behind = [*alone, "sh", "-c", _BEHIND_EMPTY, "sh", str(hidden), str(own)] if hidden is not None else []
            options += ["--work-dir", str(own / "work")]
            hands.append(
                Server(
                    url=url,
                    command=[*behind, starter, f"{_PACKAGE}.worker.Worker", *options, url],
                    ready=lambda _, log=log: "Successfully registered with master" in _read(log),  # type: ignore[misc]
                    log=log,
                    environment={**environment, "SPARK_LOCAL_IP": host, "TMPDIR": str(own)},
                )
            )
            hands[-1].begin()
            stack.callback(hands[-1].stop)
        for worker in hands:
            worker.wait()
        yield Cluster(url, master, hands)


def connect_server(folder: Path, environment: Mapping[str, str] | None = None) -> Server:
    """Return a Spark Connect server, not started, with its files in ``folder``; ``url`` is what clients connect to.
    ``environment`` is added to that of its Python processes. Raises :class:`Absent`."""
    home, own = _spark(folder)
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.defaultJavaOptions": own["SPARK_DAEMON_JAVA_OPTS"],
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    kind = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2]"]
    return Server(
        url=f"sc://127.0.0.1:{port}",
        command=[str(home / "bin" / "spark-submit"), *kind, *options, "spark-internal"],
        ready=lambda _: accepts(port),
        log=folder / "connect.log",
        environment={**own, "SPARK_DAEMON_MEMORY": "1g", **(environment or {})},
    )


def _unshare_command() -> list[str]:
    """Return the command that runs another one with its own mounts."""
    program = shutil.which("unshare")
    if program is None:
        raise Absent("folders of their own need unshare; on Debian: apt-get install util-linux")
    own = [program, "--mount", "--propagation", "private"]
    command = own if os.geteuid() == 0 else [*own, "--user", "--map-root-user"]
    tried = subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        raise Absent(
            f"folders of their own need mounts of their own, which are not allowed here: {tried.stderr.strip()}"
        )
    return command


def _spark(folder: Path) -> tuple[Path, Mapping[str, str]]:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise Absent("PySpark is not installed: pip install 'escrowmq[spark]'")
    try:
        java = write_launcher(find_java(), folder / "java")
    except EscrowError as problem:
        raise Absent(str(problem)) from None
    logging = folder / "log4j2.properties"
    logging.write_text(
        "rootLogger.level = info\nrootLogger.appenderRef.stderr.ref = stderr\nappender.stderr.type = Console\n"
        "appender.stderr.name = stderr\nappender.stderr.target = SYSTEM_ERR\n"
        "appender.stderr.layout.type = PatternLayout\nappender.stderr.layout.pattern = %p %c{1}: %m%n%ex{short}\n"
    )
    home = Path(found.origin).parent
    return home, {
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_CONF_DIR": str(folder),
        "SPARK_DAEMON_JAVA_OPTS": f"-Dlog4j2.configurationFile=file:{logging} {_QUICK}",
        "SPARK_LAUNCHER_OPTS": _QUICK,
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_NO_DAEMONIZE": "1",
    }


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _children(pid: int) -> list[int]:
    """Return the direct children, of any thread (Linux)."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return sorted(found)


def _is_executor(pid: int) -> bool:
    """Decide whether a process is an executor; dead and starting ones have other command lines."""
    with contextlib.suppress(OSError):
        return b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _ancestors(pid: int) -> Iterator[int]:
    """Iterate over the parent, its parent, and so on (Linux)."""
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid
