"""EscrowMQ beside its peers, in turns on one machine: RocketMQ, FastMiniMQ, Kafka, a PostgreSQL outbox, Redis Streams.

Every server syncs before it answers (one RocketMQ does not, as a reference). A round runs each work once on every peer, the next round in
the opposite order; the figure of a work is the median over rounds, with the lowest and the highest. ``--json FILE`` and ``--page FILE`` keep
the figures, and a table with a picture. RocketMQ needs a JDK (17 or newer) and Maven, which fetches it; FastMiniMQ a checkout of its source.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from _harness import machine  # noqa: E402
from figures import Figures, Recovery  # noqa: E402
from isolation import isolate, last_error  # noqa: E402
from measuring import run  # noqa: E402
from page import page, table  # noqa: E402
from recovery import measure_memory, measure_recovery  # noqa: E402
from seam import Missing, Peer, Work  # noqa: E402
from servers import peers  # noqa: E402

WORKS = [
    Work("one caller: prepare + commit, p50 ms", "threads", figure="p50_ms"),
    Work("prepare to seen by a waiting consumer, p50 ms", "seen", figure="p50_ms"),
    Work("the same, p99 ms", "seen", figure="p99_ms"),
    Work("16 threads, transactions/s", "threads", callers=16),
    Work("64 threads, transactions/s", "threads", callers=64),
    Work("256 threads, transactions/s", "threads", callers=256),
    Work("16 processes of 4 threads, transactions/s", "threads", callers=4, processes=16),
    Work("1,000 in flight in one process, transactions/s", "flight", callers=1000),
    Work("8 callers, batches of 100, messages/s", "batches", callers=8, rows=100),
    Work("8 callers, batches of 2,000, messages/s", "batches", callers=8, rows=2000),
]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="runs of each work on each peer (even: both orders)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--body", type=int, default=1024, help="bytes of one body")
    parser.add_argument("--undecided", type=int, default=100_000, help="half messages of the recovery; 0: left out")
    parser.add_argument("--queued", type=int, default=1_000_000, help="messages of the memory figure; 0: left out")
    parser.add_argument("--peers", help="only these, by a part of the name, with commas")
    parser.add_argument("--works", help="only works whose name contains this")
    parser.add_argument("--fastminimq", type=Path, help="a checkout of FastMiniMQ's source")
    parser.add_argument("--folder", type=Path, help="where data folders are made (default: the temporary folder)")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=Path("-"), help="write the figures there; -: standard output"
    )
    parser.add_argument("--page", type=Path, help="write a page with the table and a picture there")
    parser.add_argument(
        "--shared-network", action="store_true", help="stay in this machine's network if it cannot be left"
    )
    return parser.parse_args()


def main() -> None:
    given = options()
    present = _present(given)
    if not isolate():
        say(f"this process may not leave the machine's network ({last_error()})")
        if not given.shared_network:
            present = [peer for peer in present if not peer.name.startswith("RocketMQ")]
            say(
                "without RocketMQ, whose replication port listens on every address; --shared-network measures it all the same"
            )
    works = [work for work in WORKS if given.works is None or given.works in work.name]
    figures = Figures([peer.name for peer in present], [work.name for work in works])
    for number in range(given.rounds):
        for peer in present if number % 2 == 0 else present[::-1]:
            _round(peer, works, figures, given, f"round {number + 1} of {given.rounds}")
    recovery = _recovery(present, given)
    content = {
        "benchmark": "peers",
        "machine": {**machine(), "host": platform.machine()},
        "settings": {"rounds": given.rounds, "seconds": given.seconds, "body": given.body},
        "promises": {peer.name: peer.promise for peer in present},
        "time": time.time(),
        "figures": figures.content(),
        "recovery": [one.content() for one in recovery],
    }
    if given.json == Path("-"):
        print(json.dumps(content))
    else:
        print(table(content))
        if given.json:
            given.json.write_text(json.dumps(content))
    if given.page:
        given.page.write_text(page(content))


def say(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def _present(given: argparse.Namespace) -> list[Peer]:
    wanted = given.peers.lower().split(",") if given.peers else [""]
    found = []
    for peer in peers(given.fastminimq):
        if not any(part in peer.name.lower() for part in wanted):
            continue
        try:
            peer.prepare()
        except Missing as problem:
            say(f"without {peer.name}: {problem}")
        else:
            found.append(peer)
    return found


def _round(peer: Peer, works: list[Work], figures: Figures, given: argparse.Namespace, what: str) -> None:
    """Every work once on one peer, each on a fresh server: what an earlier one left behind is nobody's handicap."""
    last: tuple[str, int, int, int] | None = None
    for work in works:
        if not peer.can(work):
            continue
        say(f"{what}: {peer.name}: {work.name}")
        same = (work.kind, work.callers, work.processes, work.rows)
        if same != last:  # two figures of one run
            with tempfile.TemporaryDirectory(prefix="escrowmq-peers-", dir=given.folder) as folder:
                os.chmod(folder, 0o755)  # servers that run as another user
                with peer.running(Path(folder) / "server") as server:
                    outcome = run(peer, server, work, given.seconds, given.body)
            last = same
        figures.add(peer.name, work, outcome)


def _recovery(present: list[Peer], given: argparse.Namespace) -> list[Recovery]:
    found = []
    for peer in present:
        if not peer.can(Work("", "prepare", rows=1)) or peer.name not in ("EscrowMQ", "RocketMQ"):
            continue
        one = Recovery(peer.name)
        if given.undecided:
            say(f"{peer.name}: {given.undecided:,} undecided, kill -9, restart, all asked")
            measure_recovery(peer, one, given.undecided, given.body, given.folder)
        if given.queued:
            say(f"{peer.name}: memory at rest and after {given.queued:,} messages")
            measure_memory(peer, one, given.queued, given.body, given.folder)
        found.append(one)
    return found


if __name__ == "__main__":
    main()
