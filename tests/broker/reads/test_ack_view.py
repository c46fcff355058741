"""The view ``%acks`` against a plain model of what consumers acknowledged, and what it says when leases' rows have
left.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from broker_bench import Bench, send, settle
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from escrowmq.broker.offline import OfflineShard
from escrowmq.broker.reads import chunks, group_views
from escrowmq.broker.reads.views import open_view
from escrowmq.errors import Code, Rejected
from escrowmq.ledger.commands import CreateTopic, Fence, Join, Receive, SettleDead, nothing_leased
from escrowmq.log.offline import open_offline
from escrowmq.model import Act
from escrowmq.schemas import ACK_VIEW, SETTLING
from escrowmq.wire import ACK_VIEW_NAME

QUEUES = 3
NAMES = {"all": {}, "odd": {"tags": ("odd",)}, "order": {"ordered": True}, "held": {"in_doubt": "hold"}}
GROUPS = {name: {"max_attempts": 3, "retry_backoff_us": 1_000_000, **options} for name, options in NAMES.items()}


class Looking:
    """What reads ask of an engine, without its thread: a look is answered at once."""

    def __init__(self, bench):
        self.log, self.shard = bench.engine.log, bench.engine.shard

    def look(self, act):
        future = Future()
        future.set_result(act())
        return future


def read(where, **request) -> pa.Table:
    table = open_view(where, {"source": ACK_VIEW_NAME, **request}).read_all()
    table.validate(full=True)
    return table


def forget_old(bench) -> None:
    """Let retention run: what is older than its hour leaves, segment by segment."""
    for _ in range(4):
        bench.pass_time(61)
        bench.await_save()


@dataclass
class Held:
    """A lease as its consumer knows it."""

    group: str
    queue_id: int
    attempt: int
    offsets: list[int]
    touched: bool = False


@dataclass
class Entry:
    """An offset whose acknowledgement was answered OK: when, and between which positions of the log."""

    lease: int
    offset: int
    time_us: int
    low: int
    high: int


@dataclass
class World:
    """Groups that consume one topic, and what their consumers remember."""

    bench: Bench
    epochs: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    acked: dict[tuple[int, int], Entry] = field(default_factory=dict)

    def send(self, rng, count):
        tags = [rng.choice(["odd", "even"]) for _ in range(count)]
        rows = [{"tag": tag, "queue": rng.randrange(QUEUES), "body": bytes(rng.choice([1, 400]))} for tag in tags]
        self.bench.do(send(0, *rows))

    def receive(self, rng, group):
        options = {}
        if group == "held":
            member = rng.choice(["a", "b"])
            if member not in self.epochs or rng.random() < 0.5:
                joined = self.bench.do(Join("held", member, rng.randrange(1 << 30)))
                self.epochs[member] = joined["epoch"]
                self.numbers[member] = joined["member"]
            options = {"epoch": self.epochs[member]}
        number = self.numbers[member] if options else rng.randrange(3)
        leased = self.bench.do(Receive(group, number, rng.randrange(1, 12), 20_000_000, **options))
        for lease in np.unique(leased.leases).tolist():
            rows = np.flatnonzero(leased.leases == lease)
            place = int(leased.queue_ids[rows[0]]), int(leased.attempts[rows[0]])
            self.leases[lease] = Held(group, *place, leased.offsets[rows].tolist())

    def settle(self, rng, act):
        if not self.leases:
            return
        lease = rng.choice(list(self.leases)[-6:])
        held = self.leases[lease]
        chosen = sorted(rng.sample(held.offsets, rng.randrange(1, len(held.offsets) + 1)))
        head = self.bench.engine.shard.ledger.queue(held.queue_id).head
        whole = act is Act.ACK and not held.touched and held.offsets[0] >= head and rng.random() < 0.5
        if whole:
            chosen = held.offsets
            rows = [(lease, chosen[0], chosen[-1] - chosen[0] + 1)]
        else:
            rows = [(lease, offset, 1) for offset in chosen]
        held.touched = True
        batch = [dict(zip(SETTLING.names, (*row, int(act), -1, None), strict=True)) for row in rows]
        command = settle(held.group, _nothing(), act)
        command = type(command)(held.group, pa.RecordBatch.from_pylist(batch, schema=SETTLING))
        low = self.bench.engine.log.next_position
        codes = self.bench.do(command).column("code").to_pylist()
        if act is not Act.ACK:
            return
        high, now = self.bench.engine.log.next_position, self.bench.clock.now_us()
        good = chosen if whole and codes == [Code.OK] else [] if whole else _ok(chosen, codes)
        for offset in good:
            self.acked.setdefault((lease, offset), Entry(lease, offset, now, low, high))

    def bury_or_dig(self, rng):
        letters = self.bench.engine.shard.ledger.groups.dead_letters("all", self.bench.engine.shard.ledger.topics)
        if letters:
            letter = rng.choice(letters)
            places = np.array([letter["queue_id"]]), np.array([letter["offset"]])
            self.bench.do(SettleDead("all", *places, retry=rng.random() < 0.5))

    def check(self, where) -> pa.Table:
        """The whole view is what was acknowledged, each offset once, as far as the log goes back."""
        first, table = where.log.first_position, read(where)
        found = {}
        for row in table.to_pylist():
            held = self.leases[row["lease"]]
            told = (row["group"], row["topic"], row["queue"])
            place = where.shard.ledger.queue(held.queue_id).place
            if row["lease"] < first:
                assert (*told, row["attempt"]) == (None,) * 4
            else:
                assert row["attempt"] == held.attempt
                left = held.group == "held" and first > 0 and told == (None,) * 3  # the lease before it may have left
                assert left or told == (held.group, place.topic, place.queue)
            last = row["start"] + row["count"] - 1
            assert {row["start"], last} <= set(held.offsets), "runs end where messages are"
            for offset in held.offsets:
                if row["start"] <= offset <= last:
                    entry = self.acked[row["lease"], offset]
                    assert (row["lease"], offset) not in found
                    assert entry.low <= row["position"] < entry.high
                    assert row["acked_us"] == entry.time_us
                    found[row["lease"], offset] = row
        for place, entry in self.acked.items():
            assert place in found or entry.low < first
        positions = table["position"].to_pylist()
        assert positions == sorted(set(positions))
        return table


def _nothing():

    return nothing_leased()


def _ok(offsets, codes):
    return [offset for offset, code in zip(offsets, codes, strict=True) if code == Code.OK]


def parts_agree(rng, where, whole) -> None:
    """Ranges, columns and filters give what the whole holds of them; also in small chunks."""
    groups, times = whole["group"].to_pylist(), sorted(set(whole["acked_us"].to_pylist()))
    with patch.object(chunks, "ROWS", 3), patch.object(group_views, "GAP", rng.choice([0, 5, 256])):
        assert read(where).equals(whole)
        group = rng.choice([*NAMES, "nobody"])
        assert read(where, group=group).equals(whole.filter(pc.equal(whole["group"], group)))
        named = read(where, group=group, columns=["start", "count"])
        assert named.equals(whole.filter(pc.equal(whole["group"], group)).select(["start", "count"]))
        if not groups:
            return
        for _ in range(4):
            low, high = sorted(rng.choices(whole["position"].to_pylist(), k=2))
            inside = whole.filter(pc.and_(pc.greater_equal(whole["position"], low), pc.less(whole["position"], high)))
            assert read(where, start=low, end=high).equals(inside)
        since, until = sorted(rng.choices(times, k=2))
        mask = pc.and_(pc.greater_equal(whole["acked_us"], since), pc.less(whole["acked_us"], until))
        assert read(where, stored_from_us=since, stored_until_us=until).equals(whole.filter(mask))


ACTS = ["send", *["receive"] * 5, *["ack"] * 6, *["nack"] * 2, "release", "time", "dead", "fence", "retain", "restart"]


@pytest.mark.invariant("I41")
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), acts=st.lists(st.sampled_from(ACTS), min_size=20, max_size=80))
def test_the_view_is_what_consumers_acknowledged(rng, acts):
    """I41"""
    bench = Bench(segment_bytes=1 << 12, retention=3600.0)
    bench.do(CreateTopic("orders", QUEUES))
    for name, options in GROUPS.items():
        bench.subscribe(name, **options)
    world = World(bench)
    world.send(rng, 30)
    for act in acts:
        if act == "send":
            world.send(rng, 10)
        elif act == "receive":
            world.receive(rng, rng.choice([*GROUPS, "held"]))
        elif act in ("ack", "nack", "release"):
            world.settle(rng, Act[act.upper()])
        elif act == "time":
            bench.pass_time(rng.choice([1, 5, 30]))
        elif act == "dead":
            world.bury_or_dig(rng)
        elif act == "fence" and world.epochs:
            member = rng.choice(list(world.epochs))
            bench.do(Fence("held", member))
            del world.epochs[member]
        elif act == "retain":
            bench.pass_time(rng.choice([900, 3700]))
            forget_old(bench)
        elif act == "restart":
            bench.restart(clean=rng.random() < 0.5)
    online = Looking(bench)
    whole = world.check(online)
    parts_agree(rng, online, whole)
    bench.engine.stop()
    offline = OfflineShard(open_offline(bench.disk, in_use=False))
    assert read(offline).equals(whole)


@pytest.fixture
def bench():
    made = Bench(segment_bytes=1 << 12, retention=3600.0)
    made.do(CreateTopic("orders", 1))
    made.do(send(0, *[{"tag": "odd" if n % 2 else "even"} for n in range(8)]))
    return made


def lease(bench, group="c", count=8, seconds=60.0, **options):
    return bench.do(Receive(group, 1, count, round(seconds * 1e6), **options))


def test_its_columns(bench):
    bench.subscribe("c")
    leased = lease(bench, count=3)
    bench.pass_time(5)
    bench.do(settle("c", leased))
    table = read(Looking(bench))
    assert table.schema.equals(ACK_VIEW)
    (row,) = table.to_pylist()
    assert row["position"] > row["lease"] == leased.leases[0]
    del row["position"], row["lease"]
    place = {"group": "c", "topic": "orders", "queue": 0, "start": 0, "count": 3, "attempt": 1}
    assert row == {"acked_us": bench.clock.now_us(), **place}


def test_a_run_spans_what_the_groups_tags_pass_over(bench):
    bench.subscribe("c", tags=("odd",))
    leased = lease(bench)
    assert leased.offsets.tolist() == [1, 3, 5, 7]
    bench.do(settle("c", leased, Act.ACK))
    rows = read(Looking(bench), columns=["start", "count"]).to_pylist()
    assert [(row["start"], row["count"]) for row in rows] == [(1, 1), (3, 1), (5, 1), (7, 1)]
    bench.subscribe("d", tags=("odd",))
    again = lease(bench, "d")
    whole = {"lease": int(again.leases[0]), "start": 1, "count": 7, "act": int(Act.ACK), "delay_us": -1, "cause": None}
    bench.do(type(settle("d", again))("d", pa.RecordBatch.from_pylist([whole], schema=SETTLING)))
    assert read(Looking(bench), columns=["start", "count"], group="d").to_pylist() == [{"start": 1, "count": 7}]


def test_what_a_group_is_done_with_otherwise_is_not_in_it(bench):
    bench.subscribe("c", max_attempts=1, tags=("odd",))  # passes over the even ones
    leased = lease(bench, count=2)
    bench.do(settle("c", leased, Act.NACK))  # dead letters
    dead = np.zeros(2, np.int64), np.array([1, 3])
    bench.do(SettleDead("c", dead[0][:1], dead[1][:1], retry=False))  # discarded
    bench.do(settle("c", lease(bench, count=1), Act.RELEASE))
    lease(bench, count=1, seconds=1.0)
    bench.pass_time(2)  # expired
    bench.subscribe("late", start="latest")  # skipped
    assert read(Looking(bench)).num_rows == 0
    assert bench.engine.shard.ledger.groups.account("late", 0, bench.engine.shard.ledger.topics)["skipped"].size == 8


def test_a_hand_over_is_followed_back_to_the_first_lease(bench):
    bench.subscribe("c", in_doubt="hold", max_attempts=5)
    for attempt in range(1, 4):
        joined = bench.do(Join("c", "one", process=attempt))
        leased = bench.do(Receive("c", joined["member"], 8, 60_000_000, epoch=joined["epoch"]))
        assert set(leased.attempts.tolist()) == {attempt}
    bench.do(settle("c", leased))
    (row,) = read(Looking(bench)).to_pylist()
    assert (row["group"], row["topic"], row["queue"], row["attempt"], row["count"]) == ("c", "orders", 0, 3, 8)


@pytest.fixture
def outlived(bench):
    """An acknowledgement whose lease's own row has left with retention, and one whose has not."""
    bench.subscribe("c")
    early = lease(bench, seconds=36_000.0)
    for _ in range(5):
        bench.do(send(0, {"body": bytes(3000)}))
    bench.clock.advance(7200)  # retention comes after the acknowledgement, in the same round
    assert set(bench.do(settle("c", early))["code"].to_pylist()) == {Code.OK}
    bench.do(send(0, {"body": b"new"}))
    bench.do(settle("c", lease(bench)))
    forget_old(bench)
    assert bench.engine.log.first_position > early.leases[0]
    return bench


def test_the_lease_has_left_with_retention(outlived):
    for _ in range(2):
        table = read(Looking(outlived))
        first, *later = table.to_pylist()
        assert (first["group"], first["topic"], first["queue"], first["attempt"]) == (None,) * 4
        assert (first["start"], first["count"]) == (0, 8)
        assert {row["group"] for row in later} == {"c"}
        assert read(Looking(outlived), group="c").num_rows == len(later)
        outlived.restart()  # nothing of it came from what the ledger happened to remember


def test_retention_may_come_while_leases_are_looked_up(outlived):
    class Late:
        """A log whose first position is read just before retention moves it."""

        def __init__(self, log):
            self.log, self.told = log, 0

        @property
        def first_position(self):
            self.told += 1
            return 0 if self.told == 1 else self.log.first_position

        def frames_at(self, *asked, **more):
            return self.log.frames_at(*asked, **more)

    log = outlived.engine.log
    leases = read(Looking(outlived))["lease"].to_numpy()
    late = Late(log)
    groups, queue_ids, attempts = group_views.lease_rows(late, leases)
    assert late.told == 2
    assert groups.tolist() == [-1, *[0] * (len(leases) - 1)]
    assert queue_ids.tolist() == groups.tolist()
    assert attempts.tolist() == [-1, *[1] * (len(leases) - 1)]


def test_a_start_that_left_is_told(outlived):
    with pytest.raises(Rejected, match="left the log"):
        read(Looking(outlived), start=1)


def test_bad_requests(bench):
    where = Looking(bench)
    for request in ({"tags": ["a"]}, {"key": "k"}, {"columns": ["body"]}, {"group": 5}):
        with pytest.raises(Rejected) as caught:
            read(where, **request)
        assert caught.value.code is Code.BAD_REQUEST
    with pytest.raises(Rejected, match="no consumer groups"):
        open_view(where, {"source": "%op", "group": "c"})
    with pytest.raises(Rejected) as caught:
        open_view(where, {"source": "%ack"})
    assert caught.value.code is Code.UNKNOWN_TOPIC
    assert caught.value.hint == "did you mean '%acks'?"
    with pytest.raises(Rejected, match="%half, %op, %acks, %group-acts, %dead-letters"):
        open_view(where, {"source": "%zzzzzz"})
