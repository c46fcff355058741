"""Effects that are in the Redis of the sets: effect, mark and entry are one step, for consumers and for the
scheduler."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from compensation_world import World

redis = pytest.importorskip("redis")

from escrowmq.compensation import RedisEffects, open_sets  # noqa: E402


def counter(w: World, identity: bytes) -> str:
    return f"{w.name}:effects:{identity.hex()}"


def counts(w: World, client: Any, ids: list[bytes]) -> list[int]:
    return [int(client.get(counter(w, identity)) or 0) for identity in ids]


@pytest.mark.invariant("I48")
def test_consumers_and_scheduler_have_one_effect_each(world: Callable[..., World], redis_url: str) -> None:
    w = world(lambda name: open_sets(redis_url, name, timeout=60.0))
    with redis.Redis.from_url(redis_url) as client:

        def queue(pipeline: Any, message: Any) -> None:
            pipeline.incr(counter(w, message.message_id))

        doing = RedisEffects(client, w.sets, queue)
        ids = [w.prepare() for _ in range(6)]
        for number, identity in enumerate(ids):
            w.announce(identity)
            if number % 2:
                w.confirm(identity)
        w.consume_keys()
        with w.bus.consumer(w.name, w.topic) as consumer:
            handled = 0
            while handled < 3:
                handled += doing.consume(consumer, idle_timeout=0.05)
        assert counts(w, client, ids) == [0, 1, 0, 1, 0, 1]
        assert w.sets.sizes().commits == 3
        report = w.schedule(handler=None, effects=doing)
        assert (report.taken, report.effects, report.committed) == (3, 3, 3)
        with w.bus.consumer(
            w.name, w.topic
        ) as consumer:  # what the scheduler committed is delivered, and finds its mark
            while w.waits(w.topic, w.name):
                assert doing.consume(consumer, idle_timeout=0.05) == 0
        assert counts(w, client, ids) == [1] * 6
        w.schedule(handler=None, effects=doing)
        assert (w.faults([]), w.open(), w.cases()) == ([], [], {})
    w.sets.close()


def test_two_who_handle_the_same_at_once_and_one_that_fails(world: Callable[..., World], redis_url: str) -> None:
    w = world(lambda name: open_sets(redis_url, name, timeout=60.0))
    ids = [w.prepare() for _ in range(20)]
    messages = [Message(identity, w.topic) for identity in ids]
    start, results = threading.Barrier(2), []
    with redis.Redis.from_url(redis_url) as client:

        def queue(pipeline: Any, message: Any) -> None:
            pipeline.incr(counter(w, message.message_id))

        def run() -> None:
            doing = RedisEffects(client, w.sets, queue)
            start.wait()
            results.append(doing.apply(messages))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts(w, client, ids) == [1] * 20
        assert [first + second for first, second in zip(*results, strict=True)] == [1] * 20
        # A command that fails while the step runs: no mark is left, so it is tried again, and the others of its batch
        # are done.
        bad, good = Message(uuid.uuid4().bytes, w.topic), Message(uuid.uuid4().bytes, w.topic)
        client.lpush(counter(w, bad.message_id), "a list")
        doing = RedisEffects(client, w.sets, queue, keep=3600.0)
        problem, fine = doing.apply([bad, good])
        assert isinstance(problem, redis.ResponseError)
        assert fine is True
        client.delete(counter(w, bad.message_id))
        assert doing.apply([bad, good, bad]) == [True, False, False]
        [mark] = client.keys(f"escrowmq:seen:*{bad.message_id.hex()}*")
        assert 0 < client.ttl(mark) <= 3600
    w.sets.close()


class Message:
    """As much of a message as an effect looks at."""

    def __init__(self, identity: bytes, topic: str) -> None:
        self.message_id, self.topic = identity, topic
