"""EscrowMQ beside its peers, in turns on one machine: RocketMQ, FastMiniMQ, Kafka, a PostgreSQL outbox, Redis Streams.

Every server syncs before it answers (one RocketMQ does not, as a reference). A round takes one peer after the other,
each with a fresh server and no other beside it, and runs each work once; the next round takes them in the opposite
order. The figure of a work is the median over rounds, with the lowest and the highest. Works and peers that a goal
speaks of get ``--rounds``, the others ``--extra-rounds``. The figures are written to ``--json FILE`` after each run;
``--resume`` goes on from there, and what failed is tried again. RocketMQ needs a JDK (17 or newer) and Maven, which
fetches it; FastMiniMQ a checkout of its source.

``--grpc`` compares RocketMQ and EscrowMQ under one load program instead: RocketMQ's gRPC client in Java.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import grpc_client  # noqa: E402
from _harness import machine  # noqa: E402
from documents import fill, page  # noqa: E402
from figures import Figures, Recovery  # noqa: E402
from measuring import run, sync_ms  # noqa: E402
from recovery import measure_memory, measure_recovery, running  # noqa: E402
from seam import Missing, Peer, Running, Work  # noqa: E402
from servers import peers  # noqa: E402
from tables import report  # noqa: E402
from works import GRPC_WORKS, WARM_UP, WORKS  # noqa: E402

from escrowmq_lab.servers.isolation import isolate, last_error  # noqa: E402

ROOT = Path(__file__).parents[2]
FAILURES = (RuntimeError, OSError, ValueError, Missing)
"""What a peer that cannot be started, or a load program that ends or hangs, comes to."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the works and peers that a goal speaks of")
    parser.add_argument("--extra-rounds", type=int, default=1, help="rounds of the others")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--warm", type=float, default=1.0, help="seconds of each load program that do not count")
    parser.add_argument("--body", type=int, default=1024, help="bytes of one body")
    parser.add_argument("--undecided", type=int, default=100_000, help="half messages of the recovery; 0: left out")
    parser.add_argument("--queued", type=int, default=100_000, help="messages of the memory figure; 0: left out")
    parser.add_argument("--minutes", type=float, help="begin no run later than this")
    parser.add_argument("--peers", help="only these, by a part of the name, with commas; =NAME: by the whole name")
    parser.add_argument("--works", help="only works whose name contains one of these, with semicolons")
    parser.add_argument("--grpc", action="store_true", help="RocketMQ's gRPC client, before RocketMQ and EscrowMQ")
    parser.add_argument("--fastminimq", type=Path, help="a checkout of FastMiniMQ's source")
    parser.add_argument("--folder", type=Path, help="where data folders are made (default: the temporary folder)")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=Path("-"), help="write the figures there; -: standard output"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the figures in the file of --json")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables of the file of --json")
    parser.add_argument(
        "--page", type=Path, help="write a page (Markdown) with the tables there, and a picture (SVG) beside it"
    )
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/speed.md of this checkout")
    parser.add_argument(
        "--shared-network", action="store_true", help="stay in this machine's network if it cannot be left"
    )
    given = parser.parse_args()
    if (given.resume or given.report) and (given.json is None or not given.json.is_file()):
        parser.error("--resume and --report need the file of an earlier run: --json FILE")
    return given


class Bench:
    """One call of this program: what is measured, and what was found so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        known = json.loads(given.json.read_text()) if given.resume else {}
        self.given = given
        self.works = [
            work
            for work in (GRPC_WORKS if given.grpc else WORKS)
            if given.works is None or any(part in work.name for part in given.works.split(";"))
        ]
        self.figures = Figures(given.body, known)
        self.recovery: list[dict[str, Any]] = list(known.get("recovery", ()))
        self.missing: dict[str, str] = {}
        self.until = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
        self.began = time.time()
        everybody = grpc_client.peers() if given.grpc else peers(given.fastminimq)
        self.all = [peer for peer in everybody if _wanted(peer.name, given.peers)]
        self.present = [peer for peer in self.all if self._prepared(peer)]

    def _prepared(self, peer: Peer) -> bool:
        try:
            peer.prepare()
        except FAILURES as problem:
            self.leave_out(peer, str(problem))
        return peer.name not in self.missing

    def leave_out(self, peer: Peer, reason: str) -> None:
        """A peer that cannot be had."""
        self.missing[peer.name] = reason
        say(f"without {peer.name}: {reason}")

    def isolate(self) -> None:
        """Leave the machine's network, or RocketMQ out."""
        if isolate():
            return
        say(f"this process may not leave the machine's network ({last_error()})")
        for peer in self.present if not self.given.shared_network else ():
            if peer.name.startswith("RocketMQ"):
                why = (
                    "its replication port listens on every address, and this process may not leave the machine's "
                    "network; --shared-network measures it all the same"
                )
                self.leave_out(peer, why)
        self.present = [peer for peer in self.present if peer.name not in self.missing]

    # Rounds

    def measure(self) -> None:
        """All rounds; after the first one recovery and memory, so that a run that is cut short has some of
        everything."""
        for number in range(max(self.given.rounds, self.given.extra_rounds)):
            self._round(number)
            if number == 0:
                self._recoveries()

    def _round(self, number: int) -> None:
        order = self.present if number % 2 == 0 else self.present[::-1]
        self.figures.sync_ms.append(sync_ms(self.given.folder or Path(tempfile.gettempdir())))
        for _, group in itertools.groupby(order, key=lambda peer: peer.server):
            together = list(group)
            with Servers(self) as servers:
                for work in self.works:
                    for peer in together:
                        rounds = self.given.rounds if work.goal and not peer.reference else self.given.extra_rounds
                        if number < rounds and not peer.lacks(work) and not self.figures.has(peer.name, work, number):
                            self._one(servers, peer, work, number)

    def _one(self, servers: Servers, peer: Peer, work: Work, number: int) -> None:
        given = self.given
        if time.monotonic() > self.until:
            return
        say(f"{(time.time() - self.began) / 60:5.1f} min, round {number + 1}: {work.name}: {peer.name}")
        try:
            server = servers.of(peer)
            self.figures.add(peer.name, work, number, run(peer, server, work, given.seconds, given.body, given.warm))
        except FAILURES as problem:
            say(f"failed: {problem}")
            self.figures.fail(peer.name, work.name, number, str(problem))
            servers.drop(peer)  # whatever state it is in: the next work gets a fresh one
        self.save()

    # Recovery and memory

    def _recoveries(self) -> None:
        done = {one["peer"] for one in self.recovery if not one["failure"]}
        self.recovery = [one for one in self.recovery if not one["failure"]]
        for peer in self.present:
            undecided = 0 if peer.recovers else self.given.undecided
            queued = 0 if self.given.grpc or peer.lacks(Work("", "queue")) else self.given.queued
            if peer.name in done or not (undecided or queued) or time.monotonic() > self.until:
                continue
            one = Recovery(peer.name)
            try:
                if undecided:
                    say(f"{peer.name}: {undecided:,} undecided, kill -9, restart, all asked")
                    measure_recovery(peer, one, undecided, self.given.body, self.given.folder)
                if queued:
                    say(f"{peer.name}: memory at rest and after {queued:,} messages")
                    measure_memory(peer, one, queued, self.given.body, self.given.folder)
            except FAILURES as problem:
                one.failure = str(problem)
                say(f"failed: {problem}")
            self.recovery.append(one.content())
            self.save()

    # What was found

    def content(self) -> dict[str, Any]:
        """All figures, for JSON and the tables."""
        given = self.given
        names = ("rounds", "extra_rounds", "seconds", "warm", "body")
        return {
            "benchmark": "peers",
            "grpc": given.grpc,
            "machine": {**machine(), "host": platform.machine()},
            "settings": {name: getattr(given, name) for name in names},
            "time": time.time(),
            "works": [{"name": work.name, "shows": work.shows, "goal": work.goal} for work in self.works],
            "peers": [
                {
                    "name": peer.name,
                    "promise": peer.promise,
                    "missing": self.missing.get(peer.name),
                    "lacks": {work.name: reason for work in self.works if (reason := peer.lacks(work))},
                    "recovers": peer.recovers,
                    "remark": peer.remark,
                }
                for peer in self.all
            ],
            **self.figures.content(),
            "recovery": self.recovery,
        }

    def save(self) -> None:
        """Replace the file of figures."""
        path: Path | None = self.given.json
        if path is not None and path != Path("-"):
            new = path.with_name(f".{path.name}.new")
            new.write_text(json.dumps(self.content(), indent=1))
            new.replace(path)


class Servers:
    """The server of some peers of a round: started when it is first needed, warmed up, and stopped at the end."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._running: dict[str, Running] = {}

    def __enter__(self) -> Servers:
        return self

    def of(self, peer: Peer) -> Running:
        """The server of a peer."""
        if peer.server not in self._running:
            stack, given = contextlib.ExitStack(), self._bench.given
            self._stacks[peer.server] = stack
            server = stack.enter_context(running(peer, given.folder))
            start = time.monotonic()
            if given.warm:
                run(peer, server, WARM_UP, given.warm, given.body)
                time.sleep(max(peer.settles_s - (time.monotonic() - start), 0.0))
            self._running[peer.server] = server
        return self._running[peer.server]

    def drop(self, peer: Peer) -> None:
        """Stop it."""
        self._running.pop(peer.server, None)
        if stack := self._stacks.pop(peer.server, None):
            with contextlib.suppress(*FAILURES):
                stack.close()
            os.sync()  # what one left to be written is not the next one's handicap

    def __exit__(self, *_: object) -> None:
        for peer in self._bench.present:
            self.drop(peer)


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """SIGTERM ends this program as Ctrl-C does: servers are stopped, and their folders go."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    given = options()
    if given.report:
        content = json.loads(given.json.read_text())
    else:
        bench = Bench(given)
        bench.isolate()
        with stopped_in_order(), contextlib.suppress(KeyboardInterrupt):
            bench.measure()
        bench.save()
        content = bench.content()
    if given.json == Path("-"):
        print(json.dumps(content))
    else:
        print(report(content))
    if given.page:
        page(given.page, content)
    for path in fill(ROOT, content) if given.docs else ():
        say(f"written: {os.path.relpath(path)}")


def _wanted(name: str, parts: str | None) -> bool:
    given: Iterable[str] = parts.lower().split(",") if parts else [""]
    name = name.lower().replace(",", "")
    return any(part[1:] == name if part.startswith("=") else part in name for part in given)


def say(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
