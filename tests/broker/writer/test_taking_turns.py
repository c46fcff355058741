"""What waits for the writer: whose turn it is, how much a round takes, and how much may wait."""

import threading

import numpy as np
import pytest
from broker_bench import Bench, end, prepare

from escrowmq.broker.writer import engine as engines
from escrowmq.broker.writer.line import QUANTUM, Line
from escrowmq.broker.writer.pace import (
    FIRST_ROUND,
    LEAST_ROUND,
    LEAST_WAITING,
    PATIENCE_SECONDS,
    PROBE,
    ROUND_SECONDS,
    Pace,
)
from escrowmq.errors import Code, Overloaded
from escrowmq.ledger.commands import Send
from escrowmq.model import Outcome
from escrowmq.testing.ledgers import outgoing


class Waiting:
    """A request as the line sees it."""

    def __init__(self, source, size, number=0):
        self.source, self.size, self.number = source, size, number


def send(*sizes):
    batch = outgoing([{"body": bytes(size)} for size in sizes])
    return Send(batch, np.zeros(batch.num_rows, np.int64))


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

    def test_who_had_nothing_waiting_comes_first(self):
        line = Line()
        line.put(Waiting(source, 60_000) for source in range(1000) for _ in range(4))
        line.take(10 * QUANTUM)
        line.put([Waiting("polite", 1000)])
        assert line.take(QUANTUM)[0].source == "polite"

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
    """Rounds as large as they may be, of a disk that takes ``alone`` seconds and ``each`` for a byte; seconds of the last ones."""
    times = []
    for _ in range(rounds):
        size = pace.round()
        times.append(alone + each * size)
        pace.saw(size, times[-1])
    return times[-PROBE:]


class TestPace:
    @pytest.mark.parametrize(
        ("alone", "each"), [(0.05, 1 / 20e6), (0.0, 1 / 20e6), (0.001, 1 / 100e6), (0.3, 1 / 20e6)]
    )
    def test_a_round_takes_what_the_disk_writes_in_a_tenth_of_a_second(self, alone, each):
        pace = Pace(64 << 20)
        worst = max(run(pace, alone, each, 200))
        assert worst <= 1.3 * max(ROUND_SECONDS, 2 * alone)
        assert pace.round() * each > 0.5 * max(ROUND_SECONDS - alone, alone), "a slow sync does not make rounds tiny"

    def test_a_fast_disk_has_large_rounds_soon(self):
        pace = Pace(64 << 20)
        assert pace.round() == FIRST_ROUND
        run(pace, 0.0005, 1 / 2e9, 8)
        assert pace.round() == 64 << 20

    def test_one_sync_that_took_long_changes_little_and_not_for_long(self):
        pace = Pace(64 << 20)
        run(pace, 0.001, 1 / 1e9, 50)
        before = pace.share(1)
        pace.saw(64 << 20, 5.0)
        assert pace.share(1) >= 0.8 * before
        run(pace, 0.001, 1 / 1e9, 50)
        assert pace.round() > 32 << 20

    def test_small_rounds_say_nothing_of_how_much_may_wait(self):
        pace = Pace(64 << 20)
        for _ in range(100):
            pace.saw(70_000, 0.3)
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
            pace.saw(int(chance.integers(1, 64 << 20)), float(chance.choice([0.0, 1e-9, 0.01, 1.0, 1e4])))
            assert LEAST_ROUND // 4 <= pace.round() <= 64 << 20
            assert pace.share(3) >= LEAST_WAITING


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


def test_one_connection_may_not_fill_what_waits_and_others_are_still_taken():
    """I35"""
    bench = Bench(max_waiting_bytes=1_000_000)
    greedy = [bench.engine.submit(send(50_000), source="greedy") for _ in range(40)]
    refused = [one for one in greedy if one.done()]
    assert 30 <= len(refused) <= 33, "half of what messages may have"
    assert all(isinstance(one.exception(), Overloaded) and one.exception().code is Code.QUEUE_FULL for one in refused)
    others = [bench.engine.submit(send(50_000), source=name) for name in ("b", "c", "d")]
    assert not any(one.done() for one in others)


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
    codes = [one.result(30)["code"][0].as_py() for one in answers if not isinstance(one.exception(30), Overloaded)]
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
