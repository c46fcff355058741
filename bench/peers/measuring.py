"""Runs load programs against a peer, and measures processor time, bytes written and memory of its server beside them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seam import Peer, Running, Work

_TICKS = os.sysconf("SC_CLK_TCK")
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a work came to. Times in seconds, latencies in milliseconds."""

    done: int
    failed: int
    seconds: float
    p50_ms: float
    p99_ms: float
    client_cpu_s: float
    server_cpu_s: float
    written_bytes: int
    server_bytes: int
    """Memory of the server at the end."""

    def figures(self) -> dict[str, float]:
        """Named figures of this run."""
        each = max(self.done, 1)
        return {
            "rate": self.done / self.seconds,
            "failed": self.failed,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "client_us": 1e6 * self.client_cpu_s / each,
            "server_us": 1e6 * self.server_cpu_s / each,
            "written_bytes": self.written_bytes / each,
            "memory_mib": self.server_bytes / (1 << 20),
        }


def run(peer: Peer, server: Running, work: Work, seconds: float, body: int) -> Outcome:
    """One run. Raises RuntimeError when a load program fails."""
    start_ms = 0 if work.processes == 1 else int(1000 * (time.time() + 3.0 + 0.8 * work.processes))
    arguments = [work.kind, work.callers, seconds, body, work.rows, start_ms]
    command = [*peer.load(server.address), *map(str, arguments)]
    loads = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(work.processes)
    ]
    try:
        for load in loads:
            _wait_for(load, "begin")
        cpu, written = processor_seconds(server.pids()), written_bytes(server.pids())
        results = [json.loads(_wait_for(load, "{")) for load in loads]
        cpu, written = processor_seconds(server.pids()) - cpu, written_bytes(server.pids()) - written
        memory = resident_bytes(server.pids())
    finally:
        for load in loads:
            load.kill()
            load.wait()
            for pipe in (load.stdout, load.stderr):
                if pipe is not None:
                    pipe.close()
    return Outcome(
        sum(result["done"] for result in results),
        sum(result["failed"] for result in results),
        max(result["seconds"] for result in results),
        _middle([result["p50_ms"] for result in results]),
        max(result["p99_ms"] for result in results),
        sum(result["cpu_s"] for result in results),
        cpu,
        written,
        memory,
    )


def _wait_for(load: subprocess.Popen[str], beginning: str) -> str:
    """The next line of a load program that begins so; libraries may print others."""
    assert load.stdout is not None
    assert load.stderr is not None
    for line in load.stdout:
        if line.startswith(beginning):
            return line
    raise RuntimeError(f"{' '.join(map(str, load.args))[-200:]} ended: {load.stderr.read()[-2000:]}")  # type: ignore[arg-type]


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


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
