"""What a crash with many undecided half messages costs a peer, and how much memory messages take."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import Recovery
from measuring import resident_bytes, run
from seam import Peer, Running, Work

OVERDUE_SECONDS = 8.0
"""After this all undecided half messages are due: both systems ask first after 6 s."""
PATIENCE_SECONDS = 180.0


@contextmanager
def _running(peer: Peer, parent: Path | None) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="escrowmq-peers-", dir=parent) as folder:
        os.chmod(folder, 0o755)
        with peer.running(Path(folder) / "server") as server:
            yield server


def measure_recovery(peer: Peer, found: Recovery, undecided: int, body: int, parent: Path | None) -> None:
    """Prepare, kill -9, wait until they are due, restart; then the first transaction, then all questions."""
    with _running(peer, parent) as server:
        run(peer, server, Work("prepare", "prepare", callers=64, rows=undecided), 0, body)
        server.kill()
        time.sleep(OVERDUE_SECONDS)
        start = time.perf_counter()
        server.restart()
        run(peer, server, Work("first", "queue", rows=1), 0, body)
        found.undecided, found.serving_s = undecided, time.perf_counter() - start
        outcome = run(peer, server, Work("asked", "asked", rows=undecided), PATIENCE_SECONDS, body)
        found.asked, found.asked_s = outcome.done, outcome.seconds


def measure_memory(peer: Peer, found: Recovery, queued: int, body: int, parent: Path | None) -> None:
    """Resident memory of a server that has done nothing but one message, and of one that holds ``queued``."""
    with _running(peer, parent) as server:
        run(peer, server, Work("one", "queue", rows=1), 0, body)
        found.rest_mib = resident_bytes(server.pids()) / (1 << 20)
        run(peer, server, Work("queue", "queue", callers=64, rows=queued), 0, body)
        found.queued, found.queued_mib = queued, resident_bytes(server.pids()) / (1 << 20)
