"""Requests to all of several brokers, and the view of one message by its id or its key."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from escrowmq.client.links.answers import away
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, Corrupt, Misuse, Rejected
from escrowmq.message.names import check_name
from escrowmq.model import StoredMessage, TransactionId, message_id
from escrowmq.wire.actions.messages import VIEW, FoundMessage

T = TypeVar("T")
_SAME = {"key", "tag", "properties", "state", "visible", "queue", "offset", "position", "damaged"}
_SAME |= {"born_us", "stored_us", "visible_us"}


def call_each(
    router: Router, call: Callable[[int], T], timeout: float, *unknown: Code
) -> tuple[dict[int, T | None], list[Missing]]:
    """Call ``call`` with the number of each broker. Returns the results of the reachable ones by number, and the
    missing brokers. The result of a broker that rejects the call with a code of ``unknown`` is None. If all do, that is
    raised; BROKER_AWAY if one is missing, because it may know. Waits at most ``timeout`` seconds for all together."""

    def attempt(number: int) -> T | Rejected:
        try:
            return call(number)
        except Rejected as problem:
            if problem.code not in unknown:
                raise
            return problem

    answers = router.every(attempt, timeout)
    rejected = [answer for answer in answers.values if isinstance(answer, Rejected)]
    if rejected and len(rejected) == len(answers.found):  # but a missing broker may have it
        raise away(answers.missing, rejected[-1].message) if answers.missing else rejected[-1]
    return {number: None if isinstance(one, Rejected) else one for number, one in answers.found}, answers.missing


def view_message(
    router: Router, topic: str, id_or_key: str | bytes | uuid.UUID, timeout: float
) -> StoredMessage | None:
    """See :meth:`escrowmq.Bus.view_message`. Asks all brokers: a message of a transaction is where the transaction
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
    found = [(answer, number) for number, answer in answers.found if answer and not isinstance(answer, Corrupt)]
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
    same: dict[str, Any] = {name: found[name] for name in _SAME}  # type: ignore[literal-required]
    return StoredMessage(
        topic=topic,
        body=None if body is None else base64.b64decode(body),
        message_id=None if identity is None else bytes.fromhex(identity),
        transaction_id=None if transaction is None else TransactionId.parse(transaction),
        broker=broker,
        **same,
    )
