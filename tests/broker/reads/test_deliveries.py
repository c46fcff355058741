"""Receives of one member: split by bytes, yet in order, at once, and nothing leased for nobody."""

import gc
import threading
import weakref
from queue import SimpleQueue

import pyarrow as pa
import pytest

from escrowmq.broker import embedded
from escrowmq.broker.embedded import EmbeddedLink, open_embedded
from escrowmq.broker.leased import LeaseReader
from escrowmq.broker.reads.deliveries import FEW
from escrowmq.client.bus import Bus
from escrowmq.errors import Unknown
from escrowmq.log.report import Damage, RowDamage
from escrowmq.model import Act, Message
from escrowmq.platform.clock import SystemClock
from escrowmq.schemas import SETTLING
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Exchange

LASTING = {"wait_ms": 60_000, "lease_ms": 600_000}
"""Neither the wait nor the lease ends while the test stands still."""
NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


class Clock(SystemClock):
    """The broker's clock, which a test can move on."""

    ahead_us = 0

    def now_us(self):
        return super().now_us() + self.ahead_us


@pytest.fixture
def clock(monkeypatch):
    """The clock of the broker that the fixture ``link`` opens: ask for it first."""
    made = Clock()
    monkeypatch.setattr(embedded, "SystemClock", lambda: made)
    return made


@pytest.fixture
def link(tmp_path):
    settings = BrokerSettings(default_queues=1)
    link = open_embedded(tmp_path / "d", settings)
    with Bus([open_embedded(tmp_path / "d", settings)]) as bus:
        link.bus = bus
        bus.admin.create_topic("t")
        link.action("groups.subscribe", {"group": "g", "topics": ["t"]}, 60)
        yield link
    link.close()


def receive(link: EmbeddedLink, **options):
    return link.exchange(Exchange.RECEIVE, NO_ROWS, {**LASTING, "group": "g", "member": 1, **options})


def send(link: EmbeddedLink, count: int, size: int = 1000) -> None:
    link.bus.producer("p").send_batch([Message("t", bytes(size)) for _ in range(count)]).check()


def seen(answer) -> list[tuple[int, int]]:
    batch = answer.result(60)
    return list(zip(batch["offset"].to_pylist(), batch["attempt"].to_pylist(), strict=True))


@pytest.mark.invariant("I20")
def test_what_did_not_fit_goes_to_the_receive_that_waits_at_once_and_in_order(link):
    first = receive(link, max_messages=2, max_bytes=1000)
    second = receive(link, max_messages=10, max_bytes=1 << 20)
    send(link, 2)
    assert seen(first) == [(0, 1)]
    assert seen(second) == [(1, 1)], "no waiting while it lies ready"
    third, fourth = receive(link, max_messages=3, max_bytes=1000), receive(link, max_messages=3, max_bytes=1 << 20)
    send(link, 6)
    assert seen(third) == [(2, 1)]
    assert [offset for offset, _ in seen(fourth)] in ([3, 4], [3, 4, 5]), "before anything that was leased later (I20)"


@pytest.mark.invariant("I20")
def test_every_message_comes_once_in_order_however_it_is_split(link):
    send(link, 200, 3000)
    found: list[tuple[int, int]] = []
    answers = [receive(link, max_messages=17, max_bytes=10_000) for _ in range(3)]
    while len(found) < 200:
        found += seen(answers.pop(0))
        answers.append(receive(link, max_messages=17, max_bytes=10_000))
    assert found == [(offset, 1) for offset in range(200)]


class Allowed:
    """Grants what it is told to."""

    def __init__(self, *grants):
        self.grants = list(grants)
        self.wanted: SimpleQueue[int] = SimpleQueue()

    def grant(self, wanted):
        self.wanted.put(wanted)
        return min(self.grants.pop(0), wanted)


@pytest.mark.invariant("I35")
def test_a_receive_waits_until_its_answer_has_room_and_gets_no_more_than_that(link):
    """I35"""
    send(link, 20, 10_000)
    allowed = Allowed(0, 0, 35_000)
    options = {"group": "g", "member": 1, "max_messages": 20}
    first = link._calls.exchange(Exchange.RECEIVE, None, options, allowance=allowed)
    assert [offset for offset, _ in seen(first)] == [0, 1, 2], "read when there was room, and as much as it was given"
    assert allowed.wanted.qsize() == 3
    assert seen(receive(link, max_messages=2)) == [(3, 1), (4, 1)], "the rest lay ready"


def test_a_receive_that_was_given_no_room_can_be_withdrawn(link):
    send(link, 1)
    allowed = Allowed(*[0] * 1000)
    waiting = link._calls.exchange(Exchange.RECEIVE, None, {"group": "g", "member": 1}, allowance=allowed)
    allowed.wanted.get(timeout=60)
    assert waiting.cancel()
    assert seen(receive(link, member=2)) == [(0, 1)], "it was handed to nobody"


@pytest.mark.invariant("I35")
def test_an_answer_is_let_go_with_its_last_user(link):
    """Not when cycles are looked for: a broker that rests would keep hundreds of megabytes (I35)."""
    gc.collect()
    gc.disable()
    try:
        answer = receive(link)
        send(link, 1)
        kept = weakref.ref(answer.result(60))
        del answer
        link.action("stats", {}, 60)  # another round: the one before is done with
        link.action("stats", {}, 60)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("near", "messages", "reader"), [(100, 1, False), (100, FEW + 1, True), (0, 1, True)])
def test_a_few_new_messages_are_read_by_the_thread_that_synced_them(link, monkeypatch, near, messages, reader):
    """Not many, and not old ones: reading those could keep the writer."""
    monkeypatch.setattr("escrowmq.broker.reads.deliveries.NEAR_ROWS", near)
    threads: SimpleQueue[str] = SimpleQueue()
    answer = receive(link)
    answer.add_done_callback(lambda done: threads.put(threading.current_thread().name))
    send(link, messages)
    assert len(seen(answer)) == messages
    assert threads.get(timeout=60).startswith("escrowmq-reader") is reader


def test_a_damaged_message_does_not_keep_a_single_receive(link, monkeypatch):
    """Nothing came of the first message: the same receive gets the next one."""
    salvage = type(link._calls.engine.log).salvage
    place = Damage("a segment", 1, 1, "planted")

    def damaged(log, positions, columns=None):
        batch, found = salvage(log, positions, columns)
        offsets = [at for at, body in enumerate(batch.column("body").to_pylist()) if body == b"bad"]
        return batch, {**found, **{at: RowDamage(place, int(positions[at]), body_only=True) for at in offsets}}

    monkeypatch.setattr(type(link._calls.engine.log), "salvage", damaged)
    answer = receive(link, max_messages=1)
    with link.bus.producer("p") as producer:
        producer.send("t", b"bad")
        producer.send("t", b"good")
    assert seen(answer) == [(1, 1)]


def test_a_withdrawn_receive_leaves_nothing_leased(link):
    receives = [receive(link) for _ in range(3)]
    for one in receives[::-1]:
        one.cancel()
    send(link, 3)
    other = link.exchange(Exchange.RECEIVE, NO_ROWS, {**LASTING, "group": "g", "member": 2})
    assert seen(other) == [(0, 1), (1, 1), (2, 1)]


def test_what_was_given_back_unseen_is_not_counted(link):
    send(link, 3)
    batch = receive(link).result(60)
    row = {
        "lease": batch["lease"][0].as_py(),
        "start": 1,
        "count": 2,
        "act": int(Act.RELEASE),
        "delay_us": 0,
        "cause": None,
    }
    settle = pa.RecordBatch.from_pylist([row], schema=SETTLING)
    assert link.exchange(Exchange.SETTLE, settle, {"group": "g"}).result(60)["code"].to_pylist() == [0]
    assert seen(receive(link)) == [(1, 1), (2, 1)]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_does_not_fit_is_given_back_to_the_group_if_nobody_asks_again(link, ordered):
    link.action("groups.subscribe", {"group": "o", "topics": ["t"], "ordered": ordered}, 60)
    send(link, 4)
    first = receive(link, group="o", max_messages=4, max_bytes=1000, return_rest=True)
    batch = first.result(60)
    assert seen(first) == [(0, 1)]
    if ordered:
        assert seen(receive(link, group="o", member=2, wait_ms=0)) == [], "not beside the first of its key"
        row = {"lease": batch["lease"][0].as_py(), "start": 0, "count": 1, "act": 0, "delay_us": 0, "cause": None}
        link.exchange(Exchange.SETTLE, pa.RecordBatch.from_pylist([row], schema=SETTLING), {"group": "o"}).result(60)
    assert seen(receive(link, group="o", member=2)) == [(1, 1), (2, 1), (3, 1)], "nobody had seen them"


def by_another(link, **options) -> list[tuple[int, int]]:
    return seen(link.exchange(Exchange.RECEIVE, NO_ROWS, {**LASTING, "group": "g", "member": 2, **options}))


@pytest.mark.invariant("I25")
def test_what_never_left_the_broker_is_not_counted_when_its_member_leaves(link):
    """It lies ready, behind what did fit; then the member's next receive is withdrawn, by closing or by the
    connection's end."""
    send(link, 3)
    assert seen(receive(link, max_bytes=1000)) == [(0, 1)]
    deliveries = link._calls._deliveries
    line = deliveries._lines["g", 1]
    line.reading = True  # so that the next one waits
    asked = receive(link, max_bytes=1000)
    line.reading = False
    asked.cancel()
    assert by_another(link) == [(1, 1), (2, 1)]


@pytest.mark.invariant("I25")
def test_what_lies_ready_for_half_of_its_lease_is_given_to_others_uncounted(clock, link):
    """At the lease's end the attempt would count."""
    send(link, 3)
    assert seen(receive(link, max_bytes=1000)) == [(0, 1)]
    clock.ahead_us += 310_000_000
    assert by_another(link) == [(1, 1), (2, 1)]


@pytest.mark.invariant("I25")
def test_a_broker_that_stops_gives_back_what_never_left_it(tmp_path):
    """Three messages are leased at each start, and one of them leaves. Their leases would hold for days."""
    settings = BrokerSettings(default_queues=1)
    for start in range(3):
        link = open_embedded(tmp_path / "d", settings)
        with Bus([open_embedded(tmp_path / "d", settings)]) as link.bus:
            link.action("groups.subscribe", {"group": "g", "topics": ["t"]}, 60)
            if not start:
                send(link, 3)
            assert seen(receive(link, max_bytes=1000, lease_ms=1 << 30)) == [(start, 1)]
        link.close()


@pytest.mark.invariant("I25")
def test_what_could_not_be_read_is_not_counted(link, monkeypatch):
    real, broken = LeaseReader.read, [True, True]

    def read(self, *args):
        if broken:
            broken.pop()
            raise RuntimeError("a bug")
        return real(self, *args)

    monkeypatch.setattr(LeaseReader, "read", read)
    send(link, 2)
    for _ in range(2):
        with pytest.raises(Unknown, match="BROKER_FAILED"):
            receive(link).result(60)
    assert seen(receive(link)) == [(0, 1), (1, 1)]


@pytest.mark.invariant("I25")
def test_what_could_not_be_read_for_a_withdrawn_receive_is_leased_anew(link, monkeypatch):
    """Its lease was released: the next receive must not get the messages under that lease."""
    real = LeaseReader.read
    withdrawn, waiting = [receive(link)], receive(link)

    def read(self, *args):
        if withdrawn:
            withdrawn.pop().cancel()
            raise RuntimeError("a bug")
        return real(self, *args)

    monkeypatch.setattr(LeaseReader, "read", read)
    send(link, 1)
    batch = waiting.result(60)
    row = {"lease": batch["lease"][0].as_py(), "start": 0, "count": 1, "act": 0, "delay_us": 0, "cause": None}
    settle = pa.RecordBatch.from_pylist([row], schema=SETTLING)
    assert link.exchange(Exchange.SETTLE, settle, {"group": "g"}).result(60)["code"].to_pylist() == [0]
