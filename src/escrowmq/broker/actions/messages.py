"""Messages, looked up by id or key."""

from __future__ import annotations

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.reads.lookups import find_messages, view_message
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.model import message_id
from escrowmq.wire.actions import messages

FOUND = 100
"""Messages that a look-up gives unless it asks for more."""


@answers(messages.LOOKUP)
def _lookup(engine: Readable, request: messages.Lookup) -> messages.Found:
    text, key = request.get("message_id"), request.get("key")
    if text is None and key is None:
        raise error(Code.BAD_REQUEST, "'message_id' or 'key' is missing")
    identity = None if text is None else message_id(text)
    return find_messages(engine, identity, key, request.get("topic"), request.get("limit", FOUND))


@answers(messages.VIEW)
def _view(engine: Readable, request: messages.View) -> messages.Viewed:
    topic, text = request["topic"], request["id_or_key"]
    return {"message": view_message(engine, topic, message_id(text), text)}
