"""The jobs that operators run, over one shard whose leader is struck in the middle of each: a plan, a backup, a
compensation, the overview, the console, the relay with the inbox, all traced. They know ``escrow://a|b`` and nothing
else; afterwards every id is looked at.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from load import eventually

import escrowmq as mq
from escrowmq import compensation, outbox, overview
from escrowmq.backup import back_up, restore, verify
from escrowmq.connecting import links
from escrowmq.console import beside as console_beside
from escrowmq.outbox import inbox
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target
from escrowmq.plans import Plans, Ramp
from escrowmq.platform.disk import RealDisk

PLANNED = 300
BATCH = 20
BALLAST = 4 << 20
"""Bytes that a backup copies for seconds at the rate below."""
RATE = 1 << 20
DIALECT = "sqlite"


class Job(threading.Thread):
    """``work`` on a thread; what it raises is kept. ``steps``: how far it has come, told by itself."""

    def __init__(self, work: Callable[[Job], None]) -> None:
        super().__init__(name=work.__name__, daemon=True)
        self._work = work
        self.steps = 0
        self.over = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            self._work(self)
        except BaseException as problem:
            self.problem = problem

    def well(self) -> None:
        if self.problem is not None:
            raise AssertionError(f"{self.name}: {self.problem!r}") from self.problem

    def gets_on(self, steps: int) -> None:
        """Wait until it has done so many steps more, or is done."""
        goal = self.steps + steps

        def far() -> bool:
            self.well()
            return self.steps >= goal or not self.is_alive()

        eventually(f"{self.name} gets on", far)

    def end(self) -> None:
        self.over.set()
        self.join(120)
        assert not self.is_alive(), f"{self.name} does not end"
        self.well()


class Jobs:
    """All of them, over the shard at ``url``. Each is a method that a :class:`Job` works through."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.planned: list[bytes] = []
        self.sent: set[bytes] = set()
        self.ordered: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.report: Any = None
        self.backup = folder / "backup"
        self.striking = threading.Event()
        self.shop, self.cart = (self._database(name) for name in ("shop", "cart"))
        with mq.connect(url) as bus:
            ballast = bus.producer("ballast")
            for _ in range(BALLAST >> 16):
                ballast.send_batch([mq.Message("ballast", bytes(1 << 14)) for _ in range(4)])
            payments = bus.producer("payments", unasked=True)
            made = payments.prepare_batch([mq.Message("bills", b"%d" % number) for number in range(PLANNED)])
            self.planned = [receipt.message_id for receipt in made]
            for topic in ("orders", "order-keys", "shipped"):
                bus.admin.create_topic(topic, 2)

    def _database(self, name: str) -> sa.Engine:
        engine = sa.create_engine(f"{DIALECT}:///{self.folder / name}.db", connect_args={"timeout": 120})
        outbox.migrate(engine)
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE did (what VARCHAR(40), id VARCHAR(64))"))
        return engine

    def did(self, what: str) -> Counter[str]:
        """The effects in the consumer's database, by id."""
        with self.cart.begin() as connection:
            found = connection.execute(sa.text("SELECT id FROM did WHERE what = :what"), {"what": what})
            return Counter(row[0] for row in found)

    # Jobs that come to an end

    def step_before_strike(self, job: Job) -> None:
        """A step of a job that shall still be at work when the leader is struck."""
        job.steps += 1
        if job.steps > 1:
            self.striking.wait()

    def plan(self, job: Job) -> None:
        with mq.connect(self.url) as bus:
            plans = Plans(self.folder / "plans")
            plan = plans.make(bus, "transactions.commit", {"group": "payments"}, why="a test")

            def told(*_: object) -> None:
                self.step_before_strike(job)

            ramp = Ramp((100,), pause=0.0)
            self.report = plans.run(plan.id, bus, ramp=ramp, rate=40, batch=BATCH, progress=told)

    def back_up(self, job: Job) -> None:
        def told(done: int, _: int) -> None:
            self.step_before_strike(job)

        with mq.connect(self.url) as bus:
            back_up(bus, self.backup, rate=RATE, progress=told)

    # Jobs that go on until they are told to end

    def relay(self, job: Job) -> None:
        with Relay(self.shop, open_target(self.url)):
            while not job.over.is_set():
                with self.shop.begin() as connection:
                    self.sent.add(outbox.send_tx(connection, "shipped", b"a box"))
                job.steps += 1
                job.over.wait(0.02)
            eventually("all is relayed", lambda: self._waiting() == 0)

    def _waiting(self) -> int:
        with self.shop.begin() as connection:
            return int(connection.scalar(sa.text("SELECT count(*) FROM trans_message")) or 0)

    def inbox(self, job: Job) -> None:
        def effect(connection: Any, message: Any) -> None:
            statement = sa.text("INSERT INTO did VALUES ('shipped', :id)")
            connection.execute(statement, {"id": message.message_id.hex()})
            job.steps += 1

        with mq.connect(self.url) as bus, bus.consumer("shipping", "shipped") as consumer:
            while not job.over.is_set():
                inbox.consume(consumer, self.cart, effect, idle_timeout=0.3)

    def order(self, job: Job) -> None:
        """Announced, and the confirm is not waited for: what of it is lost the scheduler finds."""
        with mq.connect(self.url) as bus, Relay(self.shop, open_target(self.url)):
            producer = bus.producer("orders", unasked=True, confirm="oneway", timeout=120.0)
            announcing = compensation.Announcing(producer, "order-keys", database=self.shop)
            while not job.over.is_set():
                sent = announcing.send(mq.Message("orders", b"a book"), lambda _: None)
                sent.check()
                self.ordered |= {key.hex() if isinstance(key, bytes) else str(key) for key in sent.unique_keys}
                job.steps += 1
            eventually("all is relayed", lambda: self._waiting() == 0)

    def compensate(self, job: Job) -> None:
        sets = compensation.open_sets(f"{DIALECT}:///{self.folder / 'sets.db'}", "cart")

        def effect(connection: Any, message: Any) -> None:
            connection.execute(sa.text("INSERT INTO did VALUES ('ordered', :id)"), {"id": message.message_id.hex()})
            job.steps += 1

        def keys() -> None:
            compensation.HalfSetConsumer(bus, "order-keys", self.cart, sets).run(stop=job.over)

        with mq.connect(self.url) as bus, bus.consumer("cart", "orders") as consumer:
            half_set = threading.Thread(target=keys)
            half_set.start()
            made = compensation.Scheduler(
                bus, self.cart, sets, topics="orders", keys="order-keys", handler=effect, grace=0.5, retry_after=1.0
            )
            repairing = threading.Thread(target=made.run, args=(0.5, job.over))
            repairing.start()
            while not job.over.is_set():
                compensation.consume(consumer, self.cart, sets, effect, idle_timeout=0.3)
            half_set.join()
            repairing.join()
            made.close()

    def look(self, job: Job) -> None:
        with mq.connect(self.url) as bus:
            while not job.over.is_set():
                found = overview.status(bus)
                assert not found.missing
                overview.waiting(bus)
                job.steps += 1
                job.over.wait(0.1)

    def console(self, job: Job) -> None:
        with (
            console_beside(lambda _: links(self.url, {}), listen="127.0.0.1:0", url=self.url) as at,
            httpx.Client(trust_env=False, timeout=120.0, base_url=str(at["console"])) as visitor,
        ):
            while not job.over.is_set():
                for page in ("/", "/topics", "/groups"):
                    answer = visitor.get(page, headers={"Accept": "text/html"})
                    self.statuses[answer.status_code] += 1
                    job.steps += answer.status_code == 200
                job.over.wait(0.1)

    # All of them

    def run(self, strike: Callable[[], None]) -> None:
        """Begin all, strike when each has come some way, and wait until each has come further."""
        ends = [Job(work) for work in (self.plan, self.back_up)]
        go_on = [Job(work) for work in (self.relay, self.inbox, self.order, self.compensate, self.look, self.console)]
        for jobs in (go_on, ends):  # those that end begin last
            for job in jobs:
                job.start()
            for job in jobs:
                job.gets_on(2 - job.steps)
        for job in ends:
            assert job.is_alive(), f"{job.name} was done before it was struck"
        self.striking.set()
        strike()
        for job in go_on:
            job.gets_on(5)
        for job in ends:
            job.join(120)
            job.end()
        for job in go_on[:1] + go_on[2:3] + go_on[4:]:
            job.end()
        ids = {identity.hex() for identity in self.sent}
        eventually("all that was relayed has its effect", lambda: ids <= set(self.did("shipped")))
        eventually("all that was ordered has its effect", lambda: self.ordered <= set(self.did("ordered")))
        for job in go_on:
            job.end()
        self.check()

    def check(self) -> None:
        """Every id, once."""
        assert sum(self.report.outcomes.get(one, 0) for one in ("done", "already")) == PLANNED, self.report
        with mq.connect(self.url) as bus:
            stored = {topic: self._stored(bus, topic) for topic in ("bills", "shipped", "orders")}
            assert not bus.admin.transactions("open", group="payments")
            acts = list(bus.admin.acts())
        assert acts
        for topic, found in stored.items():
            assert max(found.values()) == 1, topic
        assert set(stored["bills"]) == set(self.planned)
        assert set(stored["shipped"]) == self.sent
        assert {identity.hex() for identity in stored["orders"]} == self.ordered
        for what, expected in (("shipped", {one.hex() for one in self.sent}), ("ordered", self.ordered)):
            assert self.did(what) == Counter(expected), what
        assert set(self.statuses) <= {200, 503, 504}, self.statuses
        verify(RealDisk(self.backup, read_only=True))
        restore(RealDisk(self.backup), RealDisk(self.folder / "restored"), why="a test")
        with mq.connect(f"file:{self.folder / 'restored'}") as bus:
            assert len(self._stored(bus, "ballast")) == BALLAST >> 14

    def _stored(self, bus: mq.Bus, topic: str) -> Counter[bytes]:
        return Counter(bus.admin.read(topic).read_all()["message_id"].to_pylist())
