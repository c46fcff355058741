"""The service as raw calls: messages, transactions, check-backs, receipts, and what is refused."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rocketmq_runs import GatewayProcess, RawClient, Start

import escrowmq as mq
from escrowmq.gateway.rocketmq.mapping import MAX_BODY
from escrowmq.gateway.rocketmq.protocol import definition, service

Connect = Callable[..., RawClient]
Status = definition.Code
TX = definition.TRANSACTION


def code_of(answer: Any) -> str:
    return str(Status.Name(answer.status.code))


def bodies(messages: list[Any]) -> list[bytes]:
    return [one.body for one in messages]


def test_a_message_goes_out_and_in_with_all_its_fields(raw: RawClient, topic: str) -> None:
    sent = raw.message(topic, b"x" * 5000, tag="paid", keys=["k1", "k2"], properties={"a": "ä"}, born_host="here")
    answer = raw.send(sent)
    assert (code_of(answer), code_of(answer.entries[0])) == ("OK", "OK")
    assert answer.entries[0].message_id == sent.system_properties.message_id
    (got,) = raw.receive("cart", topic)
    system = got.system_properties
    assert (got.body, dict(got.user_properties)) == (sent.body, {"a": "ä"})
    assert (system.message_id, system.tag, list(system.keys)) == (answer.entries[0].message_id, "paid", ["k1", "k2"])
    assert (system.born_host, system.delivery_attempt) == ("here", 1)
    assert (system.body_digest.type, system.body_encoding) == (definition.MD5, definition.IDENTITY)
    assert code_of(raw.ack("cart", topic, got)) == "OK"
    assert raw.receive("cart", topic, wait=0.0) == []
    assert Status.Name(raw.status.code) == "MESSAGE_NOT_FOUND"


def test_fields_are_the_same_for_the_brokers_own_clients(raw: RawClient, bus: mq.Bus, topic: str) -> None:
    sent = raw.message(topic, b"one", tag="t", keys=["k"], properties={"a": "b"})
    raw.send(sent)
    (own,) = bus.consumer(f"own-{topic}", topic).receive(1, wait=60.0)
    assert (own.body, own.key, own.tag, own.properties) == (b"one", "k", "t", {"a": "b"})
    assert "01" + own.message_id.hex().upper() == sent.system_properties.message_id
    receipt = bus.producer("shop").send(topic, b"two", key="k", tag="t", properties={"c": "d"})
    first, second = sorted(raw.receive("cart", topic) + raw.receive("cart", topic, wait=0.0), key=lambda m: m.body)
    assert first.body == b"one"
    system = second.system_properties
    assert (second.body, list(system.keys), system.tag) == (b"two", ["k"], "t")
    assert dict(second.user_properties) == {"c": "d"}
    assert system.message_id == "01" + receipt.message_id.hex().upper()


def test_a_message_that_is_not_acknowledged_comes_again(raw: RawClient, topic: str) -> None:
    raw.send(raw.message(topic))
    (first,) = raw.receive("cart", topic, invisible=1.0)
    (second,) = raw.receive("cart", topic)
    assert [one.system_properties.delivery_attempt for one in (first, second)] == [1, 2]
    late = raw.ack("cart", topic, first)
    assert (code_of(late), code_of(late.entries[0])) == ("INVALID_RECEIPT_HANDLE",) * 2
    assert code_of(raw.ack("cart", topic, second)) == "OK"


def change_invisible(raw: RawClient, topic: str, got: Any, seconds: float) -> Any:
    request = service.ChangeInvisibleDurationRequest(
        group=definition.Resource(name="cart"),
        topic=definition.Resource(name=topic),
        receipt_handle=got.system_properties.receipt_handle,
    )
    request.invisible_duration.FromMilliseconds(round(seconds * 1000))
    return raw.call("ChangeInvisibleDuration", request)


@pytest.mark.parametrize("seconds", [1.0, 0.001, 0.0])
def test_the_invisible_duration_can_be_changed(raw: RawClient, topic: str, seconds: float) -> None:
    raw.send(raw.message(topic))
    (got,) = raw.receive("cart", topic, invisible=3600.0)
    began = time.monotonic()
    answer = change_invisible(raw, topic, got, seconds)
    assert code_of(answer) == "OK"
    assert answer.receipt_handle
    (again,) = raw.receive("cart", topic)
    assert again.system_properties.delivery_attempt == 2
    assert time.monotonic() - began > 0.9  # LEAST_INVISIBLE replaces a shorter duration


@pytest.mark.parametrize("seconds", [-0.001, 12 * 3600.0 + 1])
def test_an_invisible_duration_out_of_range_changes_nothing(raw: RawClient, topic: str, seconds: float) -> None:
    raw.send(raw.message(topic))
    (got,) = raw.receive("cart", topic, invisible=3600.0)
    assert code_of(change_invisible(raw, topic, got, seconds)) == "ILLEGAL_INVISIBLE_TIME"
    assert raw.receive("cart", topic, wait=1.5) == []
    assert code_of(raw.ack("cart", topic, got)) == "OK"


def test_a_consumer_gives_a_message_up(raw: RawClient, bus: mq.Bus, topic: str) -> None:
    raw.send(raw.message(topic, b"poison"))
    (got,) = raw.receive("cart", topic)
    request = service.ForwardMessageToDeadLetterQueueRequest(
        group=definition.Resource(name="cart"),
        topic=definition.Resource(name=topic),
        receipt_handle=got.system_properties.receipt_handle,
        delivery_attempt=1,
    )
    assert code_of(raw.call("ForwardMessageToDeadLetterQueue", request)) == "OK"
    (letter,) = bus.admin.dead_letters(f"cart.{topic}")
    assert "given up by its consumer after 1 attempts" in letter["cause"]
    assert raw.receive("cart", topic, wait=0.0) == []


def test_messages_of_a_group_come_in_order(raw: RawClient, topic: str) -> None:
    kind = definition.FIFO
    for number in range(6):
        group = "ab"[number % 2]
        raw.send(raw.message(topic, b"%d" % number, message_type=kind, message_group=group))
    seen: dict[str, list[bytes]] = {"a": [], "b": []}
    while sum(map(len, seen.values())) < 6:
        for one in raw.receive("fifo-cart", topic):
            assert one.system_properties.message_type == kind
            seen[one.system_properties.message_group].append(one.body)
            raw.ack("fifo-cart", topic, one)
    assert seen == {"a": [b"0", b"2", b"4"], "b": [b"1", b"3", b"5"]}


def test_a_delayed_message(raw: RawClient, topic: str) -> None:
    message = raw.message(topic, message_type=definition.DELAY)
    due = time.time() + 1.0
    message.system_properties.delivery_timestamp.FromMilliseconds(round(due * 1000))
    assert code_of(raw.send(message)) == "OK"
    found = raw.receive("cart", topic, wait=0.0) or raw.receive("cart", topic)
    assert len(found) == 1
    assert time.time() >= due - 0.01, "it came before its time"


def delayed(raw: RawClient, topic: str, seconds: float, body: bytes = b"body") -> Any:
    """Send a delayed message; returns the entry of the answer."""
    message = raw.message(topic, body, message_type=definition.DELAY)
    message.system_properties.delivery_timestamp.FromMilliseconds(round((time.time() + seconds) * 1000))
    answer = raw.send(message)
    assert code_of(answer) == "OK"
    return answer.entries[0]


def recall(raw: RawClient, topic: str, handle: str) -> Any:
    request = service.RecallMessageRequest(topic=definition.Resource(name=topic), recall_handle=handle)
    return raw.call("RecallMessage", request)


def test_a_delayed_message_is_recalled_through_any_gateway(
    connect: Connect, start: Start, bus: mq.Bus, topic: str
) -> None:
    def waiting() -> float:
        return float(bus.admin.stats()[0]["delayed_waiting"])

    first = start()
    before = waiting()
    sent = delayed(connect(first.ready["rocketmq"]), topic, 3600.0)
    assert waiting() == before + 1
    first.kill()
    raw = connect(start().ready["rocketmq"])
    for _ in range(2):
        answer = recall(raw, topic, sent.recall_handle)
        assert (code_of(answer), answer.message_id) == ("OK", sent.message_id)
        assert waiting() == before
    late = delayed(raw, topic, 0.2, b"late")
    assert bodies(raw.receive("cart", topic)) == [b"late"]
    refused = recall(raw, topic, late.recall_handle)
    assert (code_of(refused), "visible" in refused.status.message) == ("MESSAGE_NOT_FOUND", True)


def test_recalls_that_are_refused(raw: RawClient, topic: str) -> None:
    handle = delayed(raw, topic, 3600.0).recall_handle
    raw.send(raw.message(f"{topic}-other"))
    for where, given, expected in (
        (topic, "", "BAD_REQUEST"),
        (topic, "x" * 32, "BAD_REQUEST"),
        (topic, uuid.uuid4().hex, "MESSAGE_NOT_FOUND"),
        (f"{topic}-other", handle, "MESSAGE_NOT_FOUND"),
        (f"{topic}-none", handle, "TOPIC_NOT_FOUND"),
        ("a.b", handle, "ILLEGAL_TOPIC"),
    ):
        assert code_of(recall(raw, where, given)) == expected, (where, given)
    plain = raw.send(raw.message(topic)).entries[0]
    assert plain.recall_handle == ""
    assert code_of(recall(raw, topic, handle)) == "OK"


def test_tags_filter(raw: RawClient, topic: str) -> None:
    for tag in ("a", "b", "c"):
        raw.send(raw.message(topic, tag.encode(), tag=tag))
    wanted = definition.FilterExpression(type=definition.TAG, expression="a || c")
    found: list[Any] = []
    while len(found) < 2:
        found += raw.receive("cart", topic, filter=wanted)
    assert sorted(bodies(found)) == [b"a", b"c"]
    other = definition.FilterExpression(type=definition.TAG, expression="b")
    assert raw.receive("cart", topic, filter=other) == []
    assert "SUBSCRIPTION_MISMATCH" in raw.status.message


def test_compressed_bodies_are_stored_as_the_application_wrote_them(raw: RawClient, topic: str) -> None:
    packed = zlib.compress(b"z" * 100_000)
    raw.send(raw.message(topic, packed, body_encoding=definition.GZIP))
    assert bodies(raw.receive("cart", topic)) == [b"z" * 100_000]
    bomb = zlib.compress(bytes(MAX_BODY + 1))
    assert code_of(raw.send(raw.message(topic, bomb, body_encoding=definition.GZIP))) == "MESSAGE_BODY_TOO_LARGE"
    assert code_of(raw.send(raw.message(topic, packed[:50], body_encoding=definition.GZIP))) == "MESSAGE_CORRUPTED"
    assert code_of(raw.send(raw.message(topic, b"plain", body_encoding=definition.GZIP))) == "MESSAGE_CORRUPTED"


# Transactions


def prepare(raw: RawClient, topic: str, body: bytes = b"half", **system: Any) -> str:
    answer = raw.send(raw.message(topic, body, message_type=TX, **system))
    assert code_of(answer) == "OK", answer
    return str(answer.entries[0].transaction_id)


def test_commit_and_rollback_are_final_and_may_be_repeated(raw: RawClient, topic: str) -> None:
    good, bad = prepare(raw, topic, b"good"), prepare(raw, topic, b"bad")
    assert raw.receive("cart", topic, wait=0.0) == []
    for _ in range(2):
        assert raw.end(topic, good, definition.COMMIT) == Status.OK
        assert raw.end(topic, bad, definition.ROLLBACK) == Status.OK
    assert raw.end(topic, good, definition.ROLLBACK) == Status.INVALID_TRANSACTION_ID
    assert raw.end(topic, bad, definition.COMMIT) == Status.INVALID_TRANSACTION_ID
    assert bodies(raw.receive("cart", topic)) == [b"good"]
    assert raw.receive("cart", topic, wait=0.0) == []


def test_any_client_may_end_a_transaction_after_a_restart(connect: Connect, start: Start, topic: str) -> None:
    first = start()
    transaction = prepare(connect(first.ready["rocketmq"]), topic)
    first.kill()
    second = start()
    assert connect(second.ready["second"]).end(topic, transaction, definition.COMMIT) == Status.OK
    assert bodies(connect(second.ready["rocketmq"]).receive("cart", topic)) == [b"half"]
    assert second.stop() is not None


def test_a_repeated_send_is_the_same_transaction(raw: RawClient, topic: str) -> None:
    identity = "01" + uuid.uuid4().hex.upper()
    assert prepare(raw, topic, message_id=identity) == prepare(raw, topic, message_id=identity)
    plain = raw.message(topic, b"plain")
    assert code_of(raw.send(plain)) == code_of(raw.send(plain)) == "OK"
    assert bodies(raw.receive("cart", topic)) == [b"plain"]
    assert raw.receive("cart", topic, wait=0.0) == []


def commands(stream: Iterator[Any]) -> Iterator[Any]:
    """The check-backs of a stream."""
    for command in stream:
        assert command.status.code == Status.OK
        if command.HasField("recover_orphaned_transaction_command"):
            yield command.recover_orphaned_transaction_command


def answer_check(raw: RawClient, topic: str, stream: Iterator[Any], resolution: int) -> Any:
    checked = next(commands(stream))
    request = service.EndTransactionRequest(
        topic=definition.Resource(name=topic),
        transaction_id=checked.transaction_id,
        message_id=checked.message.system_properties.message_id,
        resolution=resolution,
        source=definition.SOURCE_SERVER_CHECK,
    )
    assert raw.call("EndTransaction", request).status.code == Status.OK
    return checked


def test_a_check_back_goes_to_the_sender(connect: Connect, topic: str) -> None:
    other, sender = connect(), connect()
    idle, stream = other.telemetry(topic), sender.telemetry(topic)
    assert next(idle).HasField("settings")
    assert next(stream).HasField("settings")
    transaction = prepare(sender, topic, tag="t", keys=["k"], properties={"a": "b"})
    checked = answer_check(sender, topic, stream, definition.COMMIT)
    assert checked.transaction_id == transaction
    message = checked.message
    system = message.system_properties
    assert (message.body, system.tag, list(system.keys), dict(message.user_properties)) == (
        b"half",
        "t",
        ["k"],
        {"a": "b"},
    )
    assert system.body_digest.checksum
    assert system.body_encoding == definition.IDENTITY
    assert bodies(sender.receive("cart", topic)) == [b"half"]


def test_a_check_back_goes_to_another_client_when_the_sender_is_gone(connect: Connect, topic: str) -> None:
    sender, other = connect(), connect()
    transaction = prepare(sender, topic)
    sender.close()
    stream = other.telemetry(topic)
    assert answer_check(other, topic, stream, 0).transaction_id == transaction
    assert answer_check(other, topic, stream, definition.ROLLBACK).transaction_id == transaction
    assert other.end(topic, transaction, definition.COMMIT) == Status.INVALID_TRANSACTION_ID
    assert other.receive("cart", topic, wait=0.0) == []


def test_a_due_check_waits_for_a_stream_without_counting(connect: Connect, bus: mq.Bus, topic: str) -> None:
    sender = connect()
    transaction = prepare(sender, topic)
    connect().telemetry("another-topic")
    # Ten intervals of the check-back pass, in which nobody can be asked.
    bus.producer(f"clock-{topic}").send(topic + "-clock", b"", delay=1.0)
    bus.consumer("clock", topic + "-clock").receive(1, wait=60.0)
    (shown,) = [one for one in bus.admin.transactions("open") if one["id"] == transaction]
    assert shown["checks"] == 0
    answer_check(sender, topic, sender.telemetry(topic), definition.COMMIT)
    assert bodies(sender.receive("cart", topic)) == [b"half"]


def test_settings_are_complete_for_every_client(raw: RawClient, topic: str) -> None:
    stream = raw.telemetry(topic)
    for _ in range(3):  # they are sent again, for clients that miss the first
        settings = next(stream).settings
        backoff = settings.backoff_policy.exponential_backoff
        assert settings.publishing.max_body_size == MAX_BODY
        assert backoff.initial.ToMilliseconds() > 0
        assert backoff.multiplier > 1
        assert not settings.metric.on


# Refusals


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"message_id": ""}, "ILLEGAL_MESSAGE_ID"),
        ({"body": b""}, "MESSAGE_BODY_EMPTY"),
        ({"body": bytes(MAX_BODY + 1)}, "MESSAGE_BODY_TOO_LARGE"),
        ({"tag": "a|b"}, "ILLEGAL_MESSAGE_TAG"),
        ({"keys": [" "]}, "ILLEGAL_MESSAGE_KEY"),
        ({"properties": {"rocketmq.keys": "x"}}, "ILLEGAL_MESSAGE_PROPERTY_KEY"),
        ({"properties": {"KEYS": "x"}}, "ILLEGAL_MESSAGE_PROPERTY_KEY"),
        ({"properties": {"a": "x" * 20_000}}, "MESSAGE_PROPERTIES_TOO_LARGE"),
        ({"message_type": definition.FIFO}, "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
        ({"message_type": definition.DELAY}, "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
        ({"message_group": "g"}, "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE"),
        ({"message_type": definition.FIFO, "message_group": "g" * 65}, "ILLEGAL_MESSAGE_GROUP"),
        ({"message_type": definition.PRIORITY}, "UNSUPPORTED"),
        ({"message_type": 99}, "UNSUPPORTED"),
    ],
)
def test_messages_that_are_refused(raw: RawClient, topic: str, change: dict[str, Any], expected: str) -> None:
    answer = raw.send(raw.message(topic, **change))
    assert code_of(answer) == expected, answer
    assert raw.receive("cart", topic, wait=0.0) == []


def test_names_that_are_refused(raw: RawClient) -> None:
    for name in ("", "a.b", "%sys", "x" * 200, "ä"):
        assert code_of(raw.send(raw.message(name))) == "ILLEGAL_TOPIC"
    route = service.QueryRouteRequest(topic=definition.Resource(name="t", resource_namespace="ns"))
    answer = raw.call("QueryRoute", route)
    assert code_of(answer) == "ILLEGAL_TOPIC"
    assert "namespace" in answer.status.message
    raw.receive("a.b", "topic", wait=0.0)
    assert Status.Name(raw.status.code) == "ILLEGAL_CONSUMER_GROUP"


def test_receives_that_are_refused(raw: RawClient, topic: str) -> None:
    sql = definition.FilterExpression(type=definition.SQL, expression="a > 1")
    for expected, given in {
        "ILLEGAL_FILTER_EXPRESSION": {"filter": sql},
        "ILLEGAL_INVISIBLE_TIME": {"invisible": 0.0},
        "BAD_REQUEST": {"batch": 0},
    }.items():
        assert raw.receive("cart", topic, wait=0.0, **given) == []
        assert Status.Name(raw.status.code) == expected


def test_transactions_and_handles_that_do_not_exist(raw: RawClient, topic: str) -> None:
    raw.send(raw.message(topic))
    for identity in ("", "nonsense", "00000001-1-1"):
        assert raw.end(topic, identity, definition.COMMIT) == Status.INVALID_TRANSACTION_ID
    (got,) = raw.receive("cart", topic)
    for handle in ("", "x", "00000001-1-1"):
        got.system_properties.receipt_handle = handle
        assert code_of(raw.ack("cart", topic, got)) in ("BAD_REQUEST", "INVALID_RECEIPT_HANDLE")


def test_a_call_without_a_client_id(gateway: GatewayProcess, connect: Connect, topic: str) -> None:
    nameless = connect()
    nameless.metadata = ()
    assert code_of(nameless.send(nameless.message(topic))) == "CLIENT_ID_REQUIRED"
    assert Status.Name(next(nameless.telemetry(topic)).status.code) == "CLIENT_ID_REQUIRED"


def test_the_topics_of_transactions_are_bounded(start: Start, connect: Connect, tmp_path: Path, topic: str) -> None:
    config = tmp_path / "few.toml"
    config.write_text("[gateway]\nmax_groups = 2\n")
    raw = connect(start("--config", str(config)).ready["rocketmq"])
    for number in range(2):
        prepare(raw, f"{topic}-{number}")
    assert raw.end(f"{topic}-more", "00000001-1-1", definition.COMMIT) == Status.TOO_MANY_REQUESTS
    assert code_of(raw.send(raw.message(f"{topic}-more", message_type=TX))) == "TOO_MANY_REQUESTS"
    assert prepare(raw, f"{topic}-0")


def test_calls_that_are_not_supported_say_so(raw: RawClient) -> None:
    for name in ("GetOffset", "QueryOffset", "UpdateOffset", "SyncLiteSubscription"):
        assert code_of(raw.call(name, getattr(service, f"{name}Request")())) == "NOT_IMPLEMENTED"
    (pulled,) = raw.call("PullMessage", service.PullMessageRequest())
    assert code_of(pulled) == "NOT_IMPLEMENTED"


def test_bytes_that_are_no_protocol_harm_nobody(raw: RawClient, topic: str) -> None:
    for name in ("SendMessage", "QueryRoute", "AckMessage", "EndTransaction"):
        call = raw.channel.unary_unary(f"/apache.rocketmq.v2.MessagingService/{name}")
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 100, metadata=raw.metadata, timeout=60)
    with pytest.raises(grpc.RpcError) as raised:
        raw.send(raw.message(topic, bytes(MAX_BODY + (2 << 20))))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(raw.send(raw.message(topic))) == "OK"


def test_routes_name_the_other_port_after_each_start(start: Start, connect: Connect, topic: str) -> None:
    named = []
    first = start()
    ports = {name: first.ready[name] for name in ("rocketmq", "second")}
    for _ in range(3):
        raw = connect(first.ready["rocketmq"])
        route = service.QueryRouteRequest(topic=definition.Resource(name=topic))
        route.endpoints.addresses.add(host="localhost", port=1)
        (queue,) = raw.call("QueryRoute", route).message_queues
        (address,) = queue.broker.endpoints.addresses
        assert (queue.permission, queue.broker.id, address.host) == (definition.READ_WRITE, 0, "localhost")
        named.append(f"127.0.0.1:{address.port}")
        first.stop()
        first = start(listen=ports["rocketmq"], second=ports["second"])
    assert named == [ports["rocketmq"], ports["second"], ports["rocketmq"]]
