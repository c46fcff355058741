"""RabbitMQ: queues of our own and of others, full ones, and none at all."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aio_pika
import pytest
from target_sites import RabbitSite

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets import rabbitmq
from escrowmq.outbox.targets.rabbitmq import RabbitMqTarget
from escrowmq.testing.target_conformance import PATIENT, batch, eventually, first_sights, keyed, new_name


class Reader(RabbitSite):
    def __init__(self, url: str) -> None:
        self.given = url
        self.seen = {}

    @property
    def url(self) -> str:
        return self.given

    def drain(self, topic: str) -> list[Any]:
        self.seen[topic] = []
        return super().drain(topic)


@pytest.fixture
def site(rabbitmq_url: str) -> Reader:
    return Reader(rabbitmq_url)


@pytest.fixture
def target(rabbitmq_url: str) -> Iterator[RabbitMqTarget]:
    target = RabbitMqTarget(rabbitmq_url, timeout=PATIENT)
    yield target
    target.close()


def on_channel(url: str, act: Any) -> None:
    async def run() -> None:
        async with await aio_pika.connect(url) as connection:
            await act(await connection.channel())

    asyncio.run(run())


def test_a_new_queue_is_left_alone_until_rabbitmq_has_written_that_it_exists(
    target: RabbitMqTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq, "YOUNG_SECONDS", 0.2)
    rows = keyed(new_name(), ["a", None])
    assert target.send(rows).tolist() == [Code.QUEUE_FULL, Code.QUEUE_FULL]
    eventually(lambda: not target.send(rows).any(), "the new queue is never used")


def test_a_queue_of_another_kind_is_refused(target: RabbitMqTarget, rabbitmq_url: str) -> None:
    name = new_name()
    on_channel(rabbitmq_url, lambda channel: channel.declare_queue(name, durable=True))
    assert target.send(keyed(name, ["a"])).tolist() == [Code.BAD_QUEUE]
    classic = RabbitMqTarget(rabbitmq_url, timeout=PATIENT, queue_type="classic")
    assert "not always synced" in classic.promise.durable
    assert classic.send(keyed(name, ["a"])).tolist() == [Code.OK]
    classic.close()


def test_a_queue_that_goes_is_made_again(target: RabbitMqTarget, site: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq, "YOUNG_SECONDS", 0.0)
    name = site.new_topic()
    assert not target.send(keyed(name, ["a"])).any()
    on_channel(site.url, lambda channel: channel.queue_delete(name))
    rows = keyed(name, ["a", "a"], start=1)
    assert target.send(rows).tolist() == [Code.QUEUE_FULL, Code.QUEUE_FULL]
    eventually(lambda: not target.send(rows).any(), "the queue is not made again")
    assert first_sights(site.drain(name)) == {"a": [b"00000001", b"00000002"]}


def test_an_exchange_routes_and_what_no_queue_takes_is_refused(site: Reader) -> None:
    exchange, taken = new_name(), site.new_topic()

    async def bind(channel: Any) -> None:
        made = await channel.declare_exchange(exchange, "direct", durable=True)
        await (await channel.get_queue(taken)).bind(made, routing_key="wanted")

    target = RabbitMqTarget(site.url, timeout=PATIENT, exchange=exchange)
    rows = batch("wanted", [{"key": "a"}, {"key": "b", "topic": "unwanted"}, {"key": "b"}, {"topic": "unwanted"}])
    assert target.send(rows).tolist() == [Code.UNKNOWN_TOPIC] * 2 + [Code.QUEUE_FULL, Code.UNKNOWN_TOPIC]
    on_channel(site.url, bind)
    assert target.send(rows).tolist() == [Code.OK, Code.UNKNOWN_TOPIC, Code.QUEUE_FULL, Code.UNKNOWN_TOPIC]
    assert len(site.drain(taken)) == 1
    target.close()


def test_a_full_queue_is_overload_and_nothing_overtakes(site: Reader) -> None:
    name = new_name()
    limit = {"x-max-length": 2, "x-overflow": "reject-publish"}
    asyncio.run(site.declare(name, **limit))
    target = RabbitMqTarget(site.url, timeout=PATIENT, declare=False)
    rows = keyed(name, ["a"] * 12)
    seen: list[bytes] = []
    left = rows
    for _ in range(30):
        codes = target.send(left)
        taken = int((codes == Code.OK).sum())
        assert (codes[:taken] == Code.OK).all(), "something overtook"
        assert set(codes[taken:].tolist()) <= {Code.QUEUE_FULL}
        left = left.slice(taken)
        seen += [message.body for message in site.drain(name)]
        if not left.num_rows:
            break
    assert list(dict.fromkeys(seen)) == rows.column("body").to_pylist()
    target.close()


def test_headers_that_amqp_cannot_carry_are_refused(target: RabbitMqTarget, site: Reader) -> None:
    rows = [
        {"properties": [("n" * 256, "v")]},
        {"properties": [("n", "v" * 120_000)]},
        {"properties": [("n", "v" * 90_000)]},
    ]
    codes = target.send(batch(site.new_topic(), rows))
    assert codes.tolist() == [Code.PROPERTIES_TOO_LARGE, Code.PROPERTIES_TOO_LARGE, Code.OK]


def test_an_id_twice_in_one_batch_goes_once(target: RabbitMqTarget, site: Reader) -> None:
    rows = [{"message_id": b"x" * 16}, {"message_id": b"x" * 16}]
    assert target.send(batch(site.new_topic(), rows)).tolist() == [Code.OK, Code.QUEUE_FULL]


def test_keys_can_be_pipelined(site: Reader) -> None:
    target, name = RabbitMqTarget(site.url, timeout=PATIENT, pipeline_keys=True), site.new_topic()
    assert not target.send(keyed(name, ["a"] * 300)).any()
    bodies = [message.body for message in site.drain(name)]
    assert bodies == sorted(bodies)
    target.close()


def test_a_wrong_password_is_denied(rabbitmq_url: str) -> None:
    target = RabbitMqTarget("amqp://escrow:wrong@" + rabbitmq_url.partition("@")[2], timeout=PATIENT)
    assert target.send(keyed("t", ["a"])).tolist() == [Code.DENIED]
    target.close()


def test_a_closed_target_is_misuse(rabbitmq_url: str) -> None:
    target = RabbitMqTarget(rabbitmq_url)
    target.close()
    with pytest.raises(Misuse, match="closed"):
        target.send(keyed("t", ["a"]))
