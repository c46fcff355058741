"""HTTP routes to send plain messages: one or many as JSON, or one as raw bytes."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Header, Query, Request, Response

from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.admission import EVENT_TYPE, RAW_TYPE, is_event
from escrowmq.gateway.models import MessageIn, MessagesIn, ReceiptOut, SendResult, SendResults
from escrowmq.gateway.problems import to_problem
from escrowmq.gateway.routes import check_count, count_refused, gateway_of
from escrowmq.model import Message

router = APIRouter(tags=["messages"])

DEFAULT_GROUP = "gateway"
Group = Annotated[str, Query(description="The producer group; not one of transactional messages.")]
IdempotencyKey = Annotated[
    str | None,
    Header(max_length=255, description="Names this request: repeated under the same key it makes nothing twice."),
]

_PROPERTY = "escrow-property-"
_RAW = {
    "requestBody": {
        "content": {
            RAW_TYPE: {"schema": {"type": "string", "format": "binary"}},
            EVENT_TYPE: {"schema": {"type": "object", "description": "A CloudEvent (docs/cloudevents.md)."}},
        }
    },
    "parameters": [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": f"With a raw body: {text}",
            "schema": {"type": "string"},
        }
        for name, text in (
            ("Escrow-Key", "the key, percent-encoded UTF-8."),
            ("Escrow-Tag", "the tag, percent-encoded UTF-8."),
            ("Escrow-Delay", "seconds before which it is not visible."),
            ("Escrow-Queue", "the queue."),
            ("Escrow-Message-Id", "your id."),
            ("Escrow-Property-NAME", "a property NAME (lower case), percent-encoded UTF-8; one header each."),
        )
    ],
}


def idempotent_id(key: str | None, request: Request, number: int) -> str | None:
    """Return the id of the ``number``-th message of a request with an Idempotency-Key."""
    return None if key is None else f"idempotency {request.url.path} {key} {number}"


def message(topic: str, given: MessageIn, identity: str | None) -> Message:
    """Convert a message of a request to the client's; its own id takes precedence over the request's."""
    return Message(
        topic,
        given.content,
        given.key,
        given.tag,
        given.properties,
        given.delay,
        getattr(given, "check_immunity", None),
        given.queue,
        given.message_id or identity,
    )


@router.post("/topics/{topic}/messages", openapi_extra=_RAW, response_model_exclude_none=False)
async def send(
    topic: str,
    request: Request,
    response: Response,
    body: MessageIn | MessagesIn,
    group: Group = DEFAULT_GROUP,
    idempotency_key: IdempotencyKey = None,
) -> ReceiptOut | SendResults:
    """Send one message, or several (``messages``), or raw bytes (application/octet-stream) with Escrow-* headers.

    A receipt means that the message is durable and visible to consumers.
    """
    gateway = gateway_of(request)
    if isinstance(body, MessageIn):
        single = message(topic, body, idempotent_id(idempotency_key, request, 0))
        return ReceiptOut.of(await gateway.producers.send(group, single))
    check_count(request, body.messages)
    messages = [
        message(topic, one, idempotent_id(idempotency_key, request, at)) for at, one in enumerate(body.messages)
    ]
    results = [
        SendResult(problem=to_problem(outcome))
        if isinstance(outcome, EscrowError)
        else SendResult(receipt=ReceiptOut.of(outcome))
        for outcome in await gateway.producers.send_several(group, messages)
    ]
    return SendResults(results=results, refused=count_refused(response, results))


async def send_raw(
    topic: str, request: Request, group: Group = DEFAULT_GROUP, idempotency_key: IdempotencyKey = None
) -> ReceiptOut:
    """Send the request's body unchanged, or a CloudEvent."""
    headers = request.headers
    body = await request.body()
    options: dict[str, Any] = {
        "tag": _decode_text(headers.get("escrow-tag")),
        "delay": _parse_number("Escrow-Delay", headers.get("escrow-delay"), float, 0.0),
        "queue": _parse_number("Escrow-Queue", headers.get("escrow-queue"), int, None),
    }
    if is_event(headers):
        from escrowmq import cloudevents

        single = cloudevents.to_message(topic, cloudevents.from_http(headers, body), **options)
    else:
        properties = {
            name.removeprefix(_PROPERTY): _decode_text(value)
            for name, value in headers.items()
            if name.startswith(_PROPERTY)
        }
        identity = headers.get("escrow-message-id") or idempotent_id(idempotency_key, request, 0)
        key = _decode_text(headers.get("escrow-key"))
        single = Message(topic, body, key, properties=properties or None, message_id=identity, **options)
    return ReceiptOut.of(await gateway_of(request).producers.send(group, single))


def _decode_text(value: str | None) -> Any:
    """Decode a header's text: percent-encoded UTF-8, because headers are Latin-1."""
    if value is None:
        return None
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise Rejected(Code.BAD_REQUEST, "an Escrow-* header is not percent-encoded UTF-8") from None


def _parse_number(name: str, value: str | None, kind: type, default: Any) -> Any:
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        raise Rejected(Code.BAD_REQUEST, f"{name}: {value!r:.50} is not a number") from None
