"""Looks that wait: answered in the very round that makes a message visible, at their time, or when the engine ends."""

import errno

import pytest
from broker_bench import Bench, end, prepare, send

from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.ledger.listings import queues_beyond
from escrowmq.model import COMMIT


def ask(bench: Bench, offset: int, wait_us: int = 60_000_000, topic: str = "orders", *, every: bool = False):
    look = lambda: queues_beyond(bench.engine.shard.ledger, topic, {0: offset}, every) or None  # noqa: E731
    return bench.engine.wait_for(look, wait_us)


def test_it_is_answered_by_the_round_that_makes_a_message_visible():
    bench = Bench(default_queues=1)
    session = bench.session()
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    waiting = ask(bench, 1)
    half = bench.engine.submit(prepare(session, {}))
    bench.engine.step()
    assert not waiting.done(), "a half message is visible to nobody"
    bench.engine.submit(end(session, COMMIT, half.result(timeout=0)["transaction"][0].as_py()))
    bench.engine.step()
    assert waiting.result(timeout=0) == [{"queue": 0, "head": 0, "end": 2}]


def test_it_is_answered_at_once_or_at_its_time():
    bench = Bench(default_queues=1)
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    there, late = ask(bench, 0), ask(bench, 5, 1_000_000)
    bench.engine.step()
    assert there.result(timeout=0)
    assert bench.engine.wake_us <= bench.clock.now_us() + 1_000_000
    bench.clock.advance(1.0)
    bench.engine.step()
    assert late.result(timeout=0) is None


def test_a_topic_to_come_is_waited_for_if_asked_so():
    bench = Bench(default_queues=1)
    refused, waiting = ask(bench, 0), ask(bench, 0, every=True)
    bench.engine.step()
    with pytest.raises(EscrowError) as caught:
        refused.result(timeout=0)
    assert caught.value.code is Code.UNKNOWN_TOPIC
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    assert waiting.result(timeout=0) == [{"queue": 0, "head": 0, "end": 1}]


def test_those_who_wait_are_told_when_the_engine_stops_or_fails():
    bench = Bench(default_queues=1)
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    waiting = ask(bench, 9)
    bench.engine.step()
    bench.engine.stop()
    assert waiting.result(timeout=0) is None

    bench = Bench(default_queues=1)
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    waiting = ask(bench, 9)
    bench.engine.step()
    bench.disk.failures = {bench.disk.operations + 1: errno.EIO}
    bench.engine.submit(send(0, {}))
    bench.engine.step()
    with pytest.raises(Unknown):
        waiting.result(timeout=0)
