"""The Python client, as clients/README.md describes."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

endpoint, topic, group, check = sys.argv[1:5]
printing = threading.Lock()
RESOLUTIONS = {"commit": TransactionResolution.COMMIT, "rollback": TransactionResolution.ROLLBACK}


def show(**answer: Any) -> None:
    with printing:
        print(json.dumps(answer), flush=True)


class Checker(TransactionChecker):
    def check(self, message: Any) -> Any:
        show(check=message.message_id)
        return RESOLUTIONS.get(check, TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED)


def message_of(request: dict[str, Any]) -> Message:
    message = Message()
    message.topic, message.body = topic, request["body"].encode()
    if "tag" in request:
        message.tag = request["tag"]
    for key in request.get("keys", ()):
        message.keys = key  # adds it
    for name, value in request.get("properties", {}).items():
        message.add_property(name, value)
    if "group" in request:
        message.message_group = request["group"]
    if "delay" in request:
        message.delivery_timestamp = int(time.time() + request["delay"])
    return message


def fields_of(message: Any) -> dict[str, Any]:
    return {
        "id": message.message_id,
        "body": message.body.decode(),
        "keys": sorted(message.keys),
        "tag": message.tag,
        "properties": dict(message.properties),
        "group": message.message_group,
        "attempt": message.delivery_attempt,
    }


class Listener(MessageListener):
    def __init__(self, failures: int) -> None:
        self.failures = failures

    def consume(self, message: Any) -> Any:
        show(pushed=fields_of(message))
        return ConsumeResult.FAILURE if message.delivery_attempt <= self.failures else ConsumeResult.SUCCESS


def push(request: dict[str, Any]) -> PushConsumer:
    listener = Listener(request["failures"])
    made = PushConsumer(configuration, request["group"], listener, {topic: FilterExpression("*")})
    made.startup()
    return made


configuration = ClientConfiguration(endpoint, Credentials(), request_timeout=60)
producer = Producer(configuration, (topic,), checker=Checker())
producer.startup()
consumer = None
if group:
    consumer = SimpleConsumer(configuration, group, {topic: FilterExpression("*")}, 5)
    consumer.startup()
show(ready=True)
transaction: Any = None
received: list[Any] = []
pushing: list[PushConsumer] = []
for line in sys.stdin:
    request = json.loads(line)
    try:
        match request["do"]:
            case "send":
                receipt = producer.send(message_of(request))
                show(id=receipt.message_id, handle=receipt.recall_handle)
            case "recall":
                show(id=producer.recall_message(topic, request["handle"]))
            case "push":
                pushing.append(push(request))
                show(ok=True)
            case "half":
                transaction = producer.begin_transaction()
                show(id=producer.send(message_of(request), transaction).message_id)
            case "commit" | "rollback":
                getattr(transaction, request["do"])()
                show(ok=True)
            case "receive":
                assert consumer is not None
                received = consumer.receive(request["max"], request["invisible"])
                show(messages=[fields_of(one) for one in received])
            case "ack":
                assert consumer is not None
                for one in received:
                    consumer.ack(one)
                show(ok=True)
            case "stop":
                producer.shutdown()
                for one in [*pushing, *filter(None, [consumer])]:
                    one.shutdown()
                show(ok=True)
                break
    except Exception as problem:
        show(error=str(problem))
