"""A compensation in one process: a broker, a business database that counts effects, a set store in memory that can be
away or lose everything.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import escrowmq as mq
from escrowmq.compensation import HalfSetConsumer, Scheduler, consume, count_cases, list_cases
from escrowmq.compensation.cases import CaseState
from escrowmq.compensation.sets.seam import Run, Sizes
from escrowmq.connecting import links
from escrowmq.errors import Code, error
from escrowmq.outbox import migrate

LEASE = 0.5
"""Seconds that a consumer of messages holds them: a test waits so long for those of one that died."""
metadata = sa.MetaData()
effects = sa.Table(
    "effects",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", sa.LargeBinary, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
"""A row for each effect: nothing in it refuses a second one of the same id, so a second one is seen."""


def handle(session: Any, message: Any) -> None:
    """The effect."""
    connection = session if isinstance(session, sa.Connection) else session.connection()
    connection.execute(sa.insert(effects).values(id=message.message_id, body=message.body))


def business(folder: Path) -> sa.Engine:
    """A SQLite file with the tables; its commits are not synced, because nothing but processes dies here."""
    engine = sa.create_engine(f"sqlite:///{folder / 'business.db'}", connect_args={"timeout": 60.0})
    sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = NORMAL"))
    metadata.create_all(engine)
    migrate(engine)
    return engine


class MemorySets:
    """A set store as the contract has it, in plain Python; leases end when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.away = False
        self.lock = threading.RLock()
        self.lose()

    def lose(self) -> None:
        """All is gone, as with a restart of what is not durable."""
        with self.lock:
            self.token = uuid.uuid4().hex
            self.half: dict[bytes, int] = {}
            self.commits: dict[bytes, int] = {}
            self.runs: dict[str, dict[bytes, int]] = {}
            self.leased: set[str] = set()

    def end_leases(self) -> None:
        """Every lease has ended."""
        with self.lock:
            self.leased.clear()

    def _here(self) -> None:
        if self.away:
            raise error(Code.DISCONNECTED, "the set store is away")

    def epoch(self) -> str:
        self._here()
        return self.token

    def add_halves(self, ids: Any, announced_us: Any) -> None:
        self._here()
        with self.lock:
            for identity, us in zip(ids, announced_us, strict=True):
                self.half[identity] = min(us, self.half.get(identity, us))

    def add_commits(self, ids: Any, now_us: int) -> None:
        self._here()
        with self.lock:
            for identity in ids:
                self.commits.setdefault(identity, now_us)

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        self._here()
        with self.lock:
            early = sorted((us, i) for i, us in self.half.items() if us < before_us)
            kept: dict[bytes, int] = {}
            for us, identity in early:
                if len(kept) == limit:
                    break
                del self.half[identity]
                if self.commits.pop(identity, None) is None and not any(identity in run for run in self.runs.values()):
                    kept[identity] = us
            return self._leased(kept) if kept else None

    def _leased(self, kept: dict[bytes, int]) -> Run:
        name = uuid.uuid4().hex
        self.runs[name] = kept
        self.leased.add(name)
        return Run(name, tuple(kept))

    def adopt(self, lease: float, limit: int) -> Run | None:
        self._here()
        with self.lock:
            for name, ids in self.runs.items():
                if name not in self.leased:
                    self.leased.add(name)
                    return Run(name, tuple(ids)[:limit])
        return None

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        self._here()
        return tuple(self.runs.get(run, ()))[:limit]

    def renew(self, run: str, lease: float) -> bool:
        self._here()
        with self.lock:
            if run in self.runs:
                self.leased.add(run)
            return run in self.runs

    def settle(self, run: str, ids: Any) -> None:
        self._here()
        with self.lock:
            for identity in ids:
                self.runs.get(run, {}).pop(identity, None)
            if run in self.runs and not self.runs[run]:
                del self.runs[run]

    def forget_commits(self, before_us: int) -> int:
        self._here()
        with self.lock:
            old = [i for i, us in self.commits.items() if us < before_us and i not in self.half]
            for identity in old:
                del self.commits[identity]
            return len(old)

    def sizes(self) -> Sizes:
        self._here()
        with self.lock:
            times = [*self.half.values(), *(us for run in self.runs.values() for us in run.values())]
            return Sizes(
                len(self.half),
                len(self.commits),
                sum(map(len, self.runs.values())),
                len(self.runs),
                min(times, default=None),
            )

    def close(self) -> None:
        pass


class Sometimes:
    """A link to a broker in this process that can be away."""

    def __init__(self, folder: Path) -> None:
        [self._link] = links(f"file:{folder}", {})
        self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def _here(self) -> None:
        if self.away:
            raise error(Code.DISCONNECTED, "the broker is away")

    def action(self, name: str, request: Any, timeout: float) -> Any:
        self._here()
        return self._link.action(name, request, timeout)

    def read(self, request: Any) -> Any:
        self._here()
        return self._link.read(request)


class World:
    """One compensation, driven step by step. ``scheduler`` and so on are made with ``options`` when they are first
    used."""

    def __init__(
        self, bus: mq.Bus, database: sa.Engine, sets: Any = None, *, name: str | None = None, **options: Any
    ) -> None:
        self.bus = bus
        self.database = database
        self.name = f"c-{uuid.uuid4().hex[:12]}" if name is None else name
        self.sets = MemorySets(self.name) if sets is None else sets(self.name)
        self.topic, self.keys = f"{self.name}-messages", f"{self.name}-keys"
        self.options = {"grace": 0.0, "handler": handle, "keep_commits": 0.0, "max_attempts": 2} | options
        self.producer = bus.producer(f"{self.name}-orders", unasked=True)
        self.announcer = bus.producer(f"{self.name}-announcing")
        for topic in (self.topic, self.keys):
            bus.admin.create_topic(topic, 1, may_exist=True)
        self.sent: dict[bytes, Any] = {}
        self._made: list[Any] = []

    # The events

    def prepare(self, identity: bytes | None = None) -> bytes:
        """A half message; its id."""
        chosen = uuid.uuid4().bytes if identity is None else identity
        receipt = self.producer.prepare(self.topic, b"body " + chosen, message_id=chosen)
        self.sent[chosen] = receipt.transaction_id
        return chosen

    def announce(self, identity: bytes) -> None:
        """Its business change is committed: the key is in the key topic."""
        self.announcer.send(self.keys, identity.hex().encode(), key=identity.hex(), message_id=identity)

    def confirm(self, identity: bytes) -> None:
        self.producer.commit(self.sent[identity])

    def waits(self, topic: str, group: str) -> bool:
        """Whether a group has something left to take or to settle."""
        for one in self.bus.admin.groups():
            if one["name"] == group:
                queues = [queue for queue in one["queues"] if queue["topic"] == topic]
                return any(queue["waiting"] + queue["leased"] + queue["retrying"] for queue in queues)
        return any(line["end"] for line in self.bus.admin.offsets(topic))

    def consume_keys(self) -> int:
        """All keys that there are, unless it is suspended; how many were taken."""
        made, count = HalfSetConsumer(self.bus, self.keys, self.database, self.sets), 0
        while made.half_set.ready() and self.waits(self.keys, made.group):
            count += made.run(idle_timeout=0.05)
        return count

    def consume_messages(self) -> int:
        """All messages that are visible; how many effects there were."""
        effects = 0
        with self.bus.consumer(self.name, self.topic, lease=LEASE) as consumer:
            while self.waits(self.topic, self.name):
                effects += consume(consumer, self.database, self.sets, handle, idle_timeout=0.05)
        return effects

    def scheduler(self, **options: Any) -> Scheduler:
        made = Scheduler(
            self.bus, self.database, self.sets, topics=self.topic, keys=self.keys, **{**self.options, **options}
        )
        self._made.append(made)
        return made

    def schedule(self, **options: Any) -> Any:
        with self.scheduler(**options) as scheduler:
            return scheduler.run_once()

    # The end

    def drain(self, **options: Any) -> None:
        """Until nothing more happens, however it was."""
        self.sets.away = False
        while True:
            getattr(self.sets, "end_leases", lambda: time.sleep(0.01))()
            self.consume_keys()
            self.consume_messages()
            report = self.schedule(**options)
            sizes = self.sets.sizes()
            if report.suspended is None and not (report.taken + report.adopted + sizes.half + sizes.taken):
                break
        self.schedule(**options)

    def effects(self) -> Counter[bytes]:
        with self.database.begin() as connection:
            found = connection.scalars(sa.select(effects.c.id)).all()
        return Counter({bytes(i): n for i, n in Counter(found).items() if bytes(i) in self.sent})

    def open(self) -> list[str]:
        """Transactions of this world that are undecided."""
        if not self.sent:
            return []
        return [row["id"] for row in self.bus.admin.transactions("undecided", f"{self.name}-orders")]

    def cases(self) -> dict[bytes, CaseState]:
        return {case.message_id: case.state for case in list_cases(self.database, self.name, states=None)}

    def waiting(self) -> int:
        counts = count_cases(self.database, self.name)
        return counts[CaseState.STUCK] + counts[CaseState.CONFLICT]

    def faults(self, expected: Any) -> list[str]:
        """What is not as it must be when all is over; ``expected`` have their effect exactly once, by id, and nothing
        else has one."""
        found = self.effects()
        wrong = [f"lost {i.hex()}" for i in expected if not found[i]]
        wrong += [f"{count} effects of {i.hex()}" for i, count in found.items() if count > 1]
        wrong += [f"an effect of {i.hex()} that nobody wanted" for i in found if i not in set(expected)]
        sizes = self.sets.sizes()
        if sizes.half or sizes.taken or sizes.commits:
            wrong.append(f"left in the sets: {sizes}")
        return wrong
