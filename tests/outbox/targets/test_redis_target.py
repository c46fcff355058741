"""Redis Streams: the promise is held against the server's own settings, and nothing is half added."""

from collections.abc import Iterator

import pytest
import redis

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.redis import RedisTarget
from escrowmq.testing.target_conformance import PATIENT, batch, ids_of, keyed, new_name


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.config_set("appendfsync", "always")
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.invariant("I40")
def test_a_server_that_syncs_less_than_promised_is_refused(redis_url: str, admin: redis.Redis) -> None:
    admin.config_set("appendfsync", "everysec")
    target = RedisTarget(redis_url, timeout=PATIENT)
    with pytest.raises(Misuse, match="guarantees less"):
        target.send(keyed("t", ["a"]))
    admin.config_set("appendfsync", "always")
    assert target.send(keyed(new_name(), ["a"])).tolist() == [Code.OK]
    target.close()


def test_less_can_be_asked_for_and_is_declared(redis_url: str, admin: redis.Redis) -> None:
    admin.config_set("appendfsync", "everysec")
    target = RedisTarget(redis_url, timeout=PATIENT, durability="everysec")
    assert "loses the last second" in target.promise.durable
    assert target.send(keyed(new_name(), ["a"])).tolist() == [Code.OK]
    target.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_throws_entries_or_marks_away_is_refused(redis_url: str, admin: redis.Redis, policy: str) -> None:
    admin.config_set("maxmemory", 100 << 20)
    admin.config_set("maxmemory-policy", policy)
    target = RedisTarget(redis_url, timeout=PATIENT)
    with pytest.raises(Misuse, match="evicts entries or marks"):
        target.send(keyed("t", ["a"]))
    target.close()


def test_full_memory_is_overload_and_nothing_overtakes(redis_url: str, admin: redis.Redis) -> None:
    topic, target = new_name(), RedisTarget(redis_url, timeout=PATIENT)
    assert not target.send(keyed(topic, ["a"])).any()
    admin.config_set("maxmemory", 1)
    rows = keyed(topic, ["a", "a", "b"], start=1)
    assert target.send(rows).tolist() == [Code.DISK_FULL, Code.QUEUE_FULL, Code.DISK_FULL]
    admin.config_set("maxmemory", 0)
    assert not target.send(rows).any()
    assert admin.xlen(topic) == 4
    target.close()


def test_a_refused_row_holds_its_key_back_in_later_scripts_too(redis_url: str, admin: redis.Redis) -> None:
    topic, other = new_name(), new_name()
    admin.set(other, "not a stream")
    rows = [{"topic": other, "key": "a"}, {"key": "a"}, *({"key": f"k{n}"} for n in range(600)), {"key": "a"}]
    target = RedisTarget(redis_url, timeout=PATIENT)
    codes = target.send(batch(topic, rows))
    assert codes[[0, 1, -1]].tolist() == [Code.UNKNOWN_TOPIC, Code.QUEUE_FULL, Code.QUEUE_FULL]
    assert not codes[2:-1].any()
    assert admin.xlen(topic) == 600
    target.close()


def test_without_marks_repeats_are_copies(redis_url: str, admin: redis.Redis) -> None:
    topic, target = new_name(), RedisTarget(redis_url, timeout=PATIENT, dedup_seconds=0)
    rows = keyed(topic, ["a"])
    assert not target.promise.deduplicates
    assert not target.send(rows).any()
    assert not target.send(rows).any()
    assert admin.xlen(topic) == 2
    target.close()


def test_marks_go_when_their_time_is_over(redis_url: str, admin: redis.Redis) -> None:
    topic, target = new_name(), RedisTarget(redis_url, timeout=PATIENT, dedup_seconds=77)
    rows = keyed(topic, ["a"])
    target.send(rows)
    [mark] = list(admin.scan_iter(f"escrowmq:sent:{topic}:*"))
    assert mark.decode().endswith(ids_of(rows)[0].hex())
    assert 0 < admin.ttl(mark) <= 77
    target.close()


def test_replicas_that_do_not_answer_are_unknown(redis_url: str, admin: redis.Redis) -> None:
    topic, target = new_name(), RedisTarget(redis_url, wait_replicas=1, timeout=0.5)
    assert target.send(keyed(topic, ["a", "a", "b"])).tolist() == [Code.TIMED_OUT, Code.QUEUE_FULL, Code.TIMED_OUT]
    target.close()


def test_streams_are_trimmed_only_when_asked_for(redis_url: str, admin: redis.Redis) -> None:
    topic, target = new_name(), RedisTarget(redis_url, timeout=PATIENT, max_length=100)
    assert "trimmed" in target.promise.durable
    for _ in range(5):
        assert not target.send(keyed(topic, [None] * 200)).any()
    assert 100 <= admin.xlen(topic) < 1000
    target.close()


def test_a_wrong_password_is_denied(redis_url: str) -> None:
    target = RedisTarget("redis://:wrong@" + redis_url.partition("@")[2], timeout=PATIENT)
    assert target.send(keyed("t", ["a"])).tolist() == [Code.DENIED]
    target.close()


def test_queues_are_refused(redis_url: str) -> None:
    target = RedisTarget(redis_url, timeout=PATIENT)
    assert target.send(batch(new_name(), [{"queue": 1}, {"queue": 0}])).tolist() == [Code.BAD_QUEUE, Code.OK]
    target.close()
