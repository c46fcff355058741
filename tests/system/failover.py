"""Failover under load, with clients that know nothing of it: ``python tests/system/failover.py --fault kill --fault
stop --runs 20``.

For each fault one log in one real Kafka, served brokers that share it, and a program that only knows ``escrow://a|b``:
threads of transactions, some of which roll back, and a consumer. They live through the strikes one after another:
strike, wait for the first answer of a transaction that was begun after it, heal what was struck, wait until it follows
and has what the leader has, strike again. In the end every id is looked at: one that the program committed and that is
not in the topic, or was not consumed, is *lost*, one that was seen at two places is *repeated*, one that was rolled
back and was seen is *leaked*.

Printed for each strike: seconds from the fault to that answer, and how often the leader changed; for each fault the
median and the worst, and the sums. A leader that hands over (``clean``, ``step-down``) answers for a while after it was
told: there the time is the longest one without an answer, from the order until the next leader has answered twenty
transactions. With ``kafka-two`` the time begins when one of the two nodes is started again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from failover_program import Account, Program, Watch, eventually
from failover_shard import QUICK, Kafka, Shard, one_node, temporary, three_nodes

import escrowmq as mq
from escrowmq.log.kafka.cluster.opening import open_partitions
from escrowmq_lab.servers.process import Server

SHORT = ("--retention", "1s", "--segment-bytes", "1MiB", "--dedup-window", "1s")
"""Settings of a log of which parts leave soon."""
AWAY = 5.0
"""Seconds for which two of three nodes of Kafka are away: longer than any silence after which a standby asks who leads.
"""


@dataclass
class Scene:
    """What a fault strikes: one shard, its program, and the broker that leads."""

    shard: Shard
    program: Program
    leader: Server
    struck: list[Server] = field(default_factory=list)
    """Kafka's nodes that were killed."""
    answered_away: int = 0
    """Transactions that were begun and answered while no answer was allowed."""

    @property
    def place(self) -> Kafka:
        return self.shard.place

    @property
    def name(self) -> str:
        """The leader's."""
        return self.shard.names[self.leader.url]

    def cut(self) -> None:
        assert self.place.proxy is not None
        self.place.proxy.cut(self.name)

    def mend(self) -> None:
        assert self.place.proxy is not None
        self.place.proxy.heal(self.name)


def _watched(strike: Callable[[Scene], None]) -> Callable[[Scene], Watch]:
    """The time begins with the fault."""

    def struck(scene: Scene) -> Watch:
        watch = scene.program.watch()
        strike(scene)
        return watch

    return struck


def _step_down(scene: Scene) -> Watch:
    with mq.connect(scene.shard.url) as bus:
        watch = scene.program.watch()
        bus.admin.step_down(why="a test")
    return watch


def _leave_behind(scene: Scene) -> None:
    """Stop the standby until what it would have followed next has left the log, and start it again."""
    (standby,) = (node for node in scene.shard.nodes if node is not scene.leader)
    standby.stop()
    partition = open_partitions(scene.shard.log).log()
    try:
        begins = partition.ends(5.0)[1]  # what the standby has followed at most
        scene.program.works(400)
        scene.leader.stop()
        scene.leader.start()  # retention runs soon after a start, else once a minute
        eventually(lambda: partition.ends(5.0)[0] > begins, "retention cuts nothing of what the standby lacks")
    finally:
        partition.close()
    standby.start()
    scene.leader = scene.shard.settle()


def _kill_kafka_leader(scene: Scene) -> Watch:
    scene.struck = [scene.place.leader(scene.shard.topics[0])]  # a question that takes a while
    watch = scene.program.watch()
    scene.struck[0].kill()
    return watch


def _kill_two(scene: Scene) -> Watch:
    """Two nodes of three, one of which leads the partition; the time begins when one of them is started again."""
    leading = scene.place.leader(scene.shard.topics[0])
    scene.struck = [leading, next(node for node in scene.place.nodes if node is not leading)]
    for node in scene.struck:
        node.kill()
    since = time.monotonic()
    time.sleep(AWAY)
    until = time.monotonic()
    scene.answered_away += scene.program.between(since, until)
    watch = scene.program.watch()
    scene.struck.pop().start()
    return watch


def _start_kafka(scene: Scene) -> None:
    while scene.struck:
        scene.struck.pop().start()
    topics = scene.shard.topics
    eventually(lambda: scene.place.is_whole(topics), "Kafka's replicas do not come together")


def _nothing(_: Scene) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """What is struck, and how it is made good again."""

    strike: Callable[[Scene], Watch]
    heal: Callable[[Scene], None] = _nothing
    prepare: Callable[[Scene], None] = _nothing
    brokers: str = "ab"
    kafka_nodes: int = 1
    options: tuple[str, ...] = ()
    kept: bool = True
    """Nothing leaves the log."""
    moves: bool = True
    """Another broker leads afterwards."""
    hands_over: bool = False
    """The leader knows of it, and goes on for a moment."""


def _start(scene: Scene) -> None:
    scene.leader.start()


_kill = _watched(lambda scene: scene.leader.kill())
FAULTS = {
    "kill": Fault(_kill, _start),
    "stop": Fault(_watched(lambda scene: scene.leader.pause()), lambda scene: scene.leader.resume()),
    "cut": Fault(_watched(Scene.cut), Scene.mend),
    "clean": Fault(_watched(lambda scene: scene.leader.stop()), _start, hands_over=True),
    "step-down": Fault(_step_down, hands_over=True),
    "two-standbys": Fault(_kill, _start, brokers="abc"),
    "behind": Fault(_kill, _start, _leave_behind, options=SHORT, kept=False),
    "kafka-leader": Fault(_kill_kafka_leader, _start_kafka, kafka_nodes=3, moves=False),
    "kafka-two": Fault(_kill_two, _start_kafka, kafka_nodes=3, moves=False),
}


@dataclass
class Outcome:
    """What the strikes on one shard showed."""

    seconds: list[tuple[str, float]]
    """Of each strike its fault, and how long it took until the first answer; of a hand-over how long there was none."""
    committed: int
    account: Account
    answered_away: int
    changes: int
    """Of the leader."""
    problems: list[str]
    """Calls that failed in the program."""

    @property
    def bad(self) -> int:
        return self.account.bad + self.answered_away


def strikes(names: list[str], folder: Path, place: Kafka, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """One shard that lives through these faults in turn. Faults of one call have the same brokers, options and nodes of
    Kafka."""
    first = FAULTS[names[0]]
    seconds: list[tuple[str, float]] = []
    with ExitStack() as stack:
        proxied = "cut" in names
        shard = Shard(folder, place, first.brokers, stack, first.options, proxied=proxied)
        began, away = shard.epoch(), 0
        with Program(shard.url) as program:
            program.works()
            for number, name in enumerate(names):
                scene = Scene(shard, program, shard.settle())
                FAULTS[name].prepare(scene)
                seconds.append((name, _one(FAULTS[name], scene)))
                away += scene.answered_away
                which = "without an" if FAULTS[name].hands_over else "to the first"
                say(f"{name} {number}: {seconds[-1][1]:.2f} s {which} answer, {shard.epoch() - began} changes")
            kept = all(FAULTS[name].kept for name in names)
            found = program.account(kept=kept)
        changes = shard.epoch() - began
        return Outcome(seconds, len(program.committed), found, away, changes, program.problems)


def _one(fault: Fault, scene: Scene) -> float:
    """One strike: seconds to the first answer, or without one."""
    shard, program = scene.shard, scene.program
    program.works()
    before = shard.epoch()
    watch = fault.strike(scene)
    seconds = watch.seconds(lambda: f"{program.problems[-3:]}")
    if fault.hands_over:
        eventually(lambda: shard.epoch() > before, "nobody else leads")
        program.works()
        seconds = program.pause(watch.since)
    fault.heal(scene)
    shard.settle()
    assert not fault.moves or shard.epoch() > before, "nobody else leads"
    return seconds


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is said of one fault: seconds, and counts."""
    seconds = sorted(value for _, value in outcome.seconds)
    return {
        "strikes": len(seconds),
        "p50": round(median(seconds), 2),
        "worst": round(seconds[-1], 2),
        "committed": outcome.committed,
        "lost": outcome.account.lost,
        "repeated": outcome.account.repeated,
        "leaked": outcome.account.leaked,
        "answered_away": outcome.answered_away,
        "changes": outcome.changes,
        "problems": len(outcome.problems),
        "seconds": [round(value, 2) for _, value in outcome.seconds],
    }


class Places:
    """Kafkas by their number of nodes, each started when it is first needed and kept for all that follows."""

    def __init__(self, folder: Path, stack: ExitStack, session_ms: str) -> None:
        self._folder, self._stack = folder, stack
        self._settings = {**QUICK, "broker.session.timeout.ms": session_ms}
        self._made: dict[int, Kafka] = {}

    def __getitem__(self, nodes: int) -> Kafka:
        if nodes not in self._made:
            folder = self._folder / f"kafka-{nodes}"
            place = one_node(folder) if nodes == 1 else three_nodes(folder, self._settings)
            self._made[nodes] = self._stack.enter_context(place)
        return self._made[nodes]


def _asked(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    for fault in options.fault or FAULTS:
        yield fault, [fault] * options.runs


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help="several may be given; all by default")
    parser.add_argument("--runs", type=int, default=20, help="strikes of each fault, one after another")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    session = QUICK["broker.session.timeout.ms"]
    parser.add_argument("--kafka-session-ms", default=session, help="of three nodes: broker.session.timeout.ms")
    options = parser.parse_args()
    logging.getLogger("escrowmq").setLevel(logging.ERROR)  # each change is a warning
    figures: dict[str, dict[str, Any]] = {}
    bad = 0
    with temporary() as folder, ExitStack() as stack:
        places = Places(Path(folder), stack, options.kafka_session_ms)
        for fault, names in _asked(options):
            place = places[FAULTS[fault].kafka_nodes]
            outcome = strikes(names, Path(folder) / fault, place, lambda line: print(line, flush=True))
            figures[fault] = summary(outcome)
            bad += outcome.bad
            print(f"{fault}: {json.dumps(figures[fault])}", *outcome.problems[:3], sep="\n  ", flush=True)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
