"""Runs load programs against a peer, and measures processor time, bytes written and memory of its server beside
them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seam import Peer, Running, Work
from works import PACED_CALLERS

from escrowmq_lab.servers.process import dying_with_us

_TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_SECONDS = 90.0
"""Beside the length of the run: a load program that takes longer is killed, and its run has failed."""
BESIDE_SECONDS = 1.0
"""How long the load beside runs before the measured one begins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a work came to. Times in seconds, latencies in milliseconds."""

    done: int
    failed: int
    seconds: float
    p10_ms: float
    p50_ms: float
    p99_ms: float
    client_cpu_s: float
    server_cpu_s: float
    written_bytes: int
    server_bytes: int
    """Memory of the server at the end."""
    beside_rate: float = 0.0
    """What the load beside reached, per second."""

    def figures(self, body: int) -> dict[str, float]:
        """Named figures of this run."""
        each = max(self.done, 1)
        return {
            "rate": self.done / self.seconds,
            "failed": self.failed,
            "p10_ms": self.p10_ms,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "client_us": 1e6 * self.client_cpu_s / each,
            "server_us": 1e6 * self.server_cpu_s / each,
            "written_bytes": self.written_bytes / each,
            "written_per_body_byte": self.written_bytes / each / body,
            "memory_mib": self.server_bytes / (1 << 20),
            "beside_rate": self.beside_rate,
        }

    def content(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Load:
    """One load program, which waits for ``go`` when it is ready."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            dying_with_us(command, 9),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def ready(self) -> None:
        """Wait until it is warm. Raises RuntimeError if it ends instead."""
        self._line("ready")

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Its figures, at the end. Raises RuntimeError if it ends without."""
        result: dict[str, Any] = json.loads(self._line("{"))
        return result

    def kill(self) -> None:
        """End it; whoever waits for it gets a RuntimeError."""
        self._process.kill()

    def close(self) -> None:
        """Kill what still runs, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _line(self, beginning: str) -> str:
        """The next line that begins so; libraries may print others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        ended = "was killed" if self._process.returncode == -9 else f"ended with {self._process.returncode}"
        raise RuntimeError(f"the load program {ended}: {said[-1500:] or 'it said nothing'}")


@contextmanager
def loads(peer: Peer, server: Running, work: Work, seconds: float, warm: float, body: int) -> Iterator[list[Load]]:
    """The load programs of a work, started; killed at the end, and when they take far too long."""
    arguments = [work.kind, work.callers, seconds, warm, body, work.rows]
    command = [*peer.load(server.address), *map(str, arguments)]
    started = [Load(command) for _ in range(work.processes)]
    late = threading.Timer(PATIENCE_SECONDS + seconds + warm, lambda: [load.kill() for load in started])
    late.daemon = True
    late.start()
    try:
        yield started
    finally:
        late.cancel()
        for load in started:
            load.close()


SLOWEST_SECONDS = 10.0
"""A run of this length in which nothing was done is not repeated with a longer one."""


def run(peer: Peer, server: Running, work: Work, seconds: float, body: int, warm: float = 0.0) -> Outcome:
    """One run. Raises RuntimeError when a load program fails or hangs."""
    if not work.beside:
        return _measured(peer, server, work, seconds, body, warm)
    other = Work("", "paced", callers=PACED_CALLERS, rows=work.beside)
    with loads(peer, server, other, seconds + 2 * BESIDE_SECONDS, warm, body) as (beside,):
        beside.ready()
        outcome = _measured(peer, server, work, seconds, body, warm, beside)
        paced = beside.result()
    return Outcome(**{**outcome.content(), "beside_rate": paced["done"] / paced["seconds"]})


def _measured(
    peer: Peer, server: Running, work: Work, seconds: float, body: int, warm: float, beside: Load | None = None
) -> Outcome:
    with loads(peer, server, work, seconds, warm, body) as started:
        for load in started:
            load.ready()
        if beside is not None:
            beside.go()
            time.sleep(BESIDE_SECONDS)
        cpu, written = processor_seconds(server.pids()), written_bytes(server.pids())
        for load in started:
            load.go()
        results = [load.result() for load in started]
        cpu, written = processor_seconds(server.pids()) - cpu, written_bytes(server.pids()) - written
        memory = resident_bytes(server.pids())
    if not any(result["done"] for result in results):
        if seconds > SLOWEST_SECONDS or beside is not None:
            raise RuntimeError("the load program did nothing in its time")
        return _measured(peer, server, work, 4 * seconds, body, warm)  # a busy machine: give it longer
    return Outcome(
        done=sum(result["done"] for result in results),
        failed=sum(result["failed"] for result in results),
        seconds=max(result["seconds"] for result in results),
        p10_ms=_middle([result["p10_ms"] for result in results]),
        p50_ms=_middle([result["p50_ms"] for result in results]),
        p99_ms=max(result["p99_ms"] for result in results),
        client_cpu_s=sum(result["cpu_s"] for result in results),
        server_cpu_s=cpu,
        written_bytes=written + sum(result.get("written", 0) for result in results),
        server_bytes=memory,
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def sync_ms(folder: Path, times: int = 300) -> float:
    """The median of a 1.3 kB write and its sync, in milliseconds: what everything that is synced stands on."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, 1 << 20)
        os.fsync(descriptor)
        for number in range(times):
            start = time.perf_counter()
            os.pwrite(descriptor, b"x" * 1300, number * 1300)
            os.fdatasync(descriptor)
            taken.append(1e3 * (time.perf_counter() - start))
    return _middle(taken)


def processor_seconds(pids: Sequence[int]) -> float:
    """Processor time of processes and of their children that have ended."""
    ticks = 0
    for fields in _stat(pids):
        ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / _TICKS


def written_bytes(pids: Sequence[int]) -> int:
    """Bytes that processes have given to the disk."""
    return sum(int(_fields(pid, "io").get("write_bytes", 0)) for pid in pids)


def resident_bytes(pids: Sequence[int]) -> int:
    """Memory that is resident, without what several processes share."""
    total = 0
    for pid in pids:
        status: dict[str, Any] = _fields(pid, "status")
        total += 1024 * sum(int(status.get(name, "0").split()[0]) for name in ("RssAnon", "RssFile"))
    return total


def descendants(pid: int) -> list[int]:
    """A process and all that it started, as far as they live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, []))
    return found


def _stat(pids: Sequence[int]) -> list[list[str]]:
    stats = []
    for pid in pids:
        with suppress(OSError):
            stats.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
    return stats


def _fields(pid: int, name: str) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
