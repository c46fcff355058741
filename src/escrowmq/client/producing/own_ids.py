"""Transactions and delayed messages by the id that their producer chose: ``producer.commit("order-17")``."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress

from escrowmq.client.links.answers import away
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.model import TransactionId
from escrowmq.model import message_id as id_of
from escrowmq.wire.actions import messages, transactions

AnyTransactionId = TransactionId | str | bytes
UNDECIDED = ("open", "parked")
MOST_FOUND = 100
"""Maximum number of messages with one id: it is unique unless brokers were restored or the id was used again."""


def is_transaction_id(text: str) -> bool:
    """Return whether a text is the printed form of a transaction id; any other text may be a message id."""
    with suppress(Misuse):
        return bool(TransactionId.parse(text))
    return False


def transaction_of_message(router: Router, message_id: str, group: str | None, timeout: float) -> TransactionId:
    """Find the transaction of the half message with an id, within a producer group (None: any). Blocks.

    Prefers undecided transactions. Raises Rejected(UNKNOWN_TRANSACTION) if there is none, Misuse(BAD_ARGUMENT) that
    names them if there are several.
    """
    deadline = time.monotonic() + timeout
    lookup = messages.LOOKUP({"message_id": message_id, "limit": MOST_FOUND})
    answers = router.every(lambda number: router.ask(number, lookup, deadline), timeout)
    found: dict[str, str] = {}  # state by transaction
    for number, answer in answers.found:
        for message in answer["messages"]:
            identity = message["transaction"]
            if identity is None or identity in found:
                continue
            shown = router.ask(number, transactions.SHOW({"id": identity}), deadline)
            if group is None or shown["group"] == group:
                found[identity] = shown["state"]
    fitting = [one for one, state in found.items() if state in UNDECIDED] or list(found)
    whose = f"producer group {group}" if group is not None else "any producer group"
    if not fitting:
        hint = "ids of transactions look like 9f3a01c2-3-2a; `escrowmq lookup` shows what there is of a message id"
        raise Rejected(Code.UNKNOWN_TRANSACTION, f"no half message of {whose} has the id {message_id!r}", hint)
    if len(fitting) > 1:
        text = f"{message_id!r} is the id of messages of {len(fitting)} transactions of {whose}"
        raise Misuse(Code.BAD_ARGUMENT, f"{text}: {', '.join(sorted(fitting))}", "name one of these transactions")
    return TransactionId.parse(fitting[0])


def recall_message(router: Router, topic: str, message_id: str | bytes | uuid.UUID, timeout: float) -> bool:
    """See :meth:`Producer.recall`. Blocks. Asks all brokers, because the receipt of a message does not name its own."""
    deadline = time.monotonic() + timeout
    call = messages.RECALL({"topic": topic, "message_id": id_of(message_id).hex()})

    def ask(number: int) -> bool | Rejected:
        try:
            return not router.ask(number, call, deadline, longest=timeout)["already"]
        except Rejected as problem:
            if problem.code not in (Code.NOT_FOUND, Code.UNKNOWN_TOPIC):
                raise
            return problem

    answers = router.every(ask, timeout)
    done = [one for one in answers.values if not isinstance(one, Rejected)]
    if done:
        return any(done)
    if answers.missing:
        raise away(answers.missing, f"the delayed message {message_id!r} is at no broker that answers")
    raise next(one for one in answers.values if isinstance(one, Rejected))
