"""Sending plain messages: one or many as JSON, or one as raw bytes."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Header, Query, Request, Response

from escrowmq.errors import Code, EscrowError, Rejected
from escrowmq.gateway.admission import RAW_TYPE
from escrowmq.gateway.models import MessageIn, MessagesIn, ReceiptOut, SendResult, SendResults
from escrowmq.gateway.problems import described
from escrowmq.gateway.routes import check_count, gateway_of, some_refused
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
    "requestBody": {"content": {RAW_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
    "parameters": [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": f"With a raw body: {what}",
            "schema": {"type": "string"},
        }
        for name, what in (
            ("Escrow-Key", "the key, percent-encoded UTF-8."),
            ("Escrow-Tag", "the tag, percent-encoded UTF-8."),
            ("Escrow-Delay", "seconds before which it is not visible."),
            ("Escrow-Queue", "the queue."),
            ("Escrow-Message-Id", "your id."),
            ("Escrow-Property-NAME", "a property NAME (lower case), percent-encoded UTF-8; one header each."),
        )
    ],
}


def scoped(key: str | None, request: Request, number: int) -> str | None:
    """Return the id of the ``number``-th message of a request with an Idempotency-Key."""
    return None if key is None else f"idempotency {request.url.path} {key} {number}"


def message(topic: str, given: MessageIn, identity: str | None) -> Message:
    """Return a message of the client's from one of the request's; its own id comes before that of the request."""
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

    The receipt means: durable, and visible to consumers.
    """
    gateway = gateway_of(request)
    if isinstance(body, MessageIn):
        single = message(topic, body, scoped(idempotency_key, request, 0))
        return ReceiptOut.of(await gateway.producers.send(group, single))
    check_count(request, body.messages)
    messages = [message(topic, one, scoped(idempotency_key, request, at)) for at, one in enumerate(body.messages)]
    results = [
        SendResult(problem=described(outcome))
        if isinstance(outcome, EscrowError)
        else SendResult(receipt=ReceiptOut.of(outcome))
        for outcome in await gateway.producers.send_several(group, messages)
    ]
    return SendResults(results=results, refused=some_refused(response, results))


async def send_raw(
    topic: str, request: Request, group: Group = DEFAULT_GROUP, idempotency_key: IdempotencyKey = None
) -> ReceiptOut:
    """Send the request's body as it is."""
    headers = request.headers
    properties = {
        name.removeprefix(_PROPERTY): _text(value) for name, value in headers.items() if name.startswith(_PROPERTY)
    }
    single = Message(
        topic,
        await request.body(),
        _text(headers.get("escrow-key")),
        _text(headers.get("escrow-tag")),
        properties or None,
        _number("Escrow-Delay", headers.get("escrow-delay"), float, 0.0),
        queue=_number("Escrow-Queue", headers.get("escrow-queue"), int, None),
        message_id=headers.get("escrow-message-id") or scoped(idempotency_key, request, 0),
    )
    return ReceiptOut.of(await gateway_of(request).producers.send(group, single))


def _text(value: str | None) -> Any:
    """Return a header's text: percent-encoded UTF-8, because headers are Latin-1."""
    if value is None:
        return None
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise Rejected(Code.BAD_REQUEST, "an Escrow-* header is not percent-encoded UTF-8") from None


def _number(name: str, value: str | None, kind: type, default: Any) -> Any:
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        raise Rejected(Code.BAD_REQUEST, f"{name}: {value!r:.50} is not a number") from None
