"""CloudEvents as messages, in the binary mode of their Kafka binding (the extra ``cloudevents``).

    outbox.send_tx(session, cloudevents.to_message("orders", event))
    event = cloudevents.from_message(message)

Attributes are properties ``ce_NAME``, ``datacontenttype`` is the property ``content-type``, the data is the body.
``id`` is the message id, ``partitionkey`` the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from escrowmq.errors import Code, Misuse
from escrowmq.model import Message
from escrowmq.platform.extras import missing_package

try:
    from cloudevents.core.base import BaseCloudEvent
    from cloudevents.core.bindings import http, kafka
    from cloudevents.core.bindings.common import get_event_factory_for_version
    from cloudevents.core.exceptions import BaseCloudEventException
    from cloudevents.core.formats.json import JSONFormat
except ModuleNotFoundError as problem:
    raise missing_package("cloudevents", "escrowmq.cloudevents") from problem

__all__ = ["EVENT_TYPE", "from_http", "from_message", "to_json", "to_message"]

EVENT_TYPE = JSONFormat.CONTENT_TYPE
"""The content type of one event in the structured mode."""
CONTENT_TYPE = "content-type"
"""The property with the content type of a message's body, of an event or not."""


class Received(Protocol):
    """A message that was received or read."""

    @property
    def topic(self) -> str: ...
    @property
    def message_id(self) -> bytes: ...
    @property
    def key(self) -> str | None: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def born(self) -> datetime: ...


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Format(JSONFormat):
    """JSON with data of any type. Bytes are data that is encoded already, or that is not the JSON that it claims."""

    def read_data(self, body: bytes, datacontenttype: str | None) -> Any:
        if body and self.JSON_CONTENT_TYPE_PATTERN.match(datacontenttype or self.DEFAULT_CONTENT_TYPE):
            try:
                return json.loads(body, parse_constant=_reject_constant)
            except (ValueError, RecursionError):
                return body
        return super().read_data(body, datacontenttype)

    def write_data(self, data: Any, datacontenttype: str | None) -> bytes:
        if isinstance(data, bytearray):
            data = bytes(data)
        if data is None or isinstance(data, str | bytes):
            return super().write_data(data, datacontenttype)  # type: ignore[no-any-return,unused-ignore]
        return json.dumps(data, ensure_ascii=False).encode()


class _AsItIs(_Format):
    """Data that is not decoded."""

    def read_data(self, body: bytes, datacontenttype: str | None) -> Any:
        return body


def _event(attributes: dict[str, Any], data: Any) -> BaseCloudEvent:
    """Return an event without the current time that the package adds: a repeat would have another one."""
    has_time = "time" in attributes
    made = get_event_factory_for_version(attributes.get("specversion", "1.0"))(attributes, data)
    if not has_time:
        made.get_attributes().pop("time", None)
    return made


def to_message(topic: str, event: BaseCloudEvent, **options: Any) -> Message:
    """Return the message of an event. ``options`` are other fields of :class:`~escrowmq.Message`, such as ``delay``.

    An event whose ``id`` the topic has already is a repeat, or with other content MESSAGE_ID_TAKEN: ids are unique
    within a topic, whatever their ``source``.
    """
    made = kafka.to_binary(event, _Format())
    properties = {name: value.decode() for name, value in made.headers.items()}
    key = made.key.decode() if isinstance(made.key, bytes) else made.key
    return Message(topic, made.value, key, properties=properties, message_id=event.get_id(), **options)


def from_message(message: Received) -> BaseCloudEvent:
    """Return the event in a message; its data is decoded by its content type.

    A message that is no event becomes one: ``id`` is the message id in hexadecimal, ``source`` ``/topics/TOPIC``,
    ``type`` ``escrowmq.message``, ``time`` when the producer made it. Raises Misuse(BAD_ARGUMENT) for attributes
    that are no CloudEvent's.
    """
    properties = dict(message.properties)
    if "ce_specversion" not in properties:
        properties["ce_specversion"], properties["ce_type"] = "1.0", "escrowmq.message"
        properties["ce_id"], properties["ce_source"] = message.message_id.hex(), f"/topics/{message.topic}"
        properties["ce_time"] = message.born.isoformat()
        properties.setdefault(CONTENT_TYPE, "application/octet-stream")
    kept = {name: value.encode() for name, value in properties.items()}
    try:
        return kafka.from_binary(kafka.KafkaMessage(kept, message.key, message.body), _Format(), _event)
    except (BaseCloudEventException, ValueError, TypeError) as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"message {message.message_id.hex()} is no CloudEvent: {problem}") from problem


def from_http(headers: Mapping[str, str], body: bytes) -> BaseCloudEvent:
    """Return the event of an HTTP request, in binary mode (headers ``ce-NAME``) or structured mode (JSON).

    In binary mode the data is not decoded. Raises Misuse(BAD_ARGUMENT) for anything else.
    """
    try:
        found = http.from_http(http.HTTPMessage(dict(headers), body), _AsItIs(), _event)
    except (BaseCloudEventException, ValueError, TypeError, AttributeError, RecursionError) as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"the request is no CloudEvent: {problem}") from problem
    if isinstance(found.get_data(), str) and found.get_datacontenttype() in (None, "application/json"):
        return _event(found.get_attributes(), json.dumps(found.get_data(), ensure_ascii=False))
    return found


def to_json(event: BaseCloudEvent, **more: str | int) -> bytes:
    """Return an event in structured mode, with the extension attributes ``more``."""
    return JSONFormat().write(_event({**event.get_attributes(), **more}, event.get_data()))
