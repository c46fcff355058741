"""The transport under kombu's API, on a served broker."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from celery_world import TimedBroker, until
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

import escrowmq as mq
import escrowmq.celery
from escrowmq.errors import Misuse
from escrowmq_lab.servers.process import free_port


@pytest.fixture
def connection(shared_broker: str) -> Iterator[Connection]:
    with Connection(shared_broker, connect_timeout=60) as connection:
        yield connection


@pytest.fixture
def other(shared_broker: str) -> Iterator[Connection]:
    """Another process, as far as kombu knows."""
    with Connection(shared_broker, connect_timeout=60) as connection:
        yield connection


@pytest.fixture
def bus(shared_broker: str) -> Iterator[mq.Bus]:
    with mq.connect(shared_broker) as bus:
        yield bus


def work_queue(name: str) -> Queue:
    return Queue(name, Exchange(name), routing_key=name)


def publish(connection: Connection, queue: Queue, *bodies: Any, **more: Any) -> None:
    producer = Producer(connection, serializer="json")
    for body in bodies:
        producer.publish(body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **more)


class Taking:
    """A consumer that keeps what it gets."""

    def __init__(self, connection: Connection, *queues: Queue, prefetch: int = 0, no_ack: bool = False) -> None:
        self.connection, self.messages = connection, list[kombu.Message]()
        self.consumer = Consumer(
            connection.channel(), list(queues), on_message=self.messages.append, prefetch_count=prefetch, no_ack=no_ack
        )
        self.consumer.consume()

    def drain(self, count: int, timeout: float = 60.0) -> list[Any]:
        """The bodies of ``count`` more messages."""
        have = len(self.messages)
        while len(self.messages) < have + count:
            self.connection.drain_events(timeout=timeout)
        return [message.payload for message in self.messages[have:]]

    def get_nothing(self, timeout: float = 0.3) -> None:
        with pytest.raises(socket.timeout):
            self.connection.drain_events(timeout=timeout)

    def close(self) -> None:
        self.consumer.cancel()
        self.consumer.channel.close()


def states(bus: mq.Bus, group: str) -> dict[str, int]:
    queues = [queue for one in bus.admin.groups() if one["name"] == group for queue in one["queues"]]
    return {name: sum(queue[name] for queue in queues) for name in ("waiting", "leased", "retrying", "dead", "acked")}  # type: ignore[literal-required]


def test_messages_keep_their_order_and_are_acknowledged_at_the_broker(
    connection: Connection, other: Connection, bus: mq.Bus, t: str
) -> None:
    publish(connection, work_queue(t), *range(20))
    taking = Taking(other, work_queue(t))
    assert taking.drain(20) == list(range(20))
    assert not any(message.delivery_info["redelivered"] for message in taking.messages)
    assert states(bus, t)["leased"] == 20
    for message in taking.messages:
        message.ack()
    until(lambda: states(bus, t)["acked"] == 20, "acknowledgements at the broker")
    taking.close()


def test_a_prefetch_limit_leaves_the_rest_at_the_broker(connection: Connection, bus: mq.Bus, t: str) -> None:
    """Also over two queues, whose threads receive at the same time."""
    queues = [work_queue(f"{t}-{name}") for name in "ab"]
    for queue in queues:
        publish(connection, queue, *range(5))
    taking = Taking(connection, *queues, prefetch=3)
    taking.drain(3)
    taking.get_nothing()

    def leased() -> int:
        return sum(states(bus, queue.name)["leased"] for queue in queues)

    until(lambda: leased() == 3, "three messages at the consumer")
    while len(taking.messages) < 10:
        taking.messages[len(taking.messages) - 3].ack()
        taking.drain(1)
        assert len([message for message in taking.messages if not message.acknowledged]) <= 3
    taking.close()
    until(lambda: leased() == 0, "nothing at the consumer")


def test_closing_returns_what_is_not_acknowledged_without_counting_an_attempt(
    connection: Connection, shared_broker: str, bus: mq.Bus, t: str
) -> None:
    publish(connection, work_queue(t), *range(6))
    with Connection(shared_broker, transport_options={"lease": 3600.0}, connect_timeout=60) as first:
        taking = Taking(first, work_queue(t), prefetch=4)
        taking.drain(2)
        taking.messages[0].ack()
    assert states(bus, t)["leased"] == 0
    again = Taking(connection, work_queue(t))
    assert sorted(again.drain(5)) == [1, 2, 3, 4, 5]
    assert not any(message.delivery_info["redelivered"] for message in again.messages)
    again.close()


def test_requeue_and_reject_are_the_brokers(connection: Connection, bus: mq.Bus, t: str) -> None:
    publish(connection, work_queue(t), "requeued", "rejected")
    taking = Taking(connection, work_queue(t))
    taking.drain(2)
    taking.messages[0].requeue()
    taking.messages[1].reject()
    assert taking.drain(1) == ["requeued"]
    assert taking.messages[-1].delivery_info["redelivered"]
    taking.messages[-1].ack()
    until(lambda: states(bus, t)["dead"] == 1, "a dead letter")
    taking.close()


def test_what_is_no_message_of_kombu_is_a_dead_letter(connection: Connection, bus: mq.Bus, t: str) -> None:
    for body in (b"\xff", b"[]", b"{}", b'{"properties": 1}', b'{"properties": {"delivery_info": null}}'):
        bus.producer("stranger").send(t, body)
    publish(connection, work_queue(t), "fine")
    taking = Taking(connection, work_queue(t))
    assert taking.drain(1) == ["fine"]
    until(lambda: states(bus, t)["dead"] == 5, "five dead letters")
    assert all("not a message of Celery" in letter["cause"] for letter in bus.admin.dead_letters(t))
    taking.close()


def test_a_consumer_without_acknowledgements_leases_nothing(connection: Connection, bus: mq.Bus, t: str) -> None:
    publish(connection, work_queue(t), *range(3))
    taking = Taking(connection, work_queue(t), no_ack=True)
    taking.drain(3)
    until(lambda: states(bus, t)["acked"] == 3, "acknowledged messages")
    taking.close()


def test_purge_and_size_count_what_waits(connection: Connection, other: Connection, t: str) -> None:
    queue = work_queue(t)
    publish(connection, queue, *range(5))
    bound = queue(connection.default_channel)
    assert bound.queue_declare(passive=True).message_count == 5
    held = bound.get()
    assert bound.queue_declare(passive=True).message_count == 4
    assert queue(other.default_channel).purge() == 4
    assert bound.queue_declare(passive=True).message_count == 0
    held.ack()


def test_a_fanout_reaches_who_listens_and_nobody_else(connection: Connection, other: Connection, t: str) -> None:
    exchange = Exchange(t, type="fanout")
    publish(connection, Queue(f"{t}-early", exchange), "before")
    queues = [Queue(f"{t}-{name}", exchange, auto_delete=True) for name in "ab"]
    takings = [Taking(each, queue) for each, queue in zip((connection, other), queues, strict=True)]
    Producer(other).publish("now", exchange=exchange)
    assert [taking.drain(1) for taking in takings] == [["now"], ["now"]]
    for taking in takings:
        taking.messages[0].ack()
        taking.close()


def test_a_reply_reaches_the_process_that_asked(connection: Connection, other: Connection, t: str) -> None:
    """As of remote control: an exchange that is not durable, whose binding the sender does not know."""
    exchange = Exchange(t, type="direct", durable=False)
    mine = Queue(f"{t}-mine", exchange, routing_key="me", auto_delete=True, durable=False)
    taking = Taking(connection, mine)
    for key in ("somebody", "me"):
        Producer(other).publish(key, exchange=exchange, routing_key=key, declare=[exchange])
    assert taking.drain(1) == ["me"]
    taking.get_nothing()
    taking.close()


def test_events_reach_a_monitor_by_their_patterns(connection: Connection, other: Connection, t: str) -> None:
    exchange = Exchange(t, type="topic")
    taking = Taking(connection, Queue(f"{t}-mon", exchange, routing_key="task.#", auto_delete=True, durable=False))
    for key in ("worker.heartbeat", "task.sent"):
        Producer(other).publish(key, exchange=exchange, routing_key=key, declare=[exchange])
    assert taking.drain(1) == ["task.sent"]
    taking.close()


def test_names_that_a_topic_cannot_have(connection: Connection, bus: mq.Bus, t: str) -> None:
    publish(connection, work_queue(f"{t}@host"), "direct")
    assert any(topic["name"] == f"{t}_40_host" for topic in bus.admin.topics())
    taking = Taking(connection, work_queue(f"{t}@host"))
    assert taking.drain(1) == ["direct"]
    taking.messages[0].ack()
    taking.close()


def test_a_repeated_publish_makes_no_copy(connection: Connection, bus: mq.Bus, t: str) -> None:
    """kombu publishes again, with the same properties, when it does not know what came of it. An ETA is in the future
    each time, and its delay another."""
    channel, properties = connection.channel(), {"delivery_info": {}}
    eta = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    for _ in range(3):
        message = channel.prepare_message("once", headers={"eta": eta}, properties=properties)
        channel.basic_publish(message, "", t)
    taking = Taking(connection, Queue(t))
    taking.consumer.channel.connection
    assert [message.body for message in taking.messages] == []
    taking.connection.drain_events(timeout=60)
    taking.get_nothing(1.5)
    taking.messages[0].ack()
    taking.close()
    assert sum(queue["end"] for queue in bus.admin.offsets(t)) == 1


def test_an_eta_is_waited_for_at_the_broker(timed_broker: TimedBroker, t: str) -> None:
    with Connection(timed_broker.url, connect_timeout=60) as connection:
        eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        publish(connection, work_queue(t), "later", headers={"eta": eta})
        taking = Taking(connection, work_queue(t))
        taking.get_nothing()
        timed_broker.clock.advance(3500)
        taking.get_nothing()
        timed_broker.clock.advance(200)
        publish(connection, work_queue(t), "wakes the broker")
        assert sorted(taking.drain(2)) == ["later", "wakes the broker"]
        taking.close()


def test_a_text_body_can_be_read_by_people(connection: Connection, bus: mq.Bus, t: str) -> None:
    publish(connection, work_queue(t), {"name": "Ä"}, headers={"task": "shop.ship", "id": "17", "retries": 0})
    publish(connection, work_queue(t), {"name": "Ä"}, serializer="pickle", compression="zlib")
    rows = bus.admin.read(t).read_all().to_pylist()
    assert json.loads(json.loads(rows[0]["body"])["body"]) == {"name": "Ä"}
    assert rows[0]["properties"] == [("task", "shop.ship"), ("id", "17")]
    taking = Taking(connection, work_queue(t))
    taking.consumer.accept = {"application/json", "application/x-python-serialize"}
    until(lambda: not connection.drain_events(timeout=60) and len(taking.messages) == 2, "both")
    assert [message.decode() for message in taking.messages if message.content_type == "application/json"]
    assert taking.messages[1].body
    taking.close()


def test_two_threads_publish_and_acknowledge(connection: Connection, shared_broker: str, bus: mq.Bus, t: str) -> None:
    queue = work_queue(t)

    def send(part: int) -> None:
        with Connection(shared_broker, connect_timeout=60) as own:
            publish(own, queue, *range(part * 100, part * 100 + 100))

    threads = [threading.Thread(target=send, args=(part,)) for part in range(2)]
    taking = Taking(connection, queue, prefetch=10)
    acked = 0
    for thread in threads:
        thread.start()
    while acked < 200:
        connection.drain_events(timeout=60)
        acks = [threading.Thread(target=message.ack) for message in taking.messages[acked:]]
        for ack in acks:
            ack.start()
        for ack in acks:
            ack.join()
        acked = len(taking.messages)
    for thread in threads:
        thread.join()
    assert sorted(message.payload for message in taking.messages) == list(range(200))
    until(lambda: states(bus, t)["acked"] == 200, "acknowledgements")
    taking.close()


def test_a_broker_that_is_away_is_an_error_of_kombu() -> None:
    with Connection(f"escrow://127.0.0.1:{free_port()}", connect_timeout=0.2) as away:
        with pytest.raises(away.connection_errors):
            away.connect()
        with pytest.raises(OperationalError, match="no broker answers"):
            away.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=0.5)


def test_the_transport_is_found_by_its_name_too(shared_broker: str, t: str) -> None:
    assert escrowmq.celery.Transport.driver_type == "escrow"
    host, port = shared_broker.removeprefix("escrow://").split(":")
    for found in (
        Connection(shared_broker, transport="escrowmq.celery:Transport", connect_timeout=60),
        Connection(host, port=int(port), transport="escrowmq.celery:Transport", connect_timeout=60),
    ):
        with found:
            publish(found, work_queue(t), "x")
            assert work_queue(t)(found.default_channel).get(no_ack=True).payload == "x"


def test_amqp_s_tls_option_is_refused(shared_broker: str) -> None:
    with Connection(shared_broker, ssl=True) as connection, pytest.raises(Misuse, match="escrows://"):
        connection.connect()


def test_secrets_of_an_address_are_not_in_the_banner_of_a_worker() -> None:
    with Connection("escrow://u:hunter2@127.0.0.1:7700?token=hunter2") as connection:
        assert connection.as_uri() == "escrow://u:***@127.0.0.1:7700?token=***"
        assert "hunter2" in connection.as_uri(include_password=True)
