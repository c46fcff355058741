"""Kafka: limits of topics, refusals in the middle, and settings that the promise stands on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from target_sites import KafkaSite

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.kafka import KafkaTarget
from escrowmq.testing.target_conformance import PATIENT, batch, first_sights, keyed, new_name

BIG = b"x" * 5000


class Reader(KafkaSite):
    def __init__(self, url: str) -> None:
        self.given = url

    @property
    def url(self) -> str:
        return self.given


@pytest.fixture
def target(kafka_url: str) -> Iterator[KafkaTarget]:
    target = KafkaTarget(kafka_url, timeout=PATIENT)
    yield target
    target.close()


def make(url: str, **config: str) -> str:
    name = new_name()
    admin = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    admin.create_topics([NewTopic(name, 2, 1, config=config)])[name].result(60)
    return name


ROWS = [
    {"key": "a", "body": b"1"},
    {"key": "a", "body": BIG},
    {"key": "a", "body": b"3"},
    {"key": "b", "body": b"4"},
    {"body": BIG},
    {"key": "b", "body": b"6"},
]
ANSWERS = [Code.OK, Code.BODY_TOO_LARGE, Code.QUEUE_FULL, Code.OK, Code.BODY_TOO_LARGE, Code.OK]


def test_the_limit_of_the_topic_counts(target: KafkaTarget, kafka_url: str) -> None:
    topic = make(kafka_url, **{"max.message.bytes": "2000"})
    assert target.send(batch(topic, ROWS)).tolist() == ANSWERS
    many = keyed(topic, [f"k{n}" for n in range(500)])  # together more than one batch of this topic may have
    assert not target.send(many).any()
    large = make(kafka_url, **{"max.message.bytes": "4000000"})
    assert target.send(batch(large, [{"body": b"x" * 3_000_000}])).tolist() == [Code.OK]


def test_the_limit_of_a_new_topic_is_asked_for_until_kafka_knows_it(
    target: KafkaTarget, kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, asked = AdminClient.describe_configs, []

    def answer_late(self: AdminClient, resources: list[ConfigResource], **options: Any) -> dict[ConfigResource, Any]:
        asked.append(resources)
        if len(asked) > 1:
            return describe(self, resources, **options)
        unknown = [ConfigResource(ConfigResource.Type.TOPIC, new_name()) for _ in resources]
        return dict(zip(resources, describe(self, unknown, **options).values(), strict=True))

    monkeypatch.setattr(AdminClient, "describe_configs", answer_late)
    topic = make(kafka_url, **{"max.message.bytes": "2000"})
    assert target.send(batch(topic, ROWS)).tolist() == ANSWERS
    assert len(asked) == 2


@pytest.mark.parametrize("config", [{}, {"batch.num.messages": 1}], ids=["together", "one by one"])
def test_a_limit_that_nobody_tells_is_found_by_being_refused(
    config: dict[str, int], kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka refuses whole batches: each of their messages is tried alone. What comes after a refused batch is not
    stored."""
    target = KafkaTarget(kafka_url, timeout=PATIENT, config=config)
    monkeypatch.setattr(KafkaTarget, "_describe", lambda self, topics, seconds: dict.fromkeys(topics, 0))
    topic = make(kafka_url, **{"max.message.bytes": "2000"})
    rows = batch(topic, ROWS)
    codes = np.full(len(ROWS), Code.QUEUE_FULL, np.uint8)
    for _ in range(20):  # as a relay does: what was refused waits, what nobody knows comes again
        left = np.flatnonzero((codes != Code.OK) & (codes != Code.BODY_TOO_LARGE))
        codes[left] = target.send(rows.take(pa.array(left)))
        if codes.tolist() == ANSWERS:
            break
        codes[2] = Code.BODY_TOO_LARGE if codes[1] == Code.BODY_TOO_LARGE else codes[2]  # waits with the one before
    assert codes[[1, 4]].tolist() == [Code.BODY_TOO_LARGE] * 2
    assert not codes[[0, 3, 5]].any()
    found = first_sights(Reader(kafka_url).drain(topic))
    assert found == {"a": [b"1"], "b": [b"4", b"6"]}
    target.close()


def test_a_topic_that_is_not_there(target: KafkaTarget, kafka_url: str) -> None:
    careful = KafkaTarget(kafka_url, timeout=PATIENT, create_topics=False)
    topic, there = new_name(), make(kafka_url)
    rows = batch(topic, [{"key": "a"}, {"topic": there, "key": "a"}, {"topic": there, "key": "b"}])
    assert careful.send(rows).tolist() == [Code.UNKNOWN_TOPIC, Code.QUEUE_FULL, Code.OK]
    assert not target.send(rows).any()
    assert not careful.send(rows).any()
    careful.close()


def test_a_partition_can_be_named(target: KafkaTarget, kafka_url: str) -> None:
    topic = make(kafka_url)
    codes = target.send(batch(topic, [{"queue": 0}, {"queue": 1}, {"queue": 2}]))
    assert codes.tolist() == [Code.OK, Code.OK, Code.BAD_QUEUE]


def test_what_the_promise_stands_on_cannot_be_set(kafka_url: str) -> None:
    for setting in ({"acks": "1"}, {"enable.idempotence": False}, {"max.in.flight.requests.per.connection": 5}):
        with pytest.raises(Misuse, match="set by the target"):
            KafkaTarget(kafka_url, config=setting)
    with pytest.raises(Misuse, match="set by the target"):
        KafkaTarget(f"{kafka_url}?acks=0")
    with pytest.raises(Misuse, match="No such"):
        KafkaTarget(f"{kafka_url}?no.such.setting=1")
    with pytest.raises(Misuse, match="names no broker"):
        KafkaTarget("kafka://")


def test_settings_can_stand_in_the_url(kafka_url: str) -> None:
    target = KafkaTarget(f"{kafka_url}?client.id=relay&compression.type=zstd", timeout=PATIENT)
    assert target.send(keyed(new_name(), ["a"])).tolist() == [Code.OK]
    target.close()


def test_nobody_there_is_unknown_at_once_for_new_topics(kafka_url: str) -> None:
    target = KafkaTarget("127.0.0.1:1", timeout=1)
    assert set(target.send(keyed("t", ["a", "b"])).tolist()) <= {Code.DISCONNECTED, Code.TIMED_OUT}
    target.close()
