"""``escrow://a|b``: a broker is killed and its shard goes on at another address, over and over, under load. By id
nothing is lost and nothing doubled, and no application sees more of it than of a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from load import QUICK, Broker, Reader, Writer, audit, eventually
from test_kill_loop import SEGMENTS, demand, disturb, finish

import escrowmq as mq
from escrowmq import outbox
from escrowmq.broker.serving.brokers import Replication
from escrowmq.broker.serving.serve import serve
from escrowmq.connecting import links
from escrowmq.gateway import beside
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target
from escrowmq.settings import BrokerSettings
from escrowmq.testing.partitions import MemoryKafka, MemoryPartitions
from escrowmq_lab.checker import check
from escrowmq_lab.history import History
from escrowmq_lab.servers.process import free_port
from not_leading import Standby


class Moving(Broker):
    """A broker that is started again at the other of two ports, while a standby listens at the one that it has left.

    ``tells``: what the standby names as the leader, of the new and the old address.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.ports = [free_port(), free_port()]
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.list = "escrow://" + "|".join(self.addresses)
        self._at = 0
        self._listen = self.addresses[0]
        self.standby: Standby | None = None
        self.shard = 0
        self._chance = random.Random(1)

    def launch(self) -> None:
        super().launch()
        if self.shard and self._chance.random() < 0.7:  # else nobody listens there
            here, there = f"escrow://{self._listen}", f"escrow://{self.addresses[1 - self._at]}"
            dead = f"escrow://127.0.0.1:{free_port()}"
            named = self._chance.choice([here, here, there, dead, None])
            self.standby = Standby(self.shard, named, (here, there), port=self.ports[1 - self._at])

    def start(self) -> Moving:
        super().start()
        if not self.shard:
            with mq.connect(self.url) as bus:
                self.shard = bus.admin.hello()[0]["shard"]
        return self

    def kill(self) -> None:
        super().kill()
        if self.standby is not None:
            self.standby.shutdown()
            self.standby = None
        self._at = 1 - self._at
        self._listen = self.addresses[self._at]

    def stop(self) -> int:
        if self.standby is not None:
            self.standby.shutdown()
            self.standby = None
        return super().stop()


@pytest.mark.invariant("I1")
@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="short"), pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(0)], id="long")],
)
def test_transactions_sends_and_consumers_follow_a_shard_from_address_to_address(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    history = History(tmp_path / "history.jsonl")
    with Moving(tmp_path / "data", **QUICK, **SEGMENTS) as broker, mq.connect(broker.list) as bus:
        readers = [Reader(bus, f"cart-{n}", "cart", "orders", history) for n in range(2)]
        readers += [Reader(bus, "points-1", "points", "points", history)]
        writers = [Writer(bus, f"w{n}", history) for n in range(4)]
        for thread in (*readers, *writers):
            thread.start()
        for number in range(kills):
            disturb(broker, history, chance, number)
        finish(bus, writers, readers)
        audit(broker.list, history)
        assert broker.stop() == 0
    history.close()
    demand(check(history.events, check_max=QUICK["check_max"]), kills)


# Each kind of program that holds a link

ASKED = {**QUICK, "check_max": 1000}
"""Whatever was left undecided is asked about until it is answered."""


class Working(threading.Thread):
    """``act(number)`` again and again, each giving the ids that were acknowledged to it."""

    def __init__(self, name: str, act: Callable[[int], list[bytes]]) -> None:
        super().__init__(name=name, daemon=True)
        self._act = act
        self.done: list[bytes] = []
        self.over = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        number = 0
        try:
            while not self.over.is_set():
                self.done += self._act(number)
                number += 1
        except BaseException as problem:
            self.problem = problem


class Programs:
    """Programs of all kinds at one shard."""

    def __init__(self, stack: ExitStack, url: str, folder: Path) -> None:
        self.bus = stack.enter_context(mq.connect(url))
        self.other = stack.enter_context(mq.connect(url))
        self.came: dict[str, list[bytes]] = {"held": [], "read": []}
        self.asked: list[bytes] = []
        self.left: set[bytes] = set()
        self._plain = self.other.producer("plain", timeout=120.0)
        self.oneway = self.bus.producer("oneway", timeout=120.0, unasked=True, confirm="oneway")
        self._silent = self.bus.producer("silent", timeout=120.0, checker=self._check)
        self._held = iter(self.bus.consumer("held", "plain", instance="one", in_doubt="hold").batches())
        self._reader = iter(self.bus.reader("plain", timeout=120.0).batches())
        self._http = stack.enter_context(httpx.Client(trust_env=False, timeout=120.0))
        gateway = stack.enter_context(beside(lambda _: links(url, {}), listen="127.0.0.1:0"))
        self._gateway = f"{gateway['http']}/v1/topics/http/messages"
        patient = {"timeout": 120.0}  # for SQLite's lock
        self.shop = sa.create_engine(f"sqlite:///{folder / 'shop.db'}", connect_args=patient)
        outbox.migrate(self.shop)
        stack.callback(self.shop.dispose)
        stack.enter_context(Relay(self.shop, open_target(url)))
        self.loop = asyncio.new_event_loop()
        self.abus = self.loop.run_until_complete(mq.aconnect(url))
        self._aplain = self.abus.producer("async", timeout=120.0)
        acts = [
            self.plain,
            self.commit_oneway,
            self.fall_silent,
            self.hold,
            self.read,
            self.post,
            self.relay,
            self.wait,
        ]
        self.all = [Working(act.__name__, act) for act in acts]

    def plain(self, number: int) -> list[bytes]:
        return [self._plain.send("plain", b"%d" % number).message_id]

    def commit_oneway(self, number: int) -> list[bytes]:
        with self.oneway.transaction() as txn:
            return [txn.send("oneway", b"%d" % number).message_id]

    def fall_silent(self, number: int) -> list[bytes]:
        """A transaction that only a check-back decides; a few at a time are open."""
        eventually("check-backs are answered", lambda: len(self.left) - len(set(self.asked)) < 20)
        receipt = self._silent.prepare("silent", b"%d" % number)
        self.left.add(receipt.message_id)
        return [receipt.message_id]

    def _check(self, question: mq.Check) -> mq.Outcome:
        self.asked.extend(message.message_id for message in question.messages)
        return mq.COMMIT

    def hold(self, number: int) -> list[bytes]:
        for message in next(self._held):
            message.ack()
            self.came["held"].append(message.message_id)
        return []

    def read(self, number: int) -> list[bytes]:
        self.came["read"] += next(self._reader).arrow["message_id"].to_pylist()
        return []

    def post(self, number: int) -> list[bytes]:
        content = {"text": str(number), "message_id": f"{number:032x}"}
        while (answer := self._http.post(self._gateway, json=content)).status_code in (503, 504):
            pass  # its sender sends again under the same id
        assert answer.status_code == 200, answer.text
        return [bytes.fromhex(answer.json()["message_id"])]

    def relay(self, number: int) -> list[bytes]:
        with self.shop.begin() as connection:
            identity = outbox.send_tx(connection, "relayed", b"%d" % number)
        eventually("the relay follows", lambda: self.waiting() < 50)
        return [identity]

    def waiting(self) -> int:
        with self.shop.begin() as connection:
            return int(connection.scalar(sa.text("SELECT count(*) FROM trans_message")) or 0)

    def wait(self, number: int) -> list[bytes]:
        receipt = self.loop.run_until_complete(self._aplain.send("async", b"%d" % number))
        return [receipt.message_id]

    def counts(self) -> dict[str, int]:
        """How far each has come."""
        sent = {work.name: len(work.done) for work in self.all if work.name not in ("hold", "read")}
        return sent | {name: len(ids) for name, ids in self.came.items()}

    def progress(self) -> None:
        """Each gets on, whatever happened."""
        before = self.counts()

        def goes_on() -> bool:
            for work in self.all:
                assert work.problem is None, (work.name, work.problem)
            return all(count > before[name] + 3 for name, count in self.counts().items())

        eventually("every program gets on", goes_on)


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    with Moving(tmp_path / "data", **ASKED) as broker:
        yield broker
        if broker.standby is not None:
            broker.standby.shutdown()


def follow(url: str, folder: Path, moves: list[Callable[[], Any]]) -> None:
    """Programs of all kinds at one shard, which is moved several times; then every id is looked at."""
    with mq.connect(url) as bus:
        for topic in ("plain", "oneway", "silent", "http", "relayed", "async"):
            bus.admin.create_topic(topic, 2)
    with ExitStack() as stack:
        programs = Programs(stack, url, folder)
        for work in programs.all:
            work.start()
        programs.progress()
        for move in moves:
            move()
            programs.progress()
        for work in programs.all:
            if work.name not in ("hold", "read"):  # which wait for more
                work.over.set()
                work.join()
                assert work.problem is None, (work.name, work.problem)
        done = {work.name: set(work.done) for work in programs.all}
        eventually("all is relayed", lambda: programs.waiting() == 0)
        eventually("all is asked and decided", lambda: not programs.bus.admin.transactions("open"))
        eventually("all is read", lambda: done["plain"] <= set(programs.came["read"]))
        eventually("all is received", lambda: done["plain"] <= set(programs.came["held"]))
        assert programs.oneway.flush()
        assert (programs.oneway.refused_ends, programs.oneway.unknown_ends) == (0, 0)
        topics = {
            "plain": "plain",
            "commit_oneway": "oneway",
            "fall_silent": "silent",
            "post": "http",
            "relay": "relayed",
            "wait": "async",
        }
        for name, topic in topics.items():
            found = programs.bus.admin.read(topic).read_all()["message_id"].to_pylist()
            assert len(found) == len(set(found)), topic
            assert done[name] <= set(found), topic
        assert len(programs.came["read"]) == len(set(programs.came["read"]))
        programs.loop.run_until_complete(programs.abus.close())
        programs.loop.close()


@pytest.mark.invariant("I1", "I9")
def test_every_kind_of_program_follows_and_by_id_nothing_is_lost_or_doubled(moving: Moving, tmp_path: Path) -> None:
    def move() -> None:
        moving.kill()
        moving.start()

    follow(moving.list, tmp_path, [move, move])


class Roles:
    """Two brokers of one shard in this process, leader and standby, over a log that a Kafka in memory keeps."""

    def __init__(self, folder: Path) -> None:
        self._kafka = MemoryKafka()
        self._opened: dict[str, list[MemoryPartitions]] = {}
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.urls = [f"escrow://{address}" for address in self.addresses]
        self.list = "escrow://" + "|".join(self.addresses)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(folder / str(number), address), daemon=True)
            for number, address in enumerate(self.addresses)
        ]
        for thread in self._threads:
            thread.start()
        eventually("one leads", self.leader)

    def _serve(self, folder: Path, address: str) -> None:
        opened = self._opened[f"escrow://{address}"] = []

        def opening() -> MemoryPartitions:
            opened.append(self._kafka.partitions())
            return opened[-1]

        replication = Replication(open=opening, silence=1.0, replicas=self.urls)
        serve(folder, listen=address, settings=BrokerSettings(**ASKED), stop=self._stop, replication=replication)

    def leader(self) -> str | None:
        """Who says that it leads; None in the middle of a change."""
        for url in self.urls:
            with mq.connect(f"{url}?replicas=listed") as bus, contextlib.suppress(mq.EscrowError):
                if bus.admin.hello()[0]["role"] == "leader":
                    return url
        return None

    def step_down(self) -> None:
        """Hand over, on purpose."""
        before = eventually("one leads", self.leader)
        with mq.connect(self.list) as bus:
            bus.admin.step_down(why="a test")
        eventually("the other leads", lambda: self.leader() not in (None, before))

    def cut_off(self) -> None:
        """The leader does not reach the log until another leads."""
        before = eventually("one leads", self.leader)
        self._change(before, cut_off=True)
        eventually("the other leads", lambda: self.leader() not in (None, before))
        self._change(before, cut_off=False)

    def _change(self, url: str, **faults: Any) -> None:
        for partitions in list(self._opened[url]):
            for partition in partitions.opened:
                partition.change(**faults)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    made = Roles(tmp_path)
    yield made
    made.close()


def test_every_kind_of_program_follows_from_leader_to_standby(roles: Roles, tmp_path: Path) -> None:
    """A hand-over, then a leader that is cut off from the log, fenced, and a standby again."""
    follow(roles.list, tmp_path, [roles.step_down, roles.cut_off])


def test_a_client_of_one_address_learns_the_other(roles: Roles) -> None:
    leader = eventually("one leads", roles.leader)
    with mq.connect(leader) as bus:
        producer = bus.producer("one", timeout=120.0)
        producer.send("one", b"1")
        roles.step_down()
        producer.send("one", b"2")
        assert {row["replicas"] == roles.urls for row in bus.admin.hello()} == {True}
    with mq.connect(leader) as bus:  # it stands by now
        assert sorted(bus.admin.read("one").read_all()["body"].to_pylist()) == [b"1", b"2"]
