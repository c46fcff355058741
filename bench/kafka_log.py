"""The log on Kafka beside the log in a folder: the same works, served, in turns in one run; and what a leader and a
standby cost and need.

Two brokers, each in a process of its own: one syncs its log to its folder, the other has it on real Kafka nodes (three,
three replicas, of which two acknowledge at least). Load programs in processes of their own do the works of the goals,
prepare and commit each, on the one and the other in turns, on the same cores, after minutes of work for Kafka's Java.
Then the second broker gets a standby, and it is measured: what all of them cost while nothing happens and at a steady
pace, what a message takes on disks and in the network, and how fast a standby is there again, its folder kept and lost.

What is measured was stored: in the end the messages of each topic are counted at both brokers, and in the folder of the
standby, which has them from Kafka alone. ``--docs`` writes the tables into ``docs/scale.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _harness import machine

sys.path.append(str(Path(__file__).parent / "peers"))
from documents import place
from measuring import Outcome, descendants, processor_seconds, resident_bytes, run
from ours import EscrowMQ, environment
from seam import Running, Work
from starting import started

import escrowmq as mq
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.log.kafka.replica import PartitionReplica
from escrowmq.platform.disk import RealDisk
from escrowmq_lab.servers import kafka
from escrowmq_lab.servers.process import Server, accepts, free_port

ROOT = Path(__file__).parents[1]
SLOW_DISK = Path(__file__).with_name("slow_disk.py")
BEGIN, END = "<!-- kafka_log: written by bench/kafka_log.py -->", "<!-- kafka_log: end -->"
TOPIC = "bench"
"""Of the load programs."""
WORKS = (
    Work("4 callers, batches of 1,000", "batches", callers=4, rows=1000),
    Work("1 caller, batches of 1,000", "batches", rows=1000),
    Work("one caller: prepare + commit", "threads"),
    Work("32 in flight", "flight", callers=32),
    Work("256 in flight", "flight", callers=256),
)
GOALS = {"4 callers, batches of 1,000": 0.4, "1 caller, batches of 1,000": 0.4, "256 in flight": 0.8}
"""What part of the local log's rate is asked for."""
PACED = Work("paced", "paced", callers=64)
KAFKA_SETTINGS = {
    # as by default: those of the tests are to notice a death sooner, and cost more
    "broker.heartbeat.interval.ms": "2000",
    "broker.session.timeout.ms": "9000",
    "socket.send.buffer.bytes": "-1",  # as the system sizes them, which a megabyte on loopback needs
    "socket.receive.buffer.bytes": "-1",
    "replica.socket.receive.buffer.bytes": "-1",
}
JVM = ["-Xms1g", "-Xmx1g", "-XX:+UseSerialGC", "-Xshare:auto"]
"""Java with all of its compilers, and the memory that Kafka's own start script gives it: with half of it, collecting
garbage took more than twice as long.
"""
BEYOND_FREE = 2 << 30
"""Bytes that are read beyond what is free: then the system takes back pages that were in use, and goes on doing so
while it is measured.
"""
LEFT_FREE = 64 << 20
"""Of the memory that is free between two runs this is not touched."""
COMPILED = 0.05
"""The part of Kafka's processor time that compiling may take when it is measured."""
PATIENCE = 120.0
SIDES = ("local", "kafka")
KAFKA = "a node of Kafka, the mean of all"


@dataclass
class Pair:
    """The brokers that are measured, and the nodes of Kafka."""

    local: Running
    leader: Running
    standby: Server
    log: str
    """The address of the log that both share."""
    nodes: list[Server]
    """Those that were started for it."""
    partitions: list[Path]
    """The folder of the log's partition, on each node."""
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    """Transactions that the load programs have counted, without those that warm up."""
    compiling: float | None = None
    """The part of Kafka's processor time that compiling took when it had been warmed."""

    def brokers(self) -> Iterator[tuple[str, Running]]:
        """Both that take requests."""
        yield from zip(SIDES, (self.local, self.leader), strict=True)

    def partition_bytes(self) -> int:
        """Of the records of the log, on the node that has most of them; 0 of a Kafka that is elsewhere."""
        return max((sum(path.stat().st_size for path in at.glob("*.log")) for at in self.partitions), default=0)


def ask(url: str, action: str) -> dict[str, Any]:
    """What one broker says; empty while it does not."""
    try:
        with mq.connect(f"{url}?replicas=listed") as bus:
            return dict(bus.router.links[0].action(action, {}, 2.0))
    except mq.EscrowError:
        return {}


def eventually(what: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError(why())
        time.sleep(0.02)


def stored(url: str) -> int:
    """Messages in the topic, as a broker says, or a folder."""
    with contextlib.closing(mq.connect(url, **({"read_only": True} if url.startswith("file:") else {}))) as bus:
        return sum(queue["end"] for queue in bus.admin.offsets(TOPIC))


@contextlib.contextmanager
def running(options: argparse.Namespace, folder: Path) -> Iterator[Pair]:
    """Kafka, a broker with a log of its own, one with its log on Kafka, and another that is not started yet."""
    with contextlib.ExitStack() as stack:
        nodes: list[Server] = []
        homes: list[Path] = []
        if options.kafka is not None:
            url = options.kafka
        elif options.nodes == 1:
            node = stack.enter_context(kafka.serving(folder / "kafka"))
            url, nodes, homes = node.url, [node], [folder / "kafka"]
        else:
            made = kafka.cluster(folder / "kafka", options.nodes, KAFKA_SETTINGS, jvm=JVM)
            cluster = stack.enter_context(made)
            url, nodes = cluster.url, cluster.nodes
            homes = [folder / "kafka" / f"node-{number + 1}" for number in range(options.nodes)]
        topic = f"log-{uuid.uuid4().hex[:8]}"
        log = f"{url}/{topic}" + (f"?replication={options.nodes}" if options.nodes < 3 else "")
        create_topics(log)
        local = stack.enter_context(_Local(options.sync_ms).running(folder / "local"))
        ports = free_port(), free_port()
        addresses = "escrow://" + "|".join(f"127.0.0.1:{port}" for port in ports)
        servers = [
            node_of(folder / name, port, log, addresses)
            for name, port in zip(("leader", "standby"), ports, strict=True)
        ]
        leader = stack.enter_context(started(servers[:1], f"escrow://127.0.0.1:{ports[0]}"))
        stack.callback(servers[1].stop)
        eventually(
            lambda: ask(leader.address, "hello").get("role") == "leader", lambda: f"nobody leads: {said(servers[0])}"
        )
        yield Pair(local, leader, servers[1], log, nodes, [home / "kafka" / f"{topic}-0" for home in homes])


class _Local(EscrowMQ):
    """A broker with its log in a folder, on a disk whose syncs take so many milliseconds at least."""

    def __init__(self, sync_ms: float) -> None:
        self.program = ["-m", "escrowmq"] if not sync_ms else [str(SLOW_DISK), str(sync_ms)]


def sync_ms(folder: Path) -> float:
    """Milliseconds that the disk takes to sync 128 KiB more of a file that has its room, as a log's segment has; the
    median of 200."""
    took = []
    with (folder / "sync").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 200 << 17)
        for _ in range(200):
            file.write(os.urandom(1 << 17))
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(took)


def node_of(folder: Path, port: int, log: str, addresses: str) -> Server:
    """A broker that shares its log, on a folder ``data`` in this one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder / "data"), "-l", f"127.0.0.1:{port}"]
    command += ["--log", log, "--replicas", addresses, "--silence", "10"]  # it is measured, not failed over
    return Server(
        url=f"escrow://127.0.0.1:{port}",
        command=command,
        ready=lambda _: accepts(port),
        log=folder / "log",
        environment=environment(),
    )


def said(server: Server) -> str:
    """The end of what a server printed."""
    return server.log.read_text(errors="replace")[-2000:]


# The works


def works(pair: Pair, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each work on both brokers in turns, who begins changing."""
    given = WORKS[1::3] if options.quick else WORKS
    chosen = [work for work in given if options.only is None or any(only in work.name for only in options.only)]
    if chosen and options.warm:
        use_memory(folder)
        run(EscrowMQ(), pair.local, WORKS[0], 4 * options.warm, options.body, 0.0)
        warm_kafka(pair, options)
    found = []
    for work in chosen:
        if not options.quick:
            use_memory(folder)
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for repeat in range(options.repeats):
            for side, broker in sorted(pair.brokers(), reverse=bool(repeat % 2)):
                runs[side].append(one(pair, side, broker, work, options.seconds, options))
        pairs = zip(runs["kafka"], runs["local"], strict=True)
        ratios = [theirs["rate"] / ours["rate"] for theirs, ours in pairs]
        found.append({"name": work.name, "goal": GOALS.get(work.name), **runs, "ratio": ratios})
        told(options, f"{work.name}: {statistics.median(ratios):.2f} of the local log")
    return found


def use_memory(folder: Path) -> None:
    """Bring the machine's memory into use, all of it, as it is where something has run for days: what is free goes to
    the page cache of a file of holes.

    A virtual machine pays ten times for each page that its host has to find first, and a log on three nodes takes four
    times as many of them as one in a folder: writing a round of 256 messages to the mirror took 0.7 ms instead of 0.1,
    and its proof 2.1 ms instead of 0.8.
    """
    name, size = f"memory-{time.monotonic_ns()}", free_bytes() + BEYOND_FREE
    with (folder / name).open("wb") as file:
        file.truncate(size)  # it takes no room on the disk; it goes with the folder, and its pages with it
    with (folder / name).open("rb", buffering=0) as file:
        room = bytearray(1 << 20)
        while file.readinto(room):
            pass


def touch_memory() -> None:
    """Touch what is free by now: the host takes it back when it is free for two seconds, as it is between two runs."""
    with mmap.mmap(-1, max(free_bytes() - LEFT_FREE, mmap.PAGESIZE)) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages.fill(1)
        del pages


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemFree:")))


def warm_kafka(pair: Pair, options: argparse.Namespace) -> None:
    """Work until Java has compiled what Kafka does: one that runs for hours has, and one that has just begun takes more
    than twice the processor time."""
    pids, begun = kafka_pids(pair), time.monotonic()
    while True:
        before = compiling_seconds(pids), processor_seconds(pids)
        for work in WORKS:
            run(EscrowMQ(), pair.leader, work, max(4 * options.warm, 5.0), options.body, 0.0)
        compiling, all_of_it = compiling_seconds(pids) - before[0], processor_seconds(pids) - before[1]
        told(
            options,
            f"Kafka warms up: {100 * compiling / max(all_of_it, 1e-9):.0f} % of its processor time is compiling",
        )
        if compiling < COMPILED * all_of_it or time.monotonic() - begun > options.warm_kafka or not pids:
            pair.compiling = compiling / all_of_it if pids else None
            return


def compiling_seconds(pids: list[int]) -> float:
    """Processor time of the threads that compile, of these Javas."""
    ticks = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that has ended
                name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
                if "CompilerThre" in name:
                    ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def one(
    pair: Pair, side: str, broker: Running, work: Work, seconds: float, options: argparse.Namespace
) -> dict[str, float]:
    """One run of a work: its figures, and the processor time of Kafka's nodes with it. What the run before left to be
    written is written first."""
    if not options.quick:
        os.sync()
        touch_memory()
    before, rounds = processor_seconds(kafka_pids(pair)), ask(broker.address, "stats")["rounds_total"]
    outcome: Outcome = run(EscrowMQ(), broker, work, seconds, options.body, options.warm)
    kafka_s = processor_seconds(kafka_pids(pair)) - before
    pair.done[side] += outcome.done
    rounds = ask(broker.address, "stats")["rounds_total"] - rounds
    return {**outcome.figures(options.body), "kafka_us": 1e6 * kafka_s / outcome.done, "rounds": rounds}


def kafka_pids(pair: Pair) -> list[int]:
    return [node.pid for node in pair.nodes]


# A leader and a standby


def costs(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """What all of them cost while nothing happens, and at a steady pace: parts of a core; and memory, and what a
    message takes."""
    pair.standby.start()
    level(pair)
    who = {
        "broker with its log in a folder": pair.local.pids(),
        "leader": pair.leader.pids(),
        "standby": descendants(pair.standby.pid),
        **({KAFKA: kafka_pids(pair)} if pair.nodes else {}),
    }

    def parts(during: Callable[[], float]) -> dict[str, float]:
        before = {name: processor_seconds(pids) for name, pids in who.items()}
        seconds = during()
        spent = {name: (processor_seconds(pids) - before[name]) / seconds for name, pids in who.items()}
        return {name: part / (len(pair.nodes) if name == KAFKA else 1) for name, part in spent.items()}

    idle = parts(lambda: waited(options.idle))
    paced, rates, sizes = {}, {}, {}
    for side, broker in pair.brokers():
        work = Work(PACED.name, PACED.kind, callers=PACED.callers, rows=options.pace)
        before = {"log": ask(broker.address, "stats")["log_stored_bytes"], "partition": pair.partition_bytes()}
        count = stored(broker.address)

        def paced_run(side: str = side, broker: Running = broker, work: Work = work) -> float:
            begun = time.monotonic()
            figures = one(pair, side, broker, work, options.idle, options)
            rates[side] = figures["rate"]
            return time.monotonic() - begun

        paced[side] = parts(paced_run)
        level(pair)
        count = stored(broker.address) - count
        sizes[side] = {
            "log": (ask(broker.address, "stats")["log_stored_bytes"] - before["log"]) / count,
            "partition": (pair.partition_bytes() - before["partition"]) / count,
        }
        told(options, f"{rates[side]:,.0f} transactions a second, {side}")
    memory = {name: resident_bytes(pids) / (1 << 20) for name, pids in who.items()}
    if pair.nodes:
        memory[KAFKA] /= len(pair.nodes)
    return {"idle": idle, "paced": paced, "rates": rates, "bytes": sizes, "memory_mib": memory}


def waited(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def level(pair: Pair) -> None:
    """Wait until the standby has followed to where the leader stands."""

    def is_level() -> bool:
        there = ask(pair.standby.url, "stats").get("log_position", -1)
        return bool(there == ask(pair.leader.address, "stats").get("log_position"))

    eventually(is_level, lambda: f"the standby is behind: {ask(pair.standby.url, 'stats')}; {said(pair.standby)}")


def openings(pair: Pair, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a standby is level again: its folder as it left it, and lost; and how fast a folder is filled from
    Kafka, without a broker."""
    found: dict[str, Any] = {"kept_s": [], "lost_s": [], "mb_s": [], "opened_s": []}
    for kind in itertools.islice(itertools.cycle(("kept", "lost")), 2 * options.openings):
        pair.standby.stop()
        if kind == "lost":
            shutil.rmtree(folder / "standby" / "data")
        begun = time.monotonic()
        pair.standby.start()
        level(pair)
        found[f"{kind}_s"].append(time.monotonic() - begun)
    pair.standby.stop()
    stats = ask(pair.leader.address, "stats")
    found |= {"bytes": stats["log_stored_bytes"], "rows": stats["log_position"]}
    for repeat in range(options.openings):
        found["mb_s"].append(found["bytes"] / 1e6 / followed(pair, folder / f"copy-{repeat}"))
        found["opened_s"].append(followed(pair, folder / f"copy-{repeat}"))
        shutil.rmtree(folder / f"copy-{repeat}")
    return found


def followed(pair: Pair, folder: Path) -> float:
    """Seconds until a folder holds what is in Kafka now: signs of life, which come meanwhile, are not waited for."""
    with contextlib.closing(open_partitions(pair.log).log()) as partition:
        _, end = partition.ends(PATIENCE)
    begun = time.monotonic()
    replica = PartitionReplica(RealDisk(folder), open_partitions(pair.log), url="escrow://127.0.0.1:1")
    try:
        while replica.offset < end:
            replica.follow(1.0)
        return time.monotonic() - begun
    finally:
        replica.close()


def checked(pair: Pair, folder: Path) -> dict[str, int]:
    """Messages that are stored. RuntimeError if a broker has fewer than were counted as done, or the standby others
    than its leader."""
    found = {side: stored(broker.address) for side, broker in pair.brokers()}
    pair.standby.start()
    level(pair)
    pair.standby.stop()  # of a folder in use, the last round is not shown
    found["standby"] = stored(f"file:{folder / 'standby' / 'data'}")
    if any(found[side] < pair.done[side] for side in SIDES) or found["standby"] != found["kafka"]:
        raise RuntimeError(f"counted as done {pair.done}, stored {found}: these figures are wrong")
    return found


# What is shown


def told(options: argparse.Namespace, line: str) -> None:
    """Beside a run that takes long."""
    if not options.json:
        print(line, file=sys.stderr, flush=True)


def tables(content: dict[str, Any]) -> str:
    """Markdown: medians, in brackets the lowest and the highest."""
    settings, where = content["settings"], content["machine"]
    nodes = f"{settings['nodes']} Kafka {'node' if settings['nodes'] == 1 else 'nodes'}"
    compiling = content["compiling"]
    warmed = (
        "" if compiling is None else f"Of Kafka's processor time {100 * compiling:.0f} % went into compiling still."
    )
    slowed = ", made slower by this benchmark" if settings["sync_ms"] else ""
    lines = [
        f"{where['cpu']}, {where['cores']} cores for clients, brokers and {nodes} together, Python {where['python']}; "
        f"{settings['repeats']} rounds of {settings['seconds']:g} s in turns, "
        f"bodies of {settings['body']:,} bytes; medians, in brackets the lowest and the highest. "
        f"The disk of the log in a folder syncs 128 KiB in {shown(content['disk']['sync_ms'])} ms (median{slowed}). "
        f"{warmed}",
    ]
    if content["works"]:
        lines += ["", *works_table(content["works"], nodes)]
    if content["costs"]:
        lines += ["", *costs_table(content["costs"], settings), "", *openings_table(content["openings"])]
    return "\n".join(lines)


def works_table(found: list[dict[str, Any]], nodes: str) -> list[str]:
    lines = [
        f"| prepare + commit of each message | log in a folder | log on {nodes} | of the local rate | goal | µs of "
        "processor time, folder: client + broker | on Kafka: client + broker + Kafka |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for work in found:
        local, theirs, goal = work["local"], work["kafka"], work["goal"]
        rates = [middle([one["rate"] for one in side]) for side in (local, theirs)]
        delays = [f"{median(side, 'p50_ms')} / {median(side, 'p99_ms')} ms" for side in (local, theirs)]
        cells = [work["name"], *(f"{rate}/s; {delay}" for rate, delay in zip(rates, delays, strict=True))]
        cells += [middle(work["ratio"], 100, " %"), "" if goal is None else f"≥ {100 * goal:.0f} %"]
        cells += [f"{median(local, 'client_us')} + {median(local, 'server_us')}"]
        cells += [" + ".join(median(theirs, name) for name in ("client_us", "server_us", "kafka_us"))]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Rates in transactions a second; behind them p50 / p99 of one call (of batches: prepare and commit of 1,000).",
    ]


def costs_table(found: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    rate = statistics.mean(found["rates"].values())
    lines = [
        f"| process | % of a core, idle | % of a core at {rate:,.0f} transactions/s | memory, MiB |",
        "| --- | --- | --- | --- |",
    ]
    for name in found["idle"]:
        side = "local" if "folder" in name else "kafka"
        cells = (100 * found["idle"][name], 100 * found["paced"][side][name], found["memory_mib"][name])
        lines.append(f"| {name} | {' | '.join(map(shown, cells))} |")
    size, partition, copies = found["bytes"]["kafka"]["log"], found["bytes"]["kafka"]["partition"], settings["nodes"]
    lines += [
        "",
        "| a message with its commit | bytes |",
        "| --- | --- |",
        f"| body | {settings['body']:,} |",
        f"| log in a folder | {found['bytes']['local']['log']:,.0f} |",
        f"| folder of the leader, and of each standby | {size:,.0f} |",
        f"| Kafka's disks: {partition:,.0f} × {copies} replicas | {partition * copies:,.0f} |",
        f"| Kafka's network in, the leader's record and {copies - 1} copies of it | {partition * copies:,.0f} |",
        f"| Kafka's network out, {copies - 1} copies and one for each standby | {partition * copies:,.0f} |",
    ]
    return lines


def openings_table(found: dict[str, Any]) -> list[str]:
    return [
        f"| a standby of a log of {found['rows']:,.0f} rows, {found['bytes'] / 1e6:,.0f} MB | |",
        "| --- | --- |",
        f"| level again, its folder kept, with the start of Python | {middle(found['kept_s'])} s |",
        f"| level again, its folder lost | {middle(found['lost_s'])} s |",
        f"| a folder filled from Kafka: read, checked, written | {middle(found['mb_s'])} MB/s |",
        f"| a folder opened that was filled before | {middle(found['opened_s'])} s |",
    ]


def median(runs: list[dict[str, float]], name: str) -> str:
    return shown(statistics.median(one[name] for one in runs))


def middle(values: list[float], times: float = 1.0, unit: str = "") -> str:
    low, high = times * min(values), times * max(values)
    spread = "" if low == high else f" ({shown(low)} to {shown(high)})"
    return f"{shown(times * statistics.median(values))}{unit}{spread}"


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--warm", type=float, default=0.5, help="seconds before each that do not count")
    parser.add_argument(
        "--warm-kafka",
        type=float,
        default=400.0,
        help="seconds of work before all, at most, for Kafka's Java to compile",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds, local and Kafka in turns")
    parser.add_argument("--openings", type=int, default=2, help="how often a standby is started, each way")
    parser.add_argument(
        "--sync-ms", type=float, default=0.0, help="the local log's disk takes so long for a sync, at least"
    )
    parser.add_argument("--body", type=int, default=1024, help="bytes of one body")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of Kafka, and replicas: 1 or 3")
    parser.add_argument(
        "--kafka", help="a Kafka that runs, as kafka://HOST:PORT,..., instead of nodes that are started"
    )
    parser.add_argument("--pace", type=int, default=1000, help="transactions a second of the steady pace")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds of looking at idle brokers, and at paced ones"
    )
    parser.add_argument("--only", action="append", help="only works whose name contains this, and no standby")
    parser.add_argument("--folder", type=Path, help="where data folders are made (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one node, two works and next to no time: whether it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/scale.md, too")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.warm, options.repeats, options.nodes = 0.1, 0, 1, 1
        options.pace, options.idle, options.openings = 100, 0.3, 1
    content: dict[str, Any] = {"benchmark": "kafka_log", "machine": machine(), "time": time.time()}
    names = ("seconds", "warm", "warm_kafka", "repeats", "body", "nodes", "pace", "idle", "kafka", "sync_ms")
    content["settings"] = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="escrowmq-kafka-log-", dir=options.folder) as place_of_all:
        folder = Path(place_of_all)
        content["disk"] = {"sync_ms": max(sync_ms(folder), options.sync_ms)}
        with running(options, folder) as pair:
            content["works"] = works(pair, folder, options)
            content["costs"] = costs(pair, options) if options.only is None else None
            content["openings"] = openings(pair, folder, options) if options.only is None else None
            content |= {"done": pair.done, "stored": checked(pair, folder), "compiling": pair.compiling}
    print(json.dumps(content) if options.json else tables(content))
    if options.docs:
        place(ROOT / "docs" / "scale.md", tables(content), BEGIN, END)


if __name__ == "__main__":
    main()
