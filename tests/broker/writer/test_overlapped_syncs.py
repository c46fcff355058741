"""While one round is synced the next is decided: nothing may be answered out of turn, and one failure stops all."""

import threading
from collections.abc import Callable

import pytest
from broker_bench import send

from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.memory_log import MemoryLog


class SlowLog(MemoryLog):
    """A log whose syncs wait for the test."""

    def __init__(self) -> None:
        self.slow = False
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        super().__init__(clock=SimulatedClock())

    def hand_over(self) -> Callable[[], None]:
        write = super().hand_over()

        def finish() -> None:
            if self.slow:
                self.begun.release()
                assert self.may_go.acquire(timeout=30)
            write()

        return finish


@pytest.fixture
def log():
    return SlowLog()


@pytest.fixture
def engine(log):
    engine = Engine(log, SimulatedClock(), BrokerSettings())
    engine.start()
    yield engine
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    engine.stop()


def crowd(engine, log, rounds):
    """Sends in as many rounds: each is under way when the next arrives."""
    log.slow = True
    futures = [engine.submit(send(0, {"topic": "t", "body": b"0"})), engine.submit(send(0, {"topic": "t"}))]
    assert log.begun.acquire(timeout=30)
    futures += [engine.submit(send(0, {"topic": "t", "body": b"%d" % n})) for n in range(rounds)]
    return futures


def test_no_answer_before_its_own_sync_and_all_in_order(engine, log):
    futures = crowd(engine, log, 3)
    assert not any(future.done() for future in futures)
    done: list[int] = []
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: done.append(number))
    for _ in range(16):
        log.may_go.release()
    answers = [future.result(timeout=30) for future in futures]
    assert done == sorted(done)
    positions = [answer.column("position")[0].as_py() for answer in answers]
    assert positions == sorted(positions)
    assert log.next_position == positions[-1] + 1


def test_a_look_waits_for_what_it_saw(engine, log):
    first, second, *_ = crowd(engine, log, 1)
    look = engine.look(lambda: log.next_position)
    engine.poke()
    assert not look.done()
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    seen = look.result(timeout=30)
    assert first.done()
    assert second.done()
    assert seen > first.result().column("position")[0].as_py()


def test_a_failed_sync_refuses_its_round_and_the_one_decided_meanwhile(engine, log):
    futures = crowd(engine, log, 3)
    log.fail_next_sync = True
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    for future in futures:
        assert future.exception(timeout=30).code == Code.SHARD_STOPPED
    assert engine.submit(send(0, {"topic": "t"})).exception(timeout=30).code == Code.SHARD_STOPPED
    assert engine.status == "stopped"
