"""A million dead letters redriven by a plan beside live traffic: the run is killed in the middle and gone on with; ids
and digest are compared.

Live traffic is a process of its own: a producer at a rate and its consumer, whose latency from send to receipt is told
for the time before the run and for the time of the run. The run is ``escrowmq plan run``, really killed (``kill -9``)
once ``--kill-at`` percent are done. Then every dead letter must have been settled once, by the brokers' records of
acts, must be delivered once more, and the digests of what was shown and of what was done must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Report, arguments, broker

import escrowmq as mq
from escrowmq.plans import Plans, frozen

GROUP, TOPIC, LIVE = "redrive-bench", "redrive-bench", "redrive-bench-live"


def fill(bus: mq.Bus, total: int, body: int) -> None:
    """``total`` messages, each with its number at the begin of its body."""
    producer = bus.producer("bench")
    rest = os.urandom(max(body - 8, 0))
    for first in range(0, total, 5000):
        numbers = range(first, min(first + 5000, total))
        producer.send_batch([mq.Message(TOPIC, number.to_bytes(8, "big") + rest) for number in numbers])


def take(url: str, total: int, *, die: bool) -> np.ndarray:
    """Receive ``total`` messages of the group, and have them die, or acknowledge them; how often each came."""
    times = np.zeros(total, np.int64)
    with mq.connect(url) as bus, bus.consumer(GROUP, TOPIC, max_attempts=1) as consumer:
        while times.sum() < total:
            for message in consumer.receive(10_000, wait=60.0):
                times[int.from_bytes(message.body[:8], "big")] += 1
                if die:
                    message.nack(0.0, "timeout at the bank")
                else:
                    message.ack()
        consumer.flush()
    return times


# Live traffic


def live(url: str, rate: float) -> None:
    """Until standard input ends; each line of it begins another time, whose latencies are told at its end as one line
    of JSON."""
    latencies: list[float] = []
    lock, over = threading.Lock(), threading.Event()

    def send() -> None:
        with mq.connect(url) as bus:
            producer = bus.producer("bench-live")
            due = time.monotonic()
            while not over.is_set():
                producer.send(LIVE, time.monotonic_ns().to_bytes(8, "big"))
                due = max(due + 1.0 / rate, time.monotonic() - 1.0)
                time.sleep(max(due - time.monotonic(), 0.0))

    def receive() -> None:
        with mq.connect(url) as bus, bus.consumer("redrive-bench-live", LIVE, start="latest") as consumer:
            while not over.is_set():
                for message in consumer.receive(100, wait=0.2):
                    took = time.monotonic_ns() - int.from_bytes(message.body, "big")
                    with lock:
                        latencies.append(took / 1e6)
                    message.ack()

    threads = [threading.Thread(target=work, daemon=True) for work in (receive, send)]
    for thread in threads:
        thread.start()
    for _ in sys.stdin:
        with lock:
            seen, latencies[:] = np.array(latencies), []
        tell = {name: float(np.percentile(seen, share)) if len(seen) else None for name, share in SHARES}
        print(json.dumps({**tell, "messages": len(seen)}), flush=True)
    over.set()
    for thread in threads:
        thread.join(10.0)


SHARES = (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100))


class Live:
    """That process."""

    def __init__(self, url: str, rate: float) -> None:
        command = [sys.executable, __file__, "--live", url, "--rate", str(rate)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def lap(self) -> dict[str, Any]:
        """What was measured since the last lap."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


# The plan


class Running:
    """``escrowmq plan run`` as a process."""

    def __init__(self, url: str, plans: Plans, plan: str, options: argparse.Namespace) -> None:
        words = ["plan", "run", plan, "--yes", "--json", "--ramp", options.ramp, "--pause", options.pause]
        words += ["--rate", str(options.plan_rate)] if options.plan_rate else []
        command = [sys.executable, "-m", "escrowmq", *words, "--plans", str(plans.folder), "-u", url]
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def kill(self) -> float:
        self.process.kill()
        code = self.process.wait()
        assert code == -signal.SIGKILL, f"it ended with {code} before it was killed: raise the rows"
        return time.perf_counter() - self.begun

    def end(self) -> tuple[float, dict[str, Any]]:
        out, _ = self.process.communicate()
        _, status, used = 0, self.process.returncode, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert status == 0, f"the run ended with {status}: {out}"
        return time.perf_counter() - self.begun, {**json.loads(out), "mib": used.ru_maxrss / 1024}


def name_of(*death: Any) -> bytes:
    """A dead letter in 16 bytes: broker, topic, queue, offset and time of death."""
    return hashlib.blake2b(repr(death).encode(), digest_size=16).digest()


def digest(deaths: Iterable[bytes]) -> str:
    """SHA-256 over the sorted names of dead letters."""
    return hashlib.sha256(b"".join(sorted(deaths))).hexdigest()


def shown(bus: mq.Bus, plans: Plans, plan: str) -> list[bytes]:
    """The dead letters of the frozen set."""
    at = {hello["shard"]: hello["broker"] for hello in bus.admin.hello()}
    found: list[bytes] = []
    with frozen.open_set(plans.folder / plan) as rows:
        for _, batch in rows.batches():
            columns = [batch.column(name).to_pylist() for name in ("place", "topic", "queue", "offset", "dead_us")]
            found += [name_of(at[place], *rest) for place, *rest in zip(*columns, strict=True)]
    return found


def done(bus: mq.Bus, plan: str) -> tuple[list[bytes], int]:
    """The dead letters that the broker's record says were settled under the plan, and how many acts that were."""
    found, number, after = list[bytes](), 0, 0
    while page := bus.admin.acts(20, after=after):
        for act in page:
            after = max(after, act["number"])
            if not (act["why"] or "").startswith(f"plan {plan} "):
                continue
            ended: Any = act["ended"].get("found", act["ended"])
            items, number = act["what"]["items"], number + 1
            each = ended.get("each") or list(ended["results"]) * len(items)
            settled = zip(items, each, strict=True)
            found += [name_of(act["broker"], *item) for item, code in settled if code in ("OK", "settled")]
    return found, number


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="dead letters")
    parser.add_argument("--rate", type=float, default=200.0, help="live messages a second")
    parser.add_argument("--ramp", default="1,2,5,10,25,50,100", help="as of escrowmq plan run")
    parser.add_argument("--pause", default="1s", help="as of escrowmq plan run")
    parser.add_argument("--plan-rate", type=float, help="rows a second at most, as --rate of escrowmq plan run")
    parser.add_argument("--kill-at", type=float, default=40.0, help="percent of the rows after which the run is killed")
    parser.add_argument("--live", help=argparse.SUPPRESS)
    parser.set_defaults(body=64)
    options = parser.parse_args()
    if options.live:
        return live(options.live, options.rate)
    report = Report("redrive by a plan", options)
    report.begin()
    with broker(options) as url, tempfile.TemporaryDirectory(dir=options.folder) as folder, mq.connect(url) as bus:
        if not options.json:
            print(f"making {options.rows:,} dead letters", flush=True)
        bus.admin.create_topic(LIVE, may_exist=True)
        fill(bus, options.rows, options.body)
        took = time.perf_counter()
        take(url, options.rows, die=True)
        add = lambda name, unit, value, goal="-": report.add(name, unit, goal, [float(value)])  # noqa: E731
        add("died", "rows/s", options.rows / (time.perf_counter() - took))
        traffic = Live(url, options.rate)
        time.sleep(2.0)
        traffic.lap()
        time.sleep(max(options.seconds, 5.0))
        before = traffic.lap()

        plans = Plans(Path(folder) / "plans")
        took = time.perf_counter()
        plan = plans.make(bus, "dead_letters.retry", {"group": GROUP}, why="bench")
        add("plan make", "s", time.perf_counter() - took)
        assert plan.rows == options.rows
        making = traffic.lap()
        took = time.perf_counter()
        assert plans.dry_run(plan.id, bus).by_outcome == {"done": options.rows}
        add("plan dry-run", "s", time.perf_counter() - took)
        looking = traffic.lap()

        first = Running(url, plans, plan.id, options)
        while plans.get(plan.id).next < options.rows * options.kill_at / 100:
            assert first.process.poll() is None, "it ended before it was killed"
            time.sleep(0.02)
        seconds = first.kill()
        found = plans.get(plan.id)
        again, result = Running(url, plans, plan.id, options).end()
        during = traffic.lap()
        traffic.close()
        add("plan run, killed", "s", seconds)
        add("killed when so many were done with", "rows", found.next)
        add("in doubt then", "rows", found.in_doubt)
        add("plan run, going on", "s", again)
        add("both runs, pauses included", "rows/s", options.rows / (seconds + again))
        add("memory of the run", "MiB", result["mib"])
        for name, lap in (
            ("alone", before),
            ("beside make", making),
            ("beside dry-run", looking),
            ("beside the run", during),
        ):
            for share in ("p50", "p99", "max"):
                if lap[share] is not None:
                    add(f"live {share} {name}", "ms", lap[share])

        assert result["outcomes"] == {"done": options.rows}, result["outcomes"]
        set_shown, (set_done, acts) = shown(bus, plans, plan.id), done(bus, plan.id)
        digests = digest(set_shown), digest(set_done)
        times = take(url, options.rows, die=False)
        add("acts in the record", "acts", acts)
        add("settled twice", "rows", len(set_done) - len(set(set_done)), "0")
        add("left out", "rows", len(set(set_shown) - set(set_done)), "0")
        add("delivered again, but not once", "rows", int((times != 1).sum()), "0")
        add("dead letters left", "rows", len(bus.admin.dead_letters(GROUP, 10)), "0")
        if not options.json:
            print(f"digest of the plan {plan.digest}\nshown {digests[0]}\ndone  {digests[1]}")
        assert digests[0] == digests[1], "the set done is not the set shown"
        assert (times == 1).all()
    report.end()


if __name__ == "__main__":
    main()
