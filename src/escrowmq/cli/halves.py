"""``escrowmq prepare``, ``commit`` and ``rollback``: half messages and decisions, sent as a producer sends them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Option

from escrowmq.cli.options import DEFAULT_URL, PATIENCE, Url, bus_at, pairs
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.errors import Misuse
from escrowmq.model import Outcome, TransactionId

GROUP = "command-line-transactions"
"""The default producer group; not that of ``escrowmq send``, because a group has plain messages or transactions."""

Json = Annotated[bool, Option("--json", help="One JSON object, for scripts.")]
Id = Annotated[str, Argument(metavar="TRANSACTION", help="The transaction's id, or your own id (--id) of its message.")]
Group = Annotated[
    str | None, Option("--group", "-g", help=f"The producer group; else that of the transaction, or {GROUP}.")
]


@dataclass
class _Half:
    """A half message."""

    body: str = Argument("-", help="The body; - or nothing: standard input.")
    key: str | None = Option(None, "--key", "-k", help="Same key queue, in order.")
    tag: str | None = Option(None, "--tag", "-t", help="What consumers filter by.")
    properties: list[str] | None = Option(None, "--property", "-p", metavar="NAME=VALUE", help="May be given again.")
    message_id: str | None = Option(
        None, "--id", "--message-id", help="Your message id: sent again, it makes no second message."
    )

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``prepare``. Raises Misuse(BAD_ARGUMENT)."""
        body = sys.stdin.buffer.read() if self.body == "-" else self.body.encode(errors="surrogateescape")
        properties = pairs(self.properties, "--property") or None
        return {"body": body, "key": self.key, "tag": self.tag, "properties": properties, "message_id": self.message_id}


def prepare(
    half: _Half,
    topic: str = Argument(..., help="The topic."),
    group: str = Option(GROUP, "--group", "-g", help="The producer group, whose programs answer check-backs."),
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Send a half message: durable, and invisible to consumers until its transaction is committed.

    Without a decision the broker asks the connected programs of the producer group (check-back). If all checks are
    unanswered, or after half_retention (72 h) without such a program, it parks the transaction: invisible, listed, and
    open to a decision. Nothing is dropped.
    """
    options = half.options()
    with bus_at(url, make=True) as bus, bus.producer(group, unasked=True, timeout=PATIENCE) as producer:
        receipt = producer.prepare(topic, **options)
    transaction = str(receipt.transaction_id)
    if json:
        return print_json_line({"transaction": transaction, "message_id": receipt.message_id.hex(), "topic": topic})
    flags = "" if url == DEFAULT_URL else f" --url {quote(url)}"
    print(transaction)
    notice(
        "The message is durable. Consumers of this topic do not receive it until you decide:\n"
        f"  escrowmq commit {transaction}{flags}\n"
        f"  escrowmq rollback {transaction}{flags}\n"
        f"Without a decision the broker asks the programs of producer group {group} (check-back);\n"
        "if none of them decides, the transaction is parked: still invisible, and open to your decision."
    )


def commit(transaction: Id, group: Group = None, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Commit a transaction: consumers receive its messages.

    As its producer does: nothing is recorded. `escrowmq transactions commit` is the recorded operator action, for many.
    """
    _decide(transaction, Outcome.COMMIT, group, url, json)


def rollback(transaction: Id, group: Group = None, url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Roll back a transaction: nobody ever receives its messages.

    As its producer does: nothing is recorded. `escrowmq transactions rollback` is the recorded operator action.
    """
    _decide(transaction, Outcome.ROLLBACK, group, url, json)


def _decide(transaction: str, outcome: Outcome, group: str | None, url: str, json: bool) -> None:
    with bus_at(url) as bus:
        found: Any = bus.admin.transaction(transaction) if group is None and _is_transaction_id(transaction) else {}
        with bus.producer(group or found.get("group") or GROUP, unasked=True, timeout=PATIENCE) as producer:
            decide = producer.commit if outcome is Outcome.COMMIT else producer.rollback
            result = decide(transaction)
    if json:
        print_json_line({"transaction": transaction, "result": result.name})
    else:
        notice(f"{transaction}  {result.name}")


def _is_transaction_id(text: str) -> bool:
    try:
        TransactionId.parse(text)
    except Misuse:
        return False
    return True
