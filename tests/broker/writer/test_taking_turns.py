"""What waits for the writer: whose turn it is, how much a round takes, and how much may wait."""

import threading

import numpy as np
import pytest
from broker_bench import Bench, end, prepare

from escrowmq.broker.writer import engine as engines
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.line import Line
from escrowmq.broker.writer.pace import (
    FIRST_ROUND,
    LEAST_ROUND,
    LEAST_WAITING,
    LONGEST_SECONDS,
    PATIENCE_SECONDS,
    PROBE,
    ROUND_SECONDS,
    SMALL,
    Pace,
)
from escrowmq.errors import Code, Overloaded
from escrowmq.ledger.commands import Send
from escrowmq.model import Outcome
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.ledgers import outgoing
from escrowmq.testing.memory_log import MemoryLog


class Waiting:
    """A request as the line sees it."""

    def __init__(self, source, size, number=0):
        self.source, self.size, self.number = source, size, number


def send(*sizes):
    batch = outgoing([{"body": bytes(size)} for size in sizes])
    return Send(batch, np.zeros(batch.num_rows, np.int64))


QUANTUM = 64 << 10


class TestLine:
    def test_each_connection_has_its_part_of_a_round_and_its_order(self):
        line = Line()
        line.put(Waiting(source, 10_000, number) for number in range(40) for source in "abc")
        taken = line.take(3 * QUANTUM)
        for source in "abc":
            numbers = [request.number for request in taken if request.source == source]
            assert numbers == list(range(len(numbers))), "in order"
            assert 6 <= len(numbers) <= 8, "what fits into its part"
        assert line.count == 120 - len(taken)

    def test_large_and_small_requests_have_equal_parts_in_bytes(self):
        line = Line()
        line.put(Waiting("large", 500_000) for _ in range(40))
        line.put(Waiting("small", 10_000) for _ in range(2000))
        taken = line.take(10_000_000)
        had = {source: sum(one.size for one in taken if one.source == source) for source in ("large", "small")}
        assert abs(had["large"] - had["small"]) <= 500_000

    def test_who_had_nothing_waiting_comes_first(self):
        line = Line()
        line.put(Waiting(source, 60_000) for source in range(1000) for _ in range(4))
        line.take(10 * QUANTUM)
        line.put([Waiting("polite", 1000)])
        assert line.take(QUANTUM)[0].source == "polite"

    def test_who_comes_again_and_again_with_one_request_is_in_every_round(self):
        """However much those have waiting who send without bound: a round may be taken by two of their requests."""
        line = Line()
        line.put(Waiting(source, 500_000) for source in range(12) for _ in range(100))
        for _ in range(200):
            line.put([Waiting("polite", 1000)])
            assert "polite" in [request.source for request in line.take(1_000_000)]

    def test_of_those_with_one_request_each_nobody_is_passed_over_by_who_came_later(self):
        """More of them than a round takes, and whoever was served comes again at once."""
        line, served = Line(), []
        line.put(Waiting(source, 10_000) for source in range(100))
        for _ in range(30):
            taken = [request.source for request in line.take(100_000)]
            served += taken
            line.put(Waiting(source, 10_000) for source in taken)
        assert {served.count(source) for source in range(100)} == {3}

    def test_ever_new_connections_do_not_keep_the_others_waiting_for_ever(self):
        line = Line()
        line.put(Waiting("old", 10_000) for _ in range(4))
        line.put(Waiting(("new", number), 10_000) for number in range(20))
        for new in range(20, 2000):
            line.put([Waiting(("new", new), 10_000)])
            line.take(10_000)
        assert "old" not in line._waiting

    def test_late_only_those_come_who_had_nothing_waiting_and_not_more_than_fits(self):
        line = Line()
        line.put(Waiting(source, 30_000) for source in "abc" for _ in range(10))
        line.take(100_000)
        line.put([Waiting("polite", 1000), Waiting("large", 300_000), Waiting("polite", 1000)])
        assert [request.source for request in line.take(200_000, late=True)][:1] == ["polite"]
        assert "large" in line._waiting
        assert not line.take(200_000, late=True), "those that have more waiting take turns in the next round"

    def test_what_is_remembered_of_the_past_is_bounded(self):
        line = Line()
        line.put(Waiting("much", 1000) for _ in range(1000))
        for number in range(1000):
            line.put([Waiting(number, 1000)])
            line.take(2000)
            assert len(line._had) <= 2 + len(line._waiting)

    def test_one_that_is_larger_than_a_round_has_its_turn_too(self):
        line = Line()
        line.put([Waiting("large", 5 << 20)])
        line.put(Waiting("small", 1000) for _ in range(100))
        taken = []
        while line.count:
            taken += line.take(1000)
        assert sorted({request.source for request in taken}) == ["large", "small"]
        assert len(taken) == 101

    def test_clear_gives_all(self):
        line = Line()
        line.put(Waiting(source, 100) for source in "aab")
        assert len(line.clear()) == 3
        assert (line.count, line.take(100)) == (0, [])


def run(pace, alone, each, rounds):
    """Rounds as large as they may be, of a disk that takes ``alone`` seconds and ``each`` for a byte; seconds of the
    last ones."""
    times = []
    for _ in range(rounds):
        size = pace.round()
        times.append(alone + each * size)
        pace.record(size, times[-1])
    return times[-PROBE:]


class TestPace:
    @pytest.mark.parametrize(
        ("alone", "each"), [(0.05, 1 / 20e6), (0.0, 1 / 20e6), (0.001, 1 / 100e6), (0.3, 1 / 20e6)]
    )
    def test_a_round_takes_what_the_disk_writes_in_a_tenth_of_a_second(self, alone, each):
        pace = Pace(64 << 20)
        worst = max(run(pace, alone, each, 200))
        assert worst <= 1.3 * max(ROUND_SECONDS, 2 * alone)
        assert pace.round() * each > 0.5 * min(max(ROUND_SECONDS - alone, alone), LONGEST_SECONDS), (
            "a slow sync does not make rounds tiny"
        )

    def test_a_machine_that_is_busy_makes_rounds_neither_larger_nor_much_smaller(self):
        """Every third sync takes up to three times as long, for reasons that have nothing to do with the disk."""
        pace, chance, sizes = Pace(64 << 20), np.random.default_rng(3), []
        for _ in range(600):
            size = pace.round()
            seconds = 0.05 + size / 20e6
            pace.record(size, seconds * (chance.uniform(1, 3) if chance.random() < 0.3 else chance.uniform(1, 1.1)))
            sizes.append(size)
        usual = np.sort(sizes[100:])
        assert usual[-1] * 1 / 20e6 <= 0.1, "no sync of more than 0.15 s, by what the disk takes"
        assert np.median(usual) / 20e6 > 0.025

    def test_no_round_is_long_however_long_the_first_syncs_took(self):
        pace = Pace(64 << 20)
        for _ in range(PROBE):
            pace.record(100_000, 3.0)
        run(pace, 0.05, 1 / 20e6, 8)
        assert max(run(pace, 0.05, 1 / 20e6, 2 * PROBE)) <= 0.05 + LONGEST_SECONDS

    def test_a_disk_that_becomes_slow_is_noticed(self):
        pace = Pace(64 << 20)
        run(pace, 0.001, 1 / 1e9, 100)
        run(pace, 0.05, 1 / 20e6, 100)
        assert max(run(pace, 0.05, 1 / 20e6, PROBE)) <= 0.15

    def test_a_fast_disk_has_large_rounds_soon(self):
        pace = Pace(64 << 20)
        assert pace.round() == FIRST_ROUND
        run(pace, 0.0005, 1 / 2e9, 8)
        assert pace.round() == 64 << 20

    def test_one_sync_that_took_long_changes_little_and_not_for_long(self):
        pace = Pace(64 << 20)
        run(pace, 0.001, 1 / 1e9, 50)
        before = pace.share(1)
        pace.record(64 << 20, 5.0)
        assert pace.share(1) >= 0.8 * before
        run(pace, 0.001, 1 / 1e9, 50)
        assert pace.round() > 32 << 20

    def test_small_rounds_say_nothing_of_how_much_may_wait(self):
        pace = Pace(64 << 20)
        for _ in range(100):
            pace.record(70_000, 0.3)
        assert pace.share(10) == float("inf")

    def test_all_connections_share_what_the_disk_writes_in_some_seconds(self):
        pace = Pace(64 << 20)
        run(pace, 0.05, 1 / 20e6, 100)
        alone = pace.share(1)
        assert 5e6 < alone / PATIENCE_SECONDS < 20e6  # of the bytes of a second, syncs included
        assert pace.share(4) == pytest.approx(alone / 4)
        assert pace.share(10_000) == LEAST_WAITING

    def test_any_times_at_all_leave_it_within_its_bounds(self):
        pace, chance = Pace(64 << 20), np.random.default_rng(7)
        for _ in range(2000):
            pace.record(int(chance.integers(1, 64 << 20)), float(chance.choice([0.0, 1e-9, 0.01, 1.0, 1e4])))
            assert LEAST_ROUND // SMALL <= pace.round() <= 64 << 20
            assert pace.share(3) >= LEAST_WAITING


@pytest.mark.invariant("I35")
def test_a_polite_sender_is_in_the_next_round_however_much_others_have_waiting():
    """I35"""
    bench = Bench(max_waiting_bytes=64 << 20)
    greedy = [bench.engine.submit(send(500_000), source=name) for _ in range(6) for name in ("a", "b")]
    polite = bench.engine.submit(send(1000), source="polite")
    bench.engine.step()
    assert polite.done(), "first of all"
    assert not all(one.done() for one in greedy)
    while bench.engine.waiting[0]:
        bench.engine.step()
    assert all(one.result(timeout=0)["code"][0].as_py() == 0 for one in greedy)
    assert bench.engine.waiting == (0, 0)


@pytest.mark.invariant("I35")
def test_one_connection_may_not_fill_what_waits_and_others_are_still_taken():
    """I35"""
    bench = Bench(max_waiting_bytes=1_000_000)
    greedy = [bench.engine.submit(send(50_000), source="greedy") for _ in range(40)]
    refused = [one for one in greedy if one.done()]
    assert 30 <= len(refused) <= 33, "half of what messages may have"
    assert all(isinstance(one.exception(), Overloaded) and one.exception().code is Code.QUEUE_FULL for one in refused)
    others = [bench.engine.submit(send(50_000), source=name) for name in ("b", "c", "d")]
    assert not any(one.done() for one in others)


@pytest.mark.invariant("I35")
def test_decisions_and_acknowledgements_are_taken_when_messages_are_refused():
    """I35: an eighth of what may wait is theirs, and they go first."""
    bench = Bench(max_waiting_bytes=400_000)
    session = bench.session()
    half = bench.prepare(session, {})[0]["transaction"]
    while not bench.engine.submit(send(10_000)).done():
        pass
    ended = bench.engine.submit(end(session, Outcome.COMMIT, half))
    assert not ended.done()
    looked = bench.engine.look(lambda: "seen")
    bench.engine.step()
    assert Code(ended.result(timeout=0)["code"][0].as_py()) is Code.COMMITTED
    assert looked.result(timeout=0) == "seen"


def test_a_stop_answers_what_waits_in_line(monkeypatch):
    monkeypatch.setattr(engines, "ROUND_BYTES", 1)
    bench = Bench()
    waiting = [bench.engine.submit(send(70_000), source=name) for name in "abc" for _ in range(3)]
    bench.engine.step()
    assert not all(one.done() for one in waiting)
    bench.engine.stop()
    assert all(one.result(timeout=0)["code"][0].as_py() == 0 for one in waiting)


def test_a_writer_that_dies_answers_what_waits_in_line(monkeypatch):
    monkeypatch.setattr(engines, "ROUND_BYTES", 1)
    bench = Bench()
    waiting = [bench.engine.submit(send(70_000), source=name) for name in "abc" for _ in range(3)]
    bench.engine.step()
    bench.engine._die(RuntimeError("for a test"))
    assert all(one.done() for one in waiting)


def test_two_threads_and_a_round_count_the_same_bytes():
    bench = Bench(max_waiting_bytes=64 << 20)
    bench.engine.start()
    answers = []

    def work(name):
        answers.extend([bench.engine.submit(send(30_000), source=name) for _ in range(200)])

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [one.result(60)["code"][0].as_py() for one in answers if not isinstance(one.exception(60), Overloaded)]
    assert codes
    assert set(codes) == {0}
    assert bench.engine.waiting == (0, 0)
    assert not bench.engine._of_source
    bench.engine.stop()


def test_prepared_messages_count_as_messages():
    bench = Bench(max_waiting_bytes=1 << 20)
    session = bench.session()
    batch = prepare(session, {"body": bytes(400_000)})
    first, second = (bench.engine.submit(batch, source="one") for _ in range(2))
    assert not first.done()
    assert isinstance(second.exception(), Overloaded)


class SlowInVirtualTime(MemoryLog):
    """A log whose syncs take a time of their own and one for each byte that was written; ``meanwhile`` is called again
    and again until one is over."""

    def __init__(self, clock, alone, each):
        self.meanwhile = lambda: None
        self._slow, self._alone, self._each = clock, alone, each
        self._synced_bytes = 0
        super().__init__(clock=clock)

    def hand_over(self):
        write = super().hand_over()
        size, self._synced_bytes = self.bytes_written - self._synced_bytes, self.bytes_written

        def finish():
            left = self._alone + self._each * size
            while left > 0:
                self._slow.advance(min(left, 0.02))
                left -= 0.02
                self.meanwhile()
            write()

        return finish


@pytest.mark.invariant("I35")
def test_a_polite_send_takes_two_rounds_at_most_on_a_slow_disk():
    """I35, by the broker's clock: twelve connections that send without bound, a disk of 20 MB/s with syncs of 50 ms,
    and one that sends when it was answered."""
    clock = SimulatedClock()
    log = SlowInVirtualTime(clock, 0.05, 1 / 20e6)
    engine = Engine(log, clock, BrokerSettings(max_waiting_bytes=16 << 20))
    seconds, waiting = [], []

    def arrive():
        for name in range(12):
            while not engine.submit(send(500_000), source=name).done():  # until it is refused
                pass
        if not waiting or waiting[-1].done():
            waiting.append(engine.submit(send(1000), source="polite"))
            began = clock.now_us()
            waiting[-1].add_done_callback(lambda done: seconds.append((clock.now_us() - began) / 1e6))

    log.meanwhile = arrive
    arrive()
    while len(seconds) < 32:
        engine.step()
    assert all(one.exception() is None for one in waiting if one.done())
    assert max(seconds[:PROBE]) < 1.0
    assert max(seconds[PROBE:]) < 0.5
    log.meanwhile = lambda: None
    engine.stop()
