"""Restart with 10^6 undecided half messages: seconds until it answers, until all are asked about; bytes and memory for
it.

The broker is killed (``kill -9``), so it starts from its last snapshot and the log after it. One producer session then
becomes a member to ask and answers UNKNOWN in batches, as fast as the questions come.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _harness import Report, arguments, serve

from escrowmq.connecting import links
from escrowmq.model import DecidedBy, Outcome
from escrowmq.schemas import ENDING, OUTGOING
from escrowmq.wire import Exchange, Link

GROUP = "bench-restart"
PATIENCE = 600.0


class Served:
    """``escrowmq serve`` on a folder, and how long it took to answer."""

    def __init__(self, folder: Path, due: float) -> None:
        start = time.perf_counter()
        self.process, self.ready = serve(folder, "--transaction-timeout", f"{due}", "--check-interval", "1h")
        (self.link,) = links(self.ready["url"], {})
        self.link.action("hello", {}, PATIENCE)
        self.seconds = time.perf_counter() - start

    def memory(self, name: str) -> float:
        """MiB by the kernel, such as RssAnon: its own memory, without the mapped log."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def stats(self) -> dict[str, Any]:
        return self.link.action("stats", {}, PATIENCE)

    def end(self, *, kill: bool) -> None:
        (self.process.kill if kill else self.process.terminate)()
        self.process.wait()
        self.link.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def fill(link: Link, session: int, total: int, body: int, rows: int) -> None:
    """Prepare ``total`` transactions of one message each."""
    bodies = pa.array([os.urandom(body) for _ in range(rows)], pa.binary())
    waiting: list[Future[pa.RecordBatch]] = []
    for start in range(0, total, rows):
        waiting.append(link.exchange(Exchange.PREPARE, half_messages(bodies, start, rows), {"session": session}))
        if len(waiting) == 8:
            assert not waiting.pop(0).result(PATIENCE).column("code").to_numpy().any()
    for future in waiting:
        future.result(PATIENCE)


def half_messages(bodies: pa.Array, start: int, rows: int) -> pa.RecordBatch:
    """Rows with ids that count up, as a client's do."""
    ids = np.empty(rows, np.dtype([("instance", ">u8"), ("sequence", ">u8")]))
    ids["instance"], ids["sequence"] = 77, np.arange(start, start + rows)
    zeros = pa.array(np.zeros(rows, np.int64))
    columns = {
        "topic": pa.array(["bench-restart"] * rows),
        "body": bodies,
        "message_id": pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(ids.tobytes())]),
        "queue": pa.array(np.full(rows, -1, np.int32)),
    }
    arrays = [columns.get(f.name, pa.nulls(rows, f.type) if f.nullable else zeros) for f in OUTGOING]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTGOING)


def ask_all(link: Link, session: int, total: int) -> float:
    """Listen and answer until ``total`` transactions were asked about; seconds."""
    asked, done = set[int](), threading.Event()
    count = 0

    def on_checks(batch: pa.RecordBatch) -> None:
        nonlocal count
        outcomes = pa.array(np.full(batch.num_rows, Outcome.UNKNOWN, np.uint8))
        ending = pa.RecordBatch.from_arrays([batch.column("transaction"), outcomes], schema=ENDING)
        link.exchange(Exchange.END, ending, {"session": session, "by": int(DecidedBy.CHECK)})
        asked.add(hash(batch.column("transaction")[0].as_py()))
        count += batch.num_rows
        if count >= total:
            done.set()

    start = time.perf_counter()
    watch = link.watch(session, on_checks)
    finished = done.wait(PATIENCE)
    seconds = time.perf_counter() - start
    watch.close()
    if not finished or count != total:
        raise SystemExit(f"{count} questions came, not {total}")
    return seconds


def one_run(report: Report, folder: Path, options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Fill, kill, restart, ask, restart cleanly; all on one folder."""
    before = Served(folder, due=0.5)
    session = before.link.action("session.open", {"group": GROUP, "instance": "a", "transactional": True}, PATIENCE)
    start = time.perf_counter()
    fill(before.link, session["session"], options.messages, options.body, options.batch)
    found["fill"].append(time.perf_counter() - start)
    before.end(kill=True)
    after = Served(folder, due=0.5)
    found["restart"].append(after.seconds)
    found["memory"].append(after.memory("RssAnon"))
    assert after.stats()["open_half_messages"] == options.messages
    written = after.stats()["log_bytes_total"]
    found["asked"].append(ask_all(after.link, session["session"], options.messages))
    found["bytes"].append((after.stats()["log_bytes_total"] - written) / options.messages)
    found["memory asking"].append(after.memory("RssAnon"))
    after.end(kill=True)
    again = Served(folder, due=0.5)
    found["restart asked"].append(again.seconds)
    again.end(kill=False)
    clean = Served(folder, due=0.5)
    found["restart clean"].append(clean.seconds)
    clean.end(kill=False)


FIGURES = {
    "restart": ("restart after kill -9, until it answers", "s", "< 2"),
    "asked": ("all of them asked, one member", "s", "< 10"),
    "bytes": ("bytes written per question", "B", "<= 64"),
    "restart asked": ("restart after kill -9, when all were asked", "s", "< 2"),
    "restart clean": ("restart after a clean stop", "s", "< 2"),
    "memory": ("its own memory when it answers", "MiB", ""),
    "memory asking": ("its own memory when all were asked", "MiB", ""),
    "fill": ("(to prepare them in batches)", "s", ""),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--messages", type=int, default=1_000_000, help="undecided half messages")
    parser.add_argument("--batch", type=int, default=1000, help="rows of one prepare")
    options = parser.parse_args()
    report = Report("restart", options)
    report.begin()
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
            one_run(report, Path(folder) / "data", options, found)
    for name, (title, unit, goal) in FIGURES.items():
        report.add(
            f"{title}, {options.messages:,} half messages" if name == "restart" else title, unit, goal, found[name]
        )
    report.end()


if __name__ == "__main__":
    main()
