"""A glance at the ledger runs on the caller's thread while the writer sleeps and all is durable; else on the writer,
like a look.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from broker_bench import Bench
from test_rounds_here import Bell

from escrowmq.broker.reads import lookups
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError, Rejected, error
from escrowmq.ledger.commands import CreateTopic


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose writer sleeps."""
    bench = Bench()
    bench.do(CreateTopic("orders", 2))
    made = bench.engine
    bell = made._bell = Bell(made._bell)  # type: ignore[assignment]
    made.start()
    bell.sleeps.acquire()
    yield made
    made.stop()


def thread_of(glance: Future[Any]) -> threading.Thread:
    found: threading.Thread = glance.result(60)
    return found


def test_it_runs_here_while_the_writer_sleeps_and_wakes_nobody(engine: Engine) -> None:
    rounds = engine.rounds
    assert thread_of(engine.glance(threading.current_thread)) is threading.current_thread()
    nested = engine.glance(lambda: thread_of(engine.glance(threading.current_thread)))
    assert thread_of(nested) is threading.current_thread()  # as a signal's handler may
    assert engine.rounds == rounds


def test_what_it_raises_is_the_callers_and_stops_nothing(engine: Engine) -> None:
    def refused() -> None:
        raise error(Code.UNKNOWN_TOPIC, "no such thing")

    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(Rejected):
        engine.glance(refused).result(60)
    with pytest.raises(EscrowError) as caught:
        engine.glance(broken).result(60)
    assert caught.value.code is Code.BROKER_FAILED
    with pytest.raises(KeyboardInterrupt):
        engine.glance(lambda: (_ for _ in ()).throw(KeyboardInterrupt()).send(None))
    assert engine.look(lambda: 7).result(60) == 7
    assert engine.status == "ok"


def test_what_is_not_durable_yet_is_waited_for_on_the_writer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.log), "durable_sequence", property(lambda log: log.next_sequence - 1))
    assert thread_of(engine.glance(threading.current_thread)) is engine._thread
    assert lookups._end(engine) == engine.log.next_sequence


def test_a_round_waits_for_a_glance_and_a_stop_for_both(engine: Engine) -> None:
    """The ledger stands still under it, and who comes after the stop is refused instead of waiting."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        assert go_on.wait(60)
        return engine.rounds

    answers: list[Any] = []
    glancing = threading.Thread(target=lambda: answers.append(engine.glance(slow).result(60)))
    glancing.start()
    assert begun.wait(60)
    rounds = engine.rounds
    asked = engine.look(lambda: engine.rounds)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    assert engine.rounds == rounds
    assert not asked.done()
    go_on.set()
    for thread in (glancing, stopping):
        thread.join()
    assert answers == [rounds]
    assert asked.result(60) > rounds
    with pytest.raises(EscrowError) as caught:
        engine.glance(lambda: 1).result(60)
    assert caught.value.code is Code.SHARD_STOPPED


def test_a_shard_that_failed_answers_nothing(engine: Engine) -> None:
    engine.shard.stop(OSError("a disk that is gone"))
    with pytest.raises(EscrowError):
        engine.glance(lambda: 1).result(60)
    with pytest.raises(EscrowError):
        lookups._end(engine)
