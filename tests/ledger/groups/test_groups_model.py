"""Consumer groups against a naive model: a dict from offset to state, one message at a time.

Held after every step: I20 (no skip), I22 (progress never goes back), I23 (every message is delivered until done,
repeats carry their attempt), I25 (attempts are bounded, then a dead letter with its cause), I26 (conservation, as
sets), I27 (one owner of a lease).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import hypothesis.strategies as st
import pytest
from groups_driver import Driver, FakeTopics
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from escrowmq.errors import Code, Fenced, Rejected
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Rules
from escrowmq.model import Act, member_id
from escrowmq.schemas import Kind

MAX_ATTEMPTS = 3
RANDOMS = st.randoms(use_true_random=True)  # what is drawn from it is not shrunk, the steps are
NAMES = st.sampled_from(["x", "y", "z"])
BACKOFF, BACKOFF_MAX = 10, 25
FINAL = {"acked", "filtered", "discarded", "expired"}


@dataclass
class NaiveMessage:
    tag: str | None
    state: str = "waiting"
    attempt: int = 0  # of the lease, the next one while retrying, those it had when dead
    due: int = 0
    owner: int | None = None
    cause: str = ""
    in_doubt: bool = False


@dataclass
class NaiveLease:
    queue: int
    start: int
    end: int
    deadline: int
    members: set[int]
    doubt: int  # rows from here on reach nothing
    holder: str = ""
    acked: set[int] = field(default_factory=set)


class NaiveGroup:
    """What one group's messages came to, by the book and slowly."""

    def __init__(self, tags: tuple[str, ...], ordered: bool, queues: int) -> None:
        self.tags = tags
        self.ordered = ordered
        self.queues: list[list[NaiveMessage]] = [[] for _ in range(queues)]
        self.leases: dict[int, NaiveLease] = {}
        self.log: list[tuple[int, int, int]] = []  # first deliveries, for I20

    def pending(self, lease_id: int) -> list[int]:
        lease = self.leases[lease_id]
        messages = self.queues[lease.queue]
        return sorted(o for o in lease.members if messages[o].state == "leased" and messages[o].owner == lease_id)

    def held(self, name: str) -> list[int]:
        """The live leases of a named member, oldest first."""
        return sorted(id for id, lease in self.leases.items() if lease.holder == name and self.pending(id))

    def doubted(self, name: str) -> dict[int, list[int]]:
        """What is in doubt of a member and may be handed to it now, by lease."""
        found: dict[int, list[int]] = {}
        for id in self.held(name):
            messages = self.queues[self.leases[id].queue]
            busy = self.ordered and any(m.state == "leased" and not m.in_doubt for m in messages)
            offsets = [o for o in self.pending(id) if messages[o].in_doubt]
            if offsets and not busy:
                found[id] = offsets
        return found

    def join(self, name: str, keep: dict[int, int]) -> None:
        for id in self.held(name):
            lease = self.leases[id]
            lease.doubt = max(min(keep.get(id, 0), lease.doubt), lease.start)
            for o in self.pending(id):
                self.queues[lease.queue][o].in_doubt = o >= lease.doubt

    def wants(self, message: NaiveMessage) -> bool:
        return not self.tags or message.tag in self.tags

    def has_lease(self, queue: int) -> bool:
        return any(m.state == "leased" for m in self.queues[queue])

    def retrying(self, queue: int) -> list[int]:
        return [o for o, m in enumerate(self.queues[queue]) if m.state == "retrying"]

    def deliverable(self, queue: int, now: int) -> set[int]:
        """Every offset that may be handed out now, could one receive take them all."""
        messages, retrying = self.queues[queue], self.retrying(queue)
        waiting = {o for o, m in enumerate(messages) if m.state == "waiting" and self.wants(m)}
        if not self.ordered:
            return waiting | {o for o in retrying if messages[o].due <= now}
        if self.has_lease(queue):
            return set()
        if not retrying:
            return waiting
        first = messages[retrying[0]]
        run: set[int] = set()
        for o in retrying:
            if messages[o].due > now or messages[o].attempt != first.attempt:
                break
            run.add(o)
        return run

    def fail(
        self, lease_id: int, failed: list[int], now: int, delay: int | None, cause: str, final: bool = False
    ) -> None:
        messages = self.queues[self.leases[lease_id].queue]
        for o in failed:
            message = messages[o]
            if final or message.attempt >= MAX_ATTEMPTS:
                message.state, message.owner = "dead", None
                message.cause = cause if final else f"{cause}, attempt {message.attempt} of {MAX_ATTEMPTS}"
                message.in_doubt = False
            else:
                wait = min(BACKOFF * 2 ** (message.attempt - 1), BACKOFF_MAX) if delay is None else delay
                message.state, message.owner, message.due = "retrying", None, now + wait
                message.attempt, message.in_doubt = message.attempt + 1, False
        self.let_go(lease_id, failed, now)

    def let_go(self, lease_id: int, failed: list[int], now: int) -> None:
        messages = self.queues[self.leases[lease_id].queue]
        for o in self.pending(lease_id) if self.ordered else ():
            if o > failed[0]:
                message = messages[o]
                message.state, message.owner, message.due, message.in_doubt = "retrying", None, now, False
                message.attempt = max(message.attempt, 2)

    def release(self, lease_id: int, unseen: list[int], now: int) -> None:
        messages = self.queues[self.leases[lease_id].queue]
        for o in unseen:
            messages[o].state, messages[o].owner, messages[o].due = "retrying", None, now
        self.let_go(lease_id, unseen, now)

    def unreached(self, ended: list[int]) -> list[int]:
        """Leases at their last attempt that nobody began, whose member was given others before (there is one
        member)."""
        live = [id for id in sorted(self.leases) if self.pending(id)]
        found = []
        for id in live:
            lease, pending = self.leases[id], self.pending(id)
            last = self.queues[lease.queue][pending[0]].attempt >= MAX_ATTEMPTS
            earlier = [x for x in live if x < id and self.leases[x].deadline != lease.deadline]
            if last and len(pending) == len(lease.members) and any(id in ended or x in ended for x in earlier):
                found.append(id)
        return found

    def settle(self, lease_id: int, start: int, count: int, act: Act, delay: int, now: int) -> Code:
        lease = self.leases[lease_id]
        if not self.pending(lease_id) and not lease.acked:  # it held nothing, or nothing is remembered of it
            return Code.LEASE_LOST
        if count < 1 or start < lease.start or start + count > lease.end:
            return Code.BAD_REQUEST
        pending, asked = self.pending(lease_id), set(range(start, start + count))
        if start >= lease.doubt:
            done = act == Act.ACK and lease.acked & asked and not asked & set(pending)
            return Code.OK if done else Code.LEASE_LOST
        asked = set(range(start, min(start + count, lease.doubt)))
        if act == Act.EXTEND:
            if pending and delay < 1:
                return Code.BAD_DELAY
            if pending and lease.deadline != NEVER_US:
                lease.deadline = now + delay
            return Code.OK if pending else Code.LEASE_LOST
        mine = [o for o in pending if o in asked]
        if not mine:
            if act == Act.ACK and lease.acked & asked:
                return Code.OK
            return Code.LEASE_LOST if lease.members & asked else Code.BAD_REQUEST
        if act == Act.ACK:
            for o in mine:
                self.queues[lease.queue][o].state = "acked"
            lease.acked |= set(mine)
        elif act == Act.RELEASE:
            self.release(lease_id, mine, now)
        else:
            self.fail(lease_id, mine, now, None if delay < 0 else delay, "because", act == Act.REJECT)
        return Code.OK


def refused(branch: type[Exception], act: Callable[[], object]) -> None:
    try:
        act()
    except branch:
        return
    raise AssertionError(f"no {branch.__name__}")


class GroupsMachine(RuleBasedStateMachine):
    @initialize(
        tags=st.sampled_from([(), (), ("a",), ("a", "b"), ("unseen",)]),
        ordered=st.booleans(),
        leases=st.integers(1, 6),
        hold=st.booleans(),
    )
    def begin(self, tags: tuple[str, ...], ordered: bool, leases: int, hold: bool) -> None:
        self.driver = Driver(
            FakeTopics(t=2, u=1),
            max_attempts=MAX_ATTEMPTS,
            retry_backoff_us=BACKOFF,
            retry_backoff_max_us=BACKOFF_MAX,
            max_leases=max(leases, 3) if hold else leases,  # as many members may be named
        )
        self.driver.subscribe("bystander", "t", "u")
        self.driver.subscribe("g", "t", "u", tags=tags, ordered=ordered, in_doubt="hold" if hold else "redeliver")
        self.hold = hold
        self.epochs: dict[str, int] = {}
        self.fenced: set[str] = set()
        self.model = NaiveGroup(tags, ordered, 3)
        self.floors = [0, 0, 0]
        self.acked: set[tuple[int, int]] = set()

    @rule(queue=st.integers(0, 2), tags=st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=6))
    def produce(self, queue: int, tags: list[str | None]) -> None:
        self.driver.put(queue, *tags)
        self.model.queues[queue] += [NaiveMessage(tag) for tag in tags]

    @rule(us=st.sampled_from([1, 9, 10, 30]))
    def wait(self, us: int) -> None:
        self.driver.now += us

    @precondition(lambda self: self.hold)
    @rule(name=NAMES, resume=st.booleans(), rng=RANDOMS)
    def join(self, name: str, resume: bool, rng: Random) -> None:
        """A new process of a named member, or one that lost answers and says what reached it."""
        if resume and (name not in self.epochs or name in self.fenced):
            refused(Fenced, lambda: self.driver.join(name, process=ord(name), resume=True))
            return
        leases = {id: self.model.leases[id] for id in self.model.leases}
        named = self.model.held(name) if rng.random() < 0.8 else sorted(leases)
        some = rng.sample(named, min(len(named), rng.randint(1, 3))) if resume else []
        keep = {id: rng.randint(leases[id].start - 1, leases[id].end) for id in some}
        answer = self.driver.join(name, process=ord(name), resume=resume, keep=list(keep.items()))
        assert answer == {"member": member_id("g", name), "epoch": self.driver.log[-len(self.driver.events)][1]}
        self.epochs[name] = answer["epoch"]
        self.fenced.discard(name)
        self.model.join(name, keep)

    @precondition(lambda self: self.epochs)
    @rule(name=NAMES)
    def fence(self, name: str) -> None:
        if name not in self.epochs:
            refused(Rejected, lambda: self.driver.fence(name))
            return
        held = self.model.held(name)
        count = sum(len(self.model.pending(id)) for id in held)
        for id in held:
            pending = self.model.pending(id)
            self.model.fail(
                id, pending[:1] if self.model.ordered else pending, self.driver.now, 0, "its consumer was fenced"
            )
        assert self.driver.fence(name)["messages"] == count
        self.fenced.add(name)

    @rule(
        most=st.integers(1, 12),
        lease=st.sampled_from([5, 20, 1000]),
        only=st.none() | st.integers(0, 2),
        name=NAMES,
        late=st.integers(0, 9),
    )
    def receive(self, most: int, lease: int, only: int | None, name: str, late: int) -> None:
        model, now = self.model, self.driver.now
        more = {}
        if self.hold:
            if name not in self.epochs:
                self.join(name, False, Random(0))
            more = {"member": member_id("g", name), "epoch": self.epochs[name] - (late == 0)}
            if name in self.fenced or late == 0:
                refused(Fenced, lambda: self.driver.receive(most=most, **more))
                return
        queues = range(3) if only is None else [only]
        could = {(q, o) for q in queues for o in model.deliverable(q, now)}
        doubted = model.doubted(name) if self.hold else {}
        live = [id for id in model.leases if model.pending(id)]
        leased = self.driver.receive(most=most, lease=lease, queues=None if only is None else [only], **more)
        rows = [row for e in self.driver.events if e.kind == Kind.LEASED for row in e.batch.to_pylist()]
        handed = self._handed(doubted, most, self.driver.rules.max_leases - len(live))
        got = list(zip(leased.queue_ids.tolist(), leased.offsets.tolist(), strict=True))
        assert len(got) == len(set(got))
        assert set(handed) <= set(got) <= could | set(handed), "in doubt stays with its member"
        assert len(got) <= max(most, len(handed))
        again = set(leased.leases[: len(handed)].tolist())
        room = self.driver.rules.max_leases - sum(bool(model.pending(id)) for id in model.leases) - len(again)
        fresh = set(leased.leases[len(handed) :].tolist())
        assert len(fresh) <= max(room, 0)
        if len(got) < most and len(fresh) < room:
            assert set(got) == could | set(handed), "I23: nothing that could be delivered is left behind"
        for row in rows:
            end = row["start"] + row["count"]
            model.leases[row["lease"]] = NaiveLease(
                row["queue_id"], row["start"], end, row["deadline_us"], set(), end, name if self.hold else ""
            )
            assert row["deadline_us"] == (NEVER_US if self.hold else now + lease)
        self._deliver(leased)
        for row in rows:  # what a first delivery passed over is done with
            if row["attempt"] != 1:
                continue
            for o in range(row["start"], row["start"] + row["count"]):
                message = model.queues[row["queue_id"]][o]
                if message.state == "waiting":
                    assert not model.wants(message), "I20: a message of the group's was skipped"
                    message.state = "filtered"
        for q in range(3):
            states = [m.state == "waiting" for m in model.queues[q]]
            assert states == sorted(states), "I20: first deliveries are a prefix"

    def _handed(self, doubted: dict[int, list[int]], most: int, room: int) -> list[tuple[int, int]]:
        """Take in what the member got again; all that was in doubt, as far as ``most`` goes and there is room for
        leases."""
        model = self.model
        places: list[tuple[int, int]] = []
        for event in self.driver.events:
            rows = event.batch.to_pylist()
            for row in rows if event.kind == Kind.DEAD else ():
                lease = model.leases[row["lease"]]
                failed = [o for o in doubted[row["lease"]] if row["start"] <= o < row["start"] + row["count"]]
                assert all(model.queues[lease.queue][o].attempt == MAX_ATTEMPTS for o in failed), "I25"
                assert not model.ordered or failed == doubted[row["lease"]][:1]
                for o in failed:
                    message = model.queues[lease.queue][o]
                    message.state, message.owner, message.cause, message.in_doubt = "dead", None, row["cause"], False
                doubted[row["lease"]] = [o for o in doubted[row["lease"]] if o not in failed]
            for row in rows if event.kind == Kind.HANDED else ():
                old, end = model.leases[row["old"]], row["start"] + row["count"]
                offsets = [o for o in doubted[row["old"]] if row["start"] <= o < end]
                assert offsets == doubted[row["old"]][: len(offsets)] != []
                doubted[row["old"]] = doubted[row["old"]][len(offsets) :]
                model.leases[row["lease"]] = NaiveLease(old.queue, row["start"], end, NEVER_US, set(), end, old.holder)
                for o in offsets:
                    message = model.queues[old.queue][o]
                    assert message.attempt <= row["attempt"] <= MAX_ATTEMPTS
                    assert row["attempt"] > 1, "I23: flagged"
                    assert row["attempt"] > message.attempt or message.attempt == MAX_ATTEMPTS
                    message.attempt, message.owner, message.in_doubt = row["attempt"], None, False
                    places.append((old.queue, o))
        if len(places) < most and room > 0:
            assert not any(doubted.values()), "I23: all that was in doubt is handed over"
        return places

    def _deliver(self, leased) -> None:
        columns = (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)
        last_first: dict[int, int] = {}
        for lease, q, o, attempt, position in zip(*(c.tolist() for c in columns), strict=True):
            message = self.model.queues[q][o]
            if message.state == "waiting":
                message.attempt = 1
                assert last_first.get(q, -1) < o
                last_first[q] = o
            assert message.attempt == attempt, "I23: repeats carry their attempt"
            assert 1 <= attempt <= MAX_ATTEMPTS, "I25"
            assert message.owner is None, "I27"
            message.state, message.owner = "leased", lease
            self.model.leases[lease].members.add(o)
            assert position == self.driver.topics.queues[q].positions(o, o + 1)[0]

    @precondition(lambda self: self.model.leases)
    @rule(rng=RANDOMS)
    def settle(self, rng: Random) -> None:
        rows, expected = [], []
        live = [id for id in self.model.leases if self.model.pending(id)]
        for _ in range(rng.randint(1, 4)):
            id = rng.choice(live if live and rng.random() < 0.9 else list(self.model.leases))
            lease = self.model.leases[id]
            start = rng.randrange(lease.start, lease.end)
            count = rng.randint(1, lease.end - start)
            start += rng.choice([0] * 18 + [1, -1])
            act = rng.choice([*[Act.ACK, Act.NACK, Act.NACK, Act.EXTEND, Act.RELEASE] * 3, Act.REJECT])
            delay = rng.choice([-1, 0, 7] if act == Act.NACK else [0, 15])
            rows.append((id, start, count, act, delay, "because"))
            expected.append(self.model.settle(id, start, count, act, delay, self.driver.now))
        assert self.driver.settle(*rows) == expected

    @rule(rng=RANDOMS)
    def finish(self, rng: Random) -> None:
        """Acknowledge a whole lease as consumers mostly do."""
        live = [id for id in self.model.leases if self.model.pending(id)]
        if live:
            id = rng.choice(live)
            lease = self.model.leases[id]
            count = lease.end - lease.start
            expected = self.model.settle(id, lease.start, count, Act.ACK, -1, self.driver.now)
            assert expected == Code.OK or lease.doubt < lease.end
            assert self.driver.ack(id, lease.start, count) == expected

    @rule(tags=st.sampled_from([(), ("a",), ("a", "b")]))
    def alter(self, tags: tuple[str, ...]) -> None:
        """Other tags choose among what was not passed over yet (what an ordered group took up was not)."""
        if not self.model.ordered:
            assert set(self.driver.alter(tags=tags).tags) == set(tags)
            self.model.tags = tags

    @rule(limit=st.sampled_from([1, 100]))
    def tick(self, limit: int) -> None:
        model, now = self.model, self.driver.now
        over = sorted((x.deadline, id) for id, x in model.leases.items() if model.pending(id) and x.deadline <= now)
        assert not over or self.driver.groups.wake_us <= now
        assert not (over and self.hold), "what is held does not end by time"
        ended = [id for _, id in over[:limit]]
        unreached = model.unreached(ended)
        for id in unreached:
            model.release(id, model.pending(id), now)
        for id in (id for id in ended if id not in unreached):
            pending = model.pending(id)
            model.fail(id, pending[:1] if model.ordered else pending, now, None, "lease expired")
        self.driver.tick(limit)

    @rule(rng=RANDOMS, retry=st.booleans())
    def settle_dead(self, rng: Random, retry: bool) -> None:
        every = [(q, o) for q in range(3) for o in range(len(self.model.queues[q]))]
        dead = [(q, o) for q, o in every if self.model.queues[q][o].state == "dead"]
        if not every:
            return
        chosen = rng.choices(dead or every, k=rng.randint(1, 4))
        expected, named = [], set()
        letters = self.driver.groups.dead_letters("g", self.driver.topics)
        died_us = {(d["queue_id"], d["offset"]): d["dead_us"] for d in letters}
        seen = [died_us.get(place, 0) - (rng.random() < 0.2) for place in chosen]
        guarded = rng.random() < 0.7
        for (q, o), shown in zip(chosen, seen, strict=True):
            message = self.model.queues[q][o]
            here = message.state == "dead" and (q, o) not in named
            named.add((q, o))
            expected.append(Code.NOT_FOUND if not here else Code.OK)
            if here and guarded and shown != died_us[q, o]:
                expected[-1] = Code.CONFLICT
            elif here:
                message.state = "retrying" if retry else "discarded"
                message.attempt, message.due = 1, self.driver.now
        assert self.driver.settle_dead(*chosen, retry=retry, dead_us=seen if guarded else None) == expected

    @rule(queue=st.integers(0, 2), part=st.integers(0, 3))
    def trim(self, queue: int, part: int) -> None:
        messages = self.model.queues[queue]
        head = max(self.driver.topics.queues[queue].head, len(messages) * part // 4)
        for message in messages[:head]:
            if message.state not in FINAL:
                message.state, message.owner, message.in_doubt = "expired", None, False
        self.driver.trim(queue, head)

    @rule()
    def reopen(self) -> None:
        self.driver.reopen()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "driver"):
            return
        groups, topics, now = self.driver.groups, self.driver.topics, self.driver.now
        letters = {(d["queue_id"], d["offset"]): d for d in groups.dead_letters("g", topics)}
        for q, messages in enumerate(self.model.queues):
            expected: dict[str, list[int]] = {}
            for o, message in enumerate(messages):
                expected.setdefault(message.state, []).append(o)
            assert self.driver.account(q) == expected, "I26"
            self.driver.account(q, "bystander")
            line = self.driver.line(q)
            assert all(line[state] == len(expected.get(state, [])) for state in FINAL | {"leased", "dead", "waiting"})
            floor = next((o for o, m in enumerate(messages) if m.state not in FINAL), len(messages))
            assert line["floor"] == floor >= self.floors[q], "I22"
            self.floors[q] = floor
            dead = {o: d for (queue, o), d in letters.items() if queue == q}
            assert {o: (d["attempts"], d["cause"]) for o, d in dead.items()} == {
                o: (m.attempt, m.cause) for o, m in enumerate(messages) if m.state == "dead"
            }, "I25"
            acked = {(q, o) for o in expected.get("acked", [])}
            assert {pair for pair in self.acked if pair[0] == q} <= acked, "I22"
            self.acked |= acked
        dues = []
        for q in range(3):
            retrying = self.model.retrying(q)
            if retrying and not (self.model.ordered and self.model.has_lease(q)):
                due = [self.model.queues[q][o].due for o in retrying]
                dues.append(due[0] if self.model.ordered else min(due))
        assert groups.wake_us <= min((due for due in dues if due > now), default=NEVER_US)
        assert all(due > now for due in dues) or groups.has_work("g", topics, now)
        if any(self.model.deliverable(q, now) for q in range(3)):
            assert groups.has_work("g", topics, now)
        live = sum(bool(self.model.pending(id)) for id in self.model.leases)
        assert groups.describe(topics, Rules())[1]["leases"] == live


# How hard it looks is the profile's affair (conftest.py).
GroupsMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGroupsAgainstModel = pytest.mark.invariant("I20", "I22", "I23", "I26", "I27")(GroupsMachine.TestCase)


@pytest.mark.parametrize("seed", range(16))
def test_long_walks(seed: int) -> None:
    """The same steps in long runs, weighted so that messages come to their last attempt: Hypothesis keeps its runs
    short."""
    rng, machine = Random(seed), GroupsMachine()
    tags = [(), ("a",), ("a", "b"), ()][seed // 2 % 4]
    machine.begin(tags=tags, ordered=seed % 2 == 0, leases=rng.choice([3, 6, 12]), hold=seed % 8 > 3)
    steps = {
        lambda: machine.produce(rng.randrange(3), rng.choices([None, "a", "b", "c"], k=rng.randint(3, 9))): 10,
        lambda: machine.wait(rng.choice([1, 9, 10, 12])): 14,
        lambda: machine.receive(
            rng.randint(1, 12),
            rng.choice([20, 40, 1000]),
            rng.choice([None, None, 0, 1]),
            rng.choice("xyz"),
            rng.randrange(10),
        ): 24,
        lambda: machine.hold and machine.join(rng.choice("xyz"), rng.random() < 0.7, rng): 8,
        lambda: machine.hold and machine.epochs and machine.fence(rng.choice(sorted(machine.epochs))): 1,
        lambda: machine.model.leases and machine.settle(rng): 20,
        lambda: machine.finish(rng): 4,
        lambda: machine.tick(rng.choice([1, 100])): 8,
        lambda: machine.settle_dead(rng, rng.random() < 0.5): 2,
        lambda: machine.trim(rng.randrange(3), 1): 0.3,
        lambda: machine.reopen(): 2,
    }
    for step in rng.choices(list(steps), weights=list(steps.values()), k=130):
        step()
        machine.agrees()
    states = {m.state for q in machine.model.queues for m in q}
    assert {"acked", "waiting", "leased", "retrying", "dead"} & states
    assert any(m.attempt > 1 for q in machine.model.queues for m in q), "a walk that repeats nothing shows little"
