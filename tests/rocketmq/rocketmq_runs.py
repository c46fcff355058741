"""RocketMQ gateways as processes, and a raw client of the protocol."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import grpc

from escrowmq.gateway.rocketmq.protocol import definition, service, service_grpc
from escrowmq_lab.servers.process import free_port
from forked import Forked

QUICK: dict[str, Any] = {
    "transaction_timeout": 0.1,
    "check_interval": 0.1,
    "check_max": 10_000,
    "retry_backoff": 0.02,
    "lease_seconds": 30.0,
}
"""Settings under which check-back and redelivery come to pass within a test."""
PATIENCE = 90.0
"""Seconds after which something that should happen has surely not happened."""


class GatewayProcess:
    """``escrowmq rocketmq`` as a process, on ports that no connection gets while it is away between two starts."""

    def __init__(self, url: str, words: tuple[str, ...], listen: str | None = None, second: str | None = None):
        listen, second = (given or f"127.0.0.1:{free_port()}" for given in (listen, second))
        command = [sys.executable, "-m", "escrowmq", "rocketmq", "--url", url, "--listen", listen, "--second", second]
        self.process = Forked([*command, *words, "--json"], stdout=-1, stderr=-1, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready: dict[str, Any] = json.loads(line)

    def stop(self) -> str:
        """Stop it cleanly. Returns what it logged."""
        self.process.terminate()
        _, logged = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, logged
        assert "Traceback" not in logged, logged
        return str(logged)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., GatewayProcess]


class RawClient:
    """A client that makes single calls, with any content."""

    def __init__(self, address: str, client: str | None = None, metadata: tuple[tuple[str, str], ...] = ()):
        self.address = address
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self.stub = service_grpc.MessagingServiceStub(self.channel)
        self.client = client or f"raw@{uuid.uuid4().hex}"
        self.metadata = (("x-mq-client-id", self.client), *metadata)
        self._streams: list[Queue[Any]] = []

    def call(self, name: str, request: Any) -> Any:
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=PATIENCE)

    def message(self, topic: str, body: bytes = b"body", **system: Any) -> Any:
        properties = system.pop("properties", {})
        system.setdefault("message_id", "01" + uuid.uuid4().hex.upper())
        system.setdefault("message_type", definition.NORMAL)
        return definition.Message(
            topic=definition.Resource(name=topic),
            body=body,
            user_properties=properties,
            system_properties=definition.SystemProperties(**system),
        )

    def send(self, *messages: Any) -> Any:
        return self.call("SendMessage", service.SendMessageRequest(messages=messages))

    def end(self, topic: str, transaction: str, resolution: int) -> int:
        request = service.EndTransactionRequest(
            topic=definition.Resource(name=topic),
            transaction_id=transaction,
            resolution=resolution,
            source=definition.SOURCE_CLIENT,
        )
        return int(self.call("EndTransaction", request).status.code)

    def receive(self, group: str, topic: str, wait: float | None = None, **more: Any) -> list[Any]:
        """Return the messages of one receive; asserts the order of the stream. Without ``wait`` it is repeated while
        there are no messages, for :data:`PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self._receive(group, topic, 20.0 if wait is None else wait, **more)
            is_empty = not found and self.status.code == definition.MESSAGE_NOT_FOUND
            if wait is not None or not is_empty or time.monotonic() > deadline:
                return found

    def _receive(self, group: str, topic: str, wait: float, invisible: float = 600.0, **more: Any) -> list[Any]:
        request = service.ReceiveMessageRequest(
            group=definition.Resource(name=group),
            message_queue=definition.MessageQueue(topic=definition.Resource(name=topic)),
            filter_expression=more.pop("filter", definition.FilterExpression(type=definition.TAG, expression="*")),
            batch_size=more.pop("batch", 32),
        )
        request.invisible_duration.FromMilliseconds(round(invisible * 1000))
        request.long_polling_timeout.FromMilliseconds(round(wait * 1000))
        for name, value in more.items():
            setattr(request, name, value)
        answers = list(self.call("ReceiveMessage", request))
        kinds = [one.WhichOneof("content") for one in answers]
        assert kinds == ["status", *["message"] * (len(answers) - 2), "delivery_timestamp"]
        self.status = answers[0].status
        return [one.message for one in answers[1:-1]]

    def ack(self, group: str, topic: str, *messages: Any) -> Any:
        entries = [
            service.AckMessageEntry(
                message_id=one.system_properties.message_id, receipt_handle=one.system_properties.receipt_handle
            )
            for one in messages
        ]
        request = service.AckMessageRequest(
            group=definition.Resource(name=group), topic=definition.Resource(name=topic), entries=entries
        )
        return self.call("AckMessage", request)

    def telemetry(self, *topics: str) -> Iterator[Any]:
        """Open a stream and send the settings of a producer; yields the commands of the server."""
        sending: Queue[Any] = Queue()
        self._streams.append(sending)
        publishing = definition.Publishing(topics=[definition.Resource(name=topic) for topic in topics])
        settings = definition.Settings(client_type=definition.PRODUCER, publishing=publishing)
        sending.put(service.TelemetryCommand(settings=settings))
        answers: Iterator[Any] = self.stub.Telemetry(iter(sending.get, None), metadata=self.metadata)
        return answers

    def close(self) -> None:
        for sending in self._streams:
            sending.put(None)
        self.channel.close()
