"""Answers to a receive that a client does not read: their messages go to others, although the leases last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rocketmq_runs import RawClient

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.rocketmq import service as service_module
from escrowmq.gateway.rocketmq.protocol import definition, service
from escrowmq.gateway.rocketmq.server import RocketmqOptions, beside

pytestmark = pytest.mark.verify
COUNT, BODY = 16, 1 << 20
LEASE = 3600


def open_receive(raw: RawClient, topic: str, *, renew: bool) -> Any:
    """Receive everything under a long lease; returns the call with its status read, and no message."""
    request = service.ReceiveMessageRequest(
        group=definition.Resource(name="cart"),
        message_queue=definition.MessageQueue(topic=definition.Resource(name=topic)),
        batch_size=32,
        auto_renew=renew,
    )
    request.invisible_duration.FromSeconds(LEASE)
    request.long_polling_timeout.FromSeconds(20)
    call = raw.stub.ReceiveMessage(request, metadata=raw.metadata)
    assert next(call).status.code == definition.OK
    return call


def count(bus: mq.Bus, topic: str, name: str) -> int:
    """A count of the group, over its queues."""
    (group,) = [one for one in bus.admin.groups() if one["name"] == f"cart.{topic}"]
    return sum(queue[name] for queue in group["queues"])


@pytest.mark.parametrize("way", ["unread", "cancelled"])
def test_messages_that_a_client_does_not_read_are_given_back(
    way: str,
    broker: str,
    bus: mq.Bus,
    topic: str,
    tmp_path: Path,
    connect: Callable[..., RawClient],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    monkeypatch.setattr(service_module, "UNREAD_SECONDS", 0.5 if way == "unread" else 1e6)
    options = RocketmqOptions(listen="127.0.0.1:0", second="127.0.0.1:0", state=tmp_path / "state")
    with beside(lambda token: links(broker, {}), options, settings=GatewaySettings()) as served:
        silent, other = connect(served["rocketmq"]), connect(served["rocketmq"])
        for number in range(COUNT):
            silent.send(silent.message(topic, bytes([number]) * BODY, keys=["same"]))
        call = open_receive(silent, topic, renew=way == "unread")
        given = count(bus, topic, "next")
        assert given > COUNT // 2
        if way == "cancelled":
            call.cancel()
        eventually(lambda: count(bus, topic, "leased") < given, 120.0)
        rest = COUNT - count(bus, topic, "leased")
        got: list[Any] = []
        while len(got) < rest:
            got += other.receive("cart", topic)
        assert {one.system_properties.delivery_attempt for one in got} == {1}
        assert len({one.body[0] for one in got}) == len(got)
        if way == "unread":  # the answer ends orderly for a client that goes on reading
            assert [*call][-1].HasField("delivery_timestamp")
