"""Round trips over the two carriers, Flight and the lean one, in turns (A B B A): time of a caller, processor time on both sides."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from _harness import Report, arguments, serve

from escrowmq.client.links.flight import FlightLink
from escrowmq.client.links.lean import LeanLink
from escrowmq.errors import EscrowError
from escrowmq.schemas import OUTGOING, empty
from escrowmq.wire import Exchange, Link, Parcel, lean

TICK = os.sysconf("SC_CLK_TCK")
PATIENCE = 30.0
Trip = Callable[[], None]


def nothing(link: Link) -> Trip:
    """A batch without rows: answered at once, by neither the writer nor the log. What is left is the carrier."""
    batch = empty(OUTGOING)
    return lambda: link.exchange(Exchange.SEND, batch, {}).result(PATIENCE)


def prepared(link: Link, body: bytes) -> Trip:
    """One half message, synced before the answer, as a parcel."""
    session = link.action("session.open", {"group": "bench", "instance": "one", "transactional": True}, PATIENCE)[
        "session"
    ]
    came = threading.Semaphore(0)
    sequence = [time.time_ns()]  # another one for each link
    answers: list[object] = []

    def done(answer: object) -> None:
        answers.append(answer)
        came.release()

    def trip() -> None:
        sequence[0] += 1
        row = ("bench", body, None, None, None, None, -1, 0, 0, 0, None)
        link.parcel(Parcel(Exchange.PREPARE, [row], {"session": session}, (1, sequence[0])), done)
        came.acquire(timeout=PATIENCE)
        if isinstance(answer := answers.pop(), EscrowError):
            raise answer

    return trip


def pinged(port: int) -> Trip:
    """A ping over a bare socket, of a caller that does nothing else: the floor of the lean carrier."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(lean.hello())
    connection.recv(4096)
    request = lean.ping(b"bench")

    def trip() -> None:
        connection.sendall(request)
        connection.recv(4096)

    return trip


class Broker:
    """The process that serves."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")

    def seconds(self) -> float:
        """Processor time that it has taken; counted by the system in hundredths."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


def run(trip: Trip, broker: Broker, seconds: float) -> tuple[float, float, float, float]:
    """p10 and p50 of a round trip, and the processor time of this process and the broker's for each; microseconds."""
    times = []
    ours, theirs, until = time.process_time(), broker.seconds(), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        trip()
        times.append(time.perf_counter() - begun)
    ours, theirs = time.process_time() - ours, broker.seconds() - theirs
    tenths = statistics.quantiles(times, n=10)
    return tuple(1e6 * value for value in (tenths[0], statistics.median(times), ours / len(times), theirs / len(times)))


def main() -> int:
    options = arguments(__doc__).parse_args()
    report = Report("carriers", options)
    report.begin()
    with TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        process, ready = serve(Path(folder) / "data")
        port = int(ready["url"].rpartition(":")[2])
        links: dict[str, Link] = {
            "flight": FlightLink("127.0.0.1", port),
            "lean": LeanLink(FlightLink("127.0.0.1", port)),
        }
        body, broker = os.urandom(options.body), Broker(process.pid)
        trips = {f"no rows, {name}": nothing(link) for name, link in links.items()}
        trips |= {f"prepare, {name}": prepared(link, body) for name, link in links.items()}
        trips["ping, lean, a bare socket"] = pinged(ready["lean"]["port"])
        figures: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in trips if report.wants(name)}
        for name in figures:
            run(trips[name], broker, 0.3)
        for _ in range(options.repeats):
            for name in (*figures, *reversed(figures)):
                figures[name].append(run(trips[name], broker, options.seconds))
        for name, found in figures.items():
            for what, values in zip(("p10", "p50", "client", "broker"), zip(*found, strict=True), strict=True):
                report.add(f"{name}: {what}", "us", "none", list(values))
        for link in links.values():
            link.close()
        process.terminate()
        process.communicate()
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
