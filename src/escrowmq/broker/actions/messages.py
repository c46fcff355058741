"""Messages, looked up by id or key, and recalled by id."""

from __future__ import annotations

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.reads.lookups import find_messages, plain_positions, view_message
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import Recall
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


@answers(messages.RECALL)
def _recall(engine: Engine, request: messages.Recall) -> messages.Recalled:
    """Recall a delayed message by its id, before it becomes visible. ``already`` in the answer: it was recalled before.
    Raises Rejected(NOT_FOUND) if no message of this id waits for its time."""
    positions = plain_positions(engine, request["topic"], message_id(request["message_id"]))
    if engine.submit(Recall(request["topic"], positions)).result():
        return {"already": False}
    due_us = engine.log.salvage(positions, ["visible_us"])[0].column("visible_us").to_pylist()
    if any(one is not None and one > engine.clock.now_us() for one in due_us):
        return {"already": True}
    raise error(Code.NOT_FOUND, "no message of this id waits for its time" + (": it became visible" if due_us else ""))


@answers(messages.VIEW)
def _view(engine: Readable, request: messages.View) -> messages.Viewed:
    topic, text = request["topic"], request["id_or_key"]
    return {"message": view_message(engine, topic, message_id(text), text)}
