"""The cost of access rights and TLS: small transactions (prepare and commit, 1 kB) of 64 threads, in turns against a
broker without rights, one with rights, and one with rights and TLS.

Processor time per transaction is that of both processes; wall time includes the sync of the log. ``--batch 1000``: 8
threads prepare and commit in batches instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from _harness import Report, arguments, serve

import escrowmq as mq

THREADS, BATCH_THREADS = 64, 8
WARM_SECONDS = 0.5
VARIANTS = ("without rights", "with rights", "with rights and TLS")


class Variant:
    """One broker and a connection to it."""

    def __init__(self, name: str, folder: Path, words: list[str], options: dict[str, str]) -> None:
        self.name = name
        self.process, ready = serve(folder / name.replace(" ", "-"), *words)
        self.bus = mq.connect(ready["url"], **options)
        self.producer = self.bus.producer("shop", unasked=True)

    def measure(self, seconds: float, body: bytes, rows: int) -> tuple[float, float]:
        """Return transactions a second, and microseconds of processor time per transaction. ``rows``: of a batch; 0:
        one by one."""
        count = BATCH_THREADS if rows else THREADS
        stop, counts = threading.Event(), [0] * count
        batch = pa.table({"topic": ["orders"] * rows, "body": pa.array([body] * rows, pa.binary())})

        def work(number: int) -> None:
            while not stop.is_set():
                if rows:
                    self.producer.end_batch(self.producer.prepare_batch(batch).transactions, mq.Outcome.COMMIT)
                else:
                    with self.producer.transaction() as txn:
                        txn.send("orders", body)
                counts[number] += rows or 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_SECONDS)
        before, used, began = sum(counts), self._processor_seconds(), time.perf_counter()
        time.sleep(seconds)
        done, cost = sum(counts) - before, self._processor_seconds() - used
        elapsed = time.perf_counter() - began
        stop.set()
        for thread in threads:
            thread.join()
        return done / elapsed, cost / done * 1e6

    def _processor_seconds(self) -> float:
        """Of the broker and of this process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        own = os.times()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + own.user + own.system

    def close(self) -> None:
        self.bus.close()
        self.process.terminate()
        self.process.communicate()


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=7)
    parser.add_argument("--batch", type=int, default=0, help="rows of one batch; 0: small transactions")
    options = parser.parse_args()
    report = Report("rights", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as made:
        folder = Path(made)
        command: Callable[..., object] = lambda *words: subprocess.run(  # noqa: E731
            [sys.executable, "-m", "escrowmq", *words], cwd=folder, check=True, capture_output=True
        )
        command("rights", "init", "--tokens", "tokens")
        command("certs", "dev", "certs")
        rights = ["--rights", str(folder / "rights.toml")]
        tls = ["--tls-cert", str(folder / "certs" / "broker.pem"), "--tls-key", str(folder / "certs" / "broker.key")]
        token = {"token_file": str(folder / "tokens" / "service.token")}
        given = (([], {}), (rights, token), (rights + tls, {**token, "tls": str(folder / "certs" / "ca.pem")}))
        variants = [Variant(name, folder, *each) for name, each in zip(VARIANTS, given, strict=True)]
        try:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
            for _ in range(options.repeats):
                for variant in variants:
                    found[variant.name].append(variant.measure(options.seconds, bytes(options.body), options.batch))
        finally:
            for variant in variants:
                variant.close()
    base = found[VARIANTS[0]]
    for name in VARIANTS:
        report.add(name, "tx/s", "", [rate for rate, _ in found[name]])
        report.add(f"{name}, processor time", "µs/tx", "", [cost for _, cost in found[name]])
        if name != VARIANTS[0]:
            pairs = list(zip(found[name], base, strict=True))
            lost = [100 * (1 - rate / free) for (rate, _), (free, _) in pairs]
            goal = "<= 3" if name == VARIANTS[1] else "<= 45" if options.batch else "<= 15"
            report.add(f"{name}, lost of the throughput", "%", goal, lost)
            report.add(f"{name}, processor time to without", "x", "", [cost / free for (_, cost), (_, free) in pairs])
    report.end()


if __name__ == "__main__":
    main()
