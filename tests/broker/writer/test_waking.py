"""When the writer wakes: a lower bound that may be early but never keeps it awake, and one clock for all that waits."""

from collections.abc import Callable

import pyarrow as pa
import pytest
from broker_bench import Bench, asked, end, prepare, send, settle

from escrowmq.broker.actions import act
from escrowmq.broker.calls import Calls
from escrowmq.broker.writer import waiting
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import AskChecks, Receive, Recheck
from escrowmq.model import COMMIT, UNKNOWN, Act, DecidedBy, TransactionId
from escrowmq.schemas import Kind
from escrowmq.wire import Exchange, Parcel

SECOND = 1_000_000


def sleep_until(bench: Bench, end_us: int) -> int:
    """Let an engine that nobody asks sleep and wake as its thread would; how many rounds it ran."""
    rounds = 0
    while (wake := bench.engine.wake_us) < end_us:
        bench.clock.advance(us=max(wake - bench.clock.now_us(), 0))
        bench.engine.step()
        rounds += 1
    bench.clock.advance(us=end_us - bench.clock.now_us())
    return rounds


def test_entries_that_are_stale_wake_an_idle_engine_a_bounded_number_of_times():
    bench = Bench()
    session = bench.session()
    bench.engine.listeners.join("g", session)
    for _ in range(600):
        (row,) = bench.prepare(session, {})
        bench.end(session, COMMIT, row["transaction"])
        bench.clock.advance(us=1000)
    bench.engine.step()
    minute = bench.clock.now_us() + 55 * SECOND
    assert sleep_until(bench, minute) <= 4 + 600 // 64, "its upkeep, and the dead entries in a few looks"
    before = bench.engine.rounds
    assert sleep_until(bench, minute + 3600 * SECOND) <= 3 * 60
    assert bench.engine.rounds - before <= 3 * 60


def test_an_idle_engine_sleeps_although_nobody_can_be_asked():
    """What is due of a group without a connected producer, or of one that answers nothing, keeps nobody awake."""
    bench = Bench(checks_in_flight=1, check_max=3)
    absent, silent = bench.session("absent"), bench.session("silent")
    member = bench.engine.listeners.join("silent", silent)
    bench.prepare(absent, {}, {})
    bench.prepare(silent, {}, {}, {})
    rounds = sleep_until(bench, bench.clock.now_us() + 50 * SECOND)
    assert member.waiting == 2, "the second when the first was given up"
    assert rounds <= 8


def test_retries_releases_and_leases_wake_it_once_each():
    bench = Bench(default_queues=1, retry_backoff=5.0)
    bench.subscribe()
    bench.do(send(0, {}, {"delay_us": 9 * SECOND}))
    leased = bench.do(Receive("c", 1, 1, 60 * SECOND))
    bench.do(settle("c", leased, Act.NACK))
    bench.engine.step()
    assert sleep_until(bench, bench.clock.now_us() + 10 * SECOND) <= 4  # upkeep, the retry, the release
    waiting = bench.engine.receive(Receive("c", 1, 10, 30 * SECOND), 0)
    bench.engine.step()
    assert sorted(waiting.result(timeout=0).offsets.tolist()) == [0, 1]
    assert sleep_until(bench, bench.clock.now_us() + 40 * SECOND) <= 4  # upkeep, the lease's end, the retries


def sent(bench: Bench) -> None:
    bench.engine.submit(send(0, {}))


def committed(bench: Bench) -> None:
    session = bench.session()
    (row,) = bench.prepare(session, {})
    bench.engine.submit(end(session, COMMIT, row["transaction"]))


def committed_as_a_row(bench: Bench) -> None:
    session = bench.session()
    (row,) = bench.prepare(session, {})
    parcel = Parcel(Exchange.END, [(row["transaction"], int(COMMIT))], {"session": session})
    Calls(bench.engine).parcel(parcel, lambda answer: None)


def delayed(bench: Bench) -> None:
    bench.do(send(0, {"delay_us": SECOND}))
    bench.clock.advance(us=SECOND)


MAKES_VISIBLE = [sent, committed, committed_as_a_row, delayed]


def served_at_once(make: Callable[[Bench], None]) -> None:
    """Who waits is served by the very round that makes a message visible, and answered with its sync."""
    bench = Bench(default_queues=1)
    bench.subscribe()
    waiting = bench.engine.receive(Receive("c", 1, 1, 60 * SECOND), 60 * SECOND)
    bench.engine.step()
    assert not waiting.done()
    make(bench)
    assert not waiting.done()
    bench.engine.step()
    assert waiting.done(), "in that round"
    assert waiting.result(timeout=0).offsets.tolist() == [0]


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("make", MAKES_VISIBLE)
def test_who_waits_is_served_by_the_round_that_makes_the_message_visible(make):
    served_at_once(make)


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("make", MAKES_VISIBLE[:3])
def test_planted_a_wake_that_is_lost_is_caught(make, monkeypatch):
    """Who waits is served by the next round that looks at every line, and not by this one."""
    monkeypatch.setattr(waiting, "_BRINGS_NOTHING", waiting._BRINGS_NOTHING | {Kind.PLAIN, Kind.DECIDED})
    with pytest.raises(AssertionError, match="in that round"):
        served_at_once(make)


def test_a_waiting_receive_gets_a_retry_when_its_time_comes():
    bench = Bench(default_queues=1, retry_backoff=5.0)
    bench.subscribe()
    bench.do(send(0, {}))
    bench.do(settle("c", bench.do(Receive("c", 1, 1, 60 * SECOND)), Act.NACK))
    start = bench.clock.now_us()
    waiting = bench.engine.receive(Receive("c", 1, 1, 60 * SECOND), 60 * SECOND)
    bench.engine.step()
    while not waiting.done():
        assert bench.engine.wake_us <= start + 5 * SECOND
        bench.clock.advance(us=max(bench.engine.wake_us - bench.clock.now_us(), 0))
        bench.engine.step()
    assert bench.clock.now_us() == start + 5 * SECOND
    assert waiting.result(timeout=0).attempts.tolist() == [2]


def test_a_waiting_receive_goes_on_behind_messages_that_its_tags_exclude(monkeypatch):
    """It waited for the next request of anybody, or for its own end, with a message there for it."""
    monkeypatch.setattr("escrowmq.ledger.groups.receiving.MAX_PASSED", 3)
    bench = Bench(default_queues=1)
    bench.subscribe(tags=("a",))
    bench.do(send(0, *[{"tag": "b"} for _ in range(10)], {"tag": "a"}))
    waiting = bench.engine.receive(Receive("c", 1, 1, 60 * SECOND), 60 * SECOND)
    bench.engine.step()
    assert not waiting.done()
    assert sleep_until(bench, bench.clock.now_us() + 1) <= 5
    assert waiting.result(timeout=0).offsets.tolist() == [10]


@pytest.mark.invariant("I11")
def test_what_was_counted_before_the_disk_was_full_is_asked(monkeypatch):
    """A refusal for one group took the questions of the groups before it along: counted, and never put."""
    bench = Bench()
    one, other = bench.session("g"), bench.session("h")
    first, second = bench.engine.listeners.join("g", one), bench.engine.listeners.join("h", other)
    bench.prepare(one, {})
    bench.prepare(other, {})
    execute = bench.engine.shard.execute

    def refusing(command):
        if isinstance(command, AskChecks) and command.group == "h":
            raise error(Code.DISK_FULL)
        return execute(command)

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.shard, "execute", refusing)
        bench.pass_time(6)
    assert [check["attempt"] for check in asked(first)] == [1]
    assert not second.waiting
    bench.pass_time(1)
    assert [check["attempt"] for check in asked(second)] == [1], "after the pause"


@pytest.mark.invariant("I36")
@pytest.mark.parametrize("behind", [0, 3600])
def test_waiting_is_counted_by_broker_time_also_with_the_wall_clock_behind_the_log(behind):
    """The caller's thread read the wall clock, rounds broker time: with the first behind, a receive returned at
    once."""
    bench = Bench(default_queues=1)
    bench.do(send(0, {}))
    bench.subscribe(start="latest")
    bench.engine.stop()
    bench.clock = type(bench.clock)(bench.engine.log.last_time_us - behind * SECOND)
    bench.engine = bench._open()
    receive = bench.engine.receive(Receive("c", 1, 1, 60 * SECOND), 2 * SECOND)
    look = bench.engine.wait_for(lambda: None, 2 * SECOND)
    bench.engine.step()
    bench.pass_time(1.9)
    assert not receive.done()
    assert not look.done()
    bench.pass_time(0.1)
    assert len(receive.result(timeout=0).leases) == 0
    assert look.result(timeout=0) is None


@pytest.mark.invariant("I36")
def test_ages_are_counted_by_broker_time_also_with_the_wall_clock_behind_the_log():
    """Metrics and listings by age read the wall clock: an hour behind the log, nothing was ever older than a minute."""
    bench = Bench(transaction_timeout=600)
    session = bench.session()
    (row,) = bench.prepare(session, {})
    bench.engine.stop()
    bench.clock = type(bench.clock)(bench.engine.log.last_time_us - 3600 * SECOND)
    bench.engine = bench._open()
    bench.engine.start()
    bench.clock.advance(100)
    listed = act(bench.engine, "transactions.list", {"older_than": 90.0})["transactions"]
    assert [found["id"] for found in listed] == [str(TransactionId.from_bytes(row["transaction"]))]
    assert act(bench.engine, "transactions.list", {"older_than": 110.0})["transactions"] == []
    assert 100 <= act(bench.engine, "stats", {})["oldest_half_age_seconds"] < 101
    bench.engine.stop()


@pytest.mark.invariant("I36")
def test_asking_reads_no_clock():
    bench = Bench()
    bench.subscribe()
    bench.engine.clock = bench.engine.shard.clock = None  # whoever reads it on this thread fails
    bench.engine.receive(Receive("c", 1, 1, SECOND), SECOND)
    bench.engine.wait_for(lambda: None, SECOND)
    bench.engine.submit(prepare(1, {}))


def test_a_recheck_is_asked_about_at_once():
    bench = Bench(check_max=1)
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    (row,) = bench.prepare(session, {})
    bench.pass_time(6)
    (check,) = asked(member)
    bench.end(session, UNKNOWN, check["transaction"], by=DecidedBy.CHECK)
    bench.pass_time(30)
    bench.do(Recheck(pa.array([row["transaction"]], pa.binary(16))))
    bench.engine.step()
    assert [check["attempt"] for check in asked(member)] == [1]


def test_a_writer_that_dies_while_it_serves_leaves_no_receive_waiting(monkeypatch):
    bench = Bench()
    bench.subscribe()
    waiting = bench.engine.receive(Receive("c", 1, 1, SECOND), 60 * SECOND)
    bench.engine.step()
    monkeypatch.setattr(bench.engine.shard.ledger.groups, "has_work", lambda *_: 1 / 0)
    future = bench.engine.submit(send(0, {}))
    bench.engine.start()
    for left in (waiting, future):
        assert left.exception(timeout=60).code == Code.SHARD_STOPPED
    bench.engine.stop()
