"""What a crash with many undecided half messages costs a peer, and how much memory messages take."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import Recovery
from measuring import loads, resident_bytes, run, written_bytes
from seam import Peer, Running, Work

OVERDUE_SECONDS = 8.0
"""After this all undecided half messages are due: both systems ask first after 6 s."""
PATIENCE_SECONDS = 120.0
PREPARING_CALLERS = 256


@contextmanager
def running(peer: Peer, parent: Path | None) -> Iterator[Running]:
    """A server on a fresh folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="escrowmq-peers-", dir=parent, ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # servers that run as another user
        with peer.running(Path(folder) / "server") as server:
            yield server


def measure_recovery(peer: Peer, found: Recovery, undecided: int, body: int, parent: Path | None) -> None:
    """Prepare, kill -9, wait until they are due, restart; then the first transaction, then all questions."""
    with running(peer, parent) as server:
        run(peer, server, Work("prepare", "prepare", callers=PREPARING_CALLERS, rows=undecided), PATIENCE_SECONDS, body)
        server.kill()
        time.sleep(OVERDUE_SECONDS)
        with loads(peer, server, Work("first", "first"), PATIENCE_SECONDS, 0, body) as (first,):
            first.ready()
            start = time.perf_counter()
            server.restart()
            first.go()
            first.result()
            found.undecided, found.serving_s = undecided, time.perf_counter() - start
        written = written_bytes(server.pids())
        outcome = run(peer, server, Work("asked", "asked", rows=undecided), PATIENCE_SECONDS, body)
        found.asked, found.asked_s = outcome.done, outcome.seconds
        found.bytes_per_question = (written_bytes(server.pids()) - written) / max(outcome.done, 1)


def measure_memory(peer: Peer, found: Recovery, queued: int, body: int, parent: Path | None) -> None:
    """Resident memory of a server that has done nothing but one message, and of one that holds ``queued``."""
    with running(peer, parent) as server:
        run(peer, server, Work("one", "queue", rows=1), PATIENCE_SECONDS, body)
        found.rest_mib = resident_bytes(server.pids()) / (1 << 20)
        run(peer, server, Work("queue", "queue", callers=64, rows=queued), PATIENCE_SECONDS, body)
        found.queued, found.queued_mib = queued, resident_bytes(server.pids()) / (1 << 20)
