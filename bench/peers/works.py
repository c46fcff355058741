"""The works that are measured, in the order of a round. The one that overwhelms a peer comes last."""

from __future__ import annotations

from seam import Work

ONE = "one caller: prepare + commit"
SEEN = "prepare to seen by a waiting consumer"
SEEN_BESIDE = "prepare to seen, 4,000/s beside it"
THREADS_64 = "64 threads"
PROCESSES = "16 processes of 4 threads"
FLIGHT = "1,000 in flight in one process"
BATCHES_100 = "8 callers, batches of 100"
BATCHES_1000 = "8 callers, batches of 1,000"
BATCHES_2000 = "8 callers, batches of 2,000"

WORKS = (
    Work(ONE, "threads", shows=("p50_ms", "p10_ms", "p99_ms")),
    Work(SEEN, "seen", shows=("p50_ms", "p99_ms")),
    Work(SEEN_BESIDE, "seen", beside=4000, shows=("p50_ms", "p99_ms")),
    Work(THREADS_64, "threads", callers=64),
    Work(PROCESSES, "threads", callers=4, processes=16),
    Work(FLIGHT, "flight", callers=1000),
    Work(BATCHES_100, "batches", callers=8, rows=100),
    Work(BATCHES_1000, "batches", callers=8, rows=1000),
    Work(BATCHES_2000, "batches", callers=8, rows=2000, goal=False),
    Work("16 threads", "threads", callers=16, goal=False),
    Work("256 threads", "threads", callers=256, goal=False),
)
GRPC_WORKS = tuple(work for work in WORKS if work.name in (ONE, THREADS_64))
"""Those of RocketMQ's gRPC client (``--grpc``)."""
UNITS = {"rate": "/s", "p10_ms": "p10, ms", "p50_ms": "p50, ms", "p99_ms": "p99, ms"}
WARM_UP = Work("warm-up", "threads", callers=8)
"""What a server does before its first figure."""
PACED_CALLERS = 64
