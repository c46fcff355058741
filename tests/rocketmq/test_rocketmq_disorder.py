"""Requests out of order, from clients that skip steps, and floods: the status codes, and a gateway that stays up."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
from rocketmq_runs import GatewayProcess, RawClient, Start

import escrowmq as mq
from escrowmq.gateway.rocketmq.mapping import MAX_BODY
from escrowmq.gateway.rocketmq.protocol import definition, service
from escrowmq.model import TransactionId

Connect = Callable[..., RawClient]
Status = definition.Code
TX = definition.TRANSACTION


def code_of(answer: Any) -> str:
    return str(Status.Name(answer.status.code))


def settle(raw: RawClient, name: str, topic: str, message: Any) -> str:
    """Settle a message by one of the calls that take a handle; returns the code."""
    if name == "AckMessage":
        return code_of(raw.ack("cart", topic, message))
    request = getattr(service, f"{name}Request")(
        group=definition.Resource(name="cart"),
        topic=definition.Resource(name=topic),
        receipt_handle=message.system_properties.receipt_handle,
    )
    if name == "ChangeInvisibleDuration":
        request.invisible_duration.FromSeconds(30)
    return code_of(raw.call(name, request))


LOST = "INVALID_RECEIPT_HANDLE"
SETTLING = ("AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue")


@pytest.mark.parametrize("again", SETTLING)
@pytest.mark.parametrize("first", ["AckMessage", "ForwardMessageToDeadLetterQueue"])
def test_a_message_is_settled_once(raw: RawClient, bus: mq.Bus, topic: str, first: str, again: str) -> None:
    raw.send(raw.message(topic))
    (got,) = raw.receive("cart", topic)
    assert settle(raw, first, topic, got) == "OK"
    assert settle(raw, again, topic, got) == ("OK" if first == again == "AckMessage" else LOST)
    assert raw.receive("cart", topic, wait=0.0) == []
    assert len([*bus.admin.dead_letters(f"cart.{topic}")]) == (first == "ForwardMessageToDeadLetterQueue")


@pytest.mark.parametrize("name", SETTLING)
def test_a_handle_is_of_one_group(raw: RawClient, topic: str, name: str) -> None:
    raw.send(raw.message(topic))
    (got,) = raw.receive("owner", topic)
    assert settle(raw, name, topic, got) in (LOST, "CONSUMER_GROUP_NOT_FOUND")
    assert code_of(raw.ack("owner", topic, got)) == "OK"


def test_an_end_before_its_half_message_changes_nothing(raw: RawClient, topic: str) -> None:
    def prepare() -> TransactionId:
        entry = raw.send(raw.message(topic, message_type=TX)).entries[0]
        return TransactionId.parse(entry.transaction_id)

    first = prepare()
    for ahead in range(1, 20):  # ids that the broker may give next
        identity = TransactionId(first.shard, first.epoch, first.position + ahead)
        assert raw.end(topic, str(identity), definition.COMMIT) == Status.INVALID_TRANSACTION_ID
    later = prepare()
    assert raw.receive("cart", topic, wait=0.0) == []
    assert raw.end(topic, str(later), definition.ROLLBACK) == Status.OK
    assert raw.end(topic, str(first), definition.COMMIT) == Status.OK
    assert len(raw.receive("cart", topic)) == 1


def test_one_client_has_many_transactions_in_flight(raw: RawClient, topic: str) -> None:
    halves = [raw.message(topic, b"%d" % number, message_type=TX) for number in range(200)]
    open_ones = [entry.transaction_id for entry in raw.send(*halves).entries]
    ends = [definition.COMMIT if number % 2 else definition.ROLLBACK for number in range(200)]
    for transaction, end in reversed([*zip(open_ones, ends, strict=True)]):
        assert raw.end(topic, transaction, end) == Status.OK
    got: set[bytes] = set()
    while len(got) < 100:
        got |= {one.body for one in raw.receive("cart", topic, batch=200)}
    assert got == {b"%d" % number for number in range(1, 200, 2)}


def test_a_client_without_telemetry_does_everything_but_answer_check_backs(raw: RawClient, topic: str) -> None:
    assert code_of(raw.call("Heartbeat", service.HeartbeatRequest(client_type=definition.PRODUCER))) == "OK"
    half = raw.send(raw.message(topic, message_type=TX)).entries[0]
    assert raw.end(topic, half.transaction_id, definition.COMMIT) == Status.OK
    (got,) = raw.receive("cart", topic)
    assert code_of(raw.ack("cart", topic, got)) == "OK"
    for _ in range(2):
        answer = raw.call("NotifyClientTermination", service.NotifyClientTerminationRequest())
        assert code_of(answer) == "OK"
    assert code_of(raw.send(raw.message(topic))) == "OK"  # after its end


def test_settings_after_everything_else_and_again(raw: RawClient, topic: str) -> None:
    half = raw.send(raw.message(topic, message_type=TX)).entries[0]
    sending: Queue[Any] = Queue()
    stream: Iterator[Any] = raw.stub.Telemetry(iter(sending.get, None), metadata=raw.metadata)
    sending.put(service.TelemetryCommand())  # a command without content
    sending.put(service.TelemetryCommand(thread_stack_trace={"nonce": "not asked for"}))
    subscription = definition.Subscription(group=definition.Resource(name="cart"))
    sending.put(service.TelemetryCommand(settings=definition.Settings(subscription=subscription)))
    assert next(stream).settings.subscription.receive_batch_size > 0
    publishing = definition.Publishing(topics=[definition.Resource(name=topic)])
    for _ in range(3):
        settings = definition.Settings(client_type=definition.PRODUCER, publishing=publishing)
        sending.put(service.TelemetryCommand(settings=settings))
    checked = next(one for one in stream if one.HasField("recover_orphaned_transaction_command"))
    assert checked.recover_orphaned_transaction_command.transaction_id == half.transaction_id
    assert raw.end(topic, half.transaction_id, definition.COMMIT) == Status.OK
    bad = definition.Publishing(topics=[definition.Resource(name="a.b")])
    sending.put(service.TelemetryCommand(settings=definition.Settings(publishing=bad)))
    assert Status.Name([*stream][-1].status.code) == "ILLEGAL_TOPIC"  # which ends the stream, not the gateway
    sending.put(None)
    assert len(raw.receive("cart", topic)) == 1


def test_requests_above_the_limit_are_refused_until_others_end(
    start: Start, connect: Connect, tmp_path: Path, topic: str, eventually: Callable[..., Any]
) -> None:
    config = tmp_path / "few.toml"
    config.write_text("[gateway]\nmax_requests = 4\n")
    raw = connect(start("--config", str(config)).ready["rocketmq"])
    streams = [raw.telemetry(topic) for _ in range(4)]
    assert all(next(stream).HasField("settings") for stream in streams)
    with pytest.raises(grpc.RpcError) as raised:
        raw.send(raw.message(topic))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    raw.close()
    other = connect(raw.address)

    def is_served() -> bool:
        with suppress(grpc.RpcError):
            return code_of(other.send(other.message(topic))) == "OK"
        return False

    eventually(is_served)


def most_memory(gateway: GatewayProcess) -> int:
    """The largest memory (bytes) that the process had."""
    lines = Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.verify
def test_a_flood_of_hostile_messages_leaves_no_memory_behind(start: Start, connect: Connect, topic: str) -> None:
    gateway = start()
    raw = connect(gateway.ready["rocketmq"])
    bomb = zlib.compress(bytes(16 * MAX_BODY))

    def attack(number: int) -> str:
        if number % 4 == 0:
            with pytest.raises(grpc.RpcError):
                raw.send(raw.message(topic, bytes(MAX_BODY + (2 << 20))))
            return "MESSAGE_BODY_TOO_LARGE"
        return code_of(raw.send(raw.message(topic, bomb, body_encoding=definition.GZIP)))

    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(attack, range(32))} == {"MESSAGE_BODY_TOO_LARGE"}
        before = most_memory(gateway)
        assert {*threads.map(attack, range(200))} == {"MESSAGE_BODY_TOO_LARGE"}
    assert most_memory(gateway) < before + (200 << 20)  # of 600 MB and more
    assert code_of(raw.send(raw.message(topic))) == "OK"
    gateway.stop()
