"""Looks at one message by its id or its key, at whichever of several brokers it is."""

from __future__ import annotations

import base64
import time
import uuid

from escrowmq.client.links.answers import away
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, Corrupt, Misuse
from escrowmq.message.names import check_name
from escrowmq.model import StoredMessage, TransactionId, message_id
from escrowmq.wire.actions.messages import VIEW, FoundMessage


def view_message(
    router: Router, topic: str, id_or_key: str | bytes | uuid.UUID, timeout: float
) -> StoredMessage | None:
    """See :meth:`escrowmq.Bus.view_message`. All brokers are asked: one of a transaction lies where the transaction
    began, whatever its key."""
    check_name(topic, Code.BAD_TOPIC_NAME)
    text = id_or_key if isinstance(id_or_key, str) else message_id(id_or_key).hex()
    if not text:
        raise Misuse(Code.BAD_ARGUMENT, "view a message by its id or its key, not by nothing")
    call = VIEW({"topic": topic, "id_or_key": text})
    deadline = time.monotonic() + timeout

    def ask(number: int) -> FoundMessage | Corrupt | None:
        try:
            return router.ask(number, call, deadline, longest=timeout)["message"]
        except Corrupt as problem:  # it may be at another broker
            return problem

    answers = router.every(ask, timeout)
    found = [
        (answer, number) for number, answer in answers.found if answer is not None and not isinstance(answer, Corrupt)
    ]
    if found:
        answer, number = max(found, key=lambda one: one[0]["stored_us"])
        return _make_stored(topic, answer, router.links[number].address)
    for _, one in answers.found:
        if isinstance(one, Corrupt):
            raise one
    if answers.missing:
        raise away(answers.missing, f"no message of {topic} with that id or key is at a broker that answers")
    return None


def _make_stored(topic: str, found: FoundMessage, broker: str) -> StoredMessage:
    body, identity, transaction = found["body_base64"], found["message_id"], found["transaction"]
    return StoredMessage(
        topic=topic,
        body=None if body is None else base64.b64decode(body),
        key=found["key"],
        tag=found["tag"],
        properties=found["properties"],
        message_id=None if identity is None else bytes.fromhex(identity),
        state=found["state"],
        transaction_id=None if transaction is None else TransactionId.parse(transaction),
        visible=found["visible"],
        queue=found["queue"],
        offset=found["offset"],
        position=found["position"],
        born_us=found["born_us"],
        stored_us=found["stored_us"],
        visible_us=found["visible_us"],
        broker=broker,
        damaged=found["damaged"],
    )
