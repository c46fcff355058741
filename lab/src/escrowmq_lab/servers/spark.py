"""A standalone Spark cluster on this machine: one master, some workers of one core each. PyPI: ``pyspark``; Java 17 or
newer.

Each worker has a loopback address of its own: Spark starts the second attempt of a straggling task only on another host
(and in local mode never). So all of 127.0.0.0/8 must lead back here, as it does on Linux.

The workers can have folders of their own, as on machines of their own (Linux; as root, or where users may have
namespaces).
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
"""For Java processes that live for a test: to start each of them takes half the processor time."""

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
"""A shell's: see the first folder as empty, but for the second, and be the program that the other words are."""


@dataclass
class Cluster:
    """A running cluster; ``url`` is what Spark takes as its master."""

    url: str
    master: Server
    workers: list[Server]

    @property
    def executors(self) -> list[int]:
        """Process numbers of the executors that run now: of the workers' children, those that are one and not dead."""
        return [child for worker in self.workers for child in _children(worker.pid) if _is_executor(child)]

    def kill_executor(self, python: int | None = None) -> int:
        """``kill -9`` the executor to which a Python process belongs, or any; its number, 0 if there is none."""
        running = self.executors
        if python is not None:
            running = [pid for pid in _ancestors(python) if pid in running]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            return pid
        return 0


@contextlib.contextmanager
def cluster(folder: Path, workers: int = 2, memory: str = "1g", hidden: Path | None = None) -> Iterator[Cluster]:
    """Yield a cluster with its logs and work folders in ``folder``; ``memory`` is each worker's.

    ``hidden``: a folder that each worker, with its executors and their Python processes, sees as an empty one, in
    which there is only
    what it makes there itself. So nothing in it can be shared with the driver, nor among workers. Raises
    :class:`Absent`.
    """
    alone = _apart() if hidden is not None else []
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
            environment=environment,
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


def _apart() -> list[str]:
    """Return the command that runs another one with mounts of its own."""
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
        "appender.stderr.name = stderr\nappender.stderr.target = SYSTEM_ERR\nappender.stderr.layout.type = "
        "PatternLayout\n"
        "appender.stderr.layout.pattern = %p %c{1}: %m%n%ex{short}\n"
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
    """Direct children, whichever thread started them (Linux)."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return sorted(found)


def _is_executor(pid: int) -> bool:
    """Dead processes that were not waited for yet, and those that are only about to become an executor, have other
    words."""
    with contextlib.suppress(OSError):
        return b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the parent, its parent, and so on (Linux)."""
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid
