"""A producer that records every call in a history, with the books of its local transactions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from escrowmq.client.producing.producer import Producer
from escrowmq.client.producing.results import Receipts
from escrowmq.errors import EscrowError
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Check, Message, Outcome, Receipt, TransactionId
from escrowmq_lab.history import Act, Kind, kind_of, payload, unpack
from escrowmq_lab.workloads.seam import Operation, Site, to_do

OUTCOME_NAMES = {COMMIT: "committed", ROLLBACK: "rolled_back", UNKNOWN: "unknown"}


class Writer:
    """One producer of transactional group ``group`` and one of plain messages. Check-backs are answered after ``lag``
    seconds; ``wrong``: probability of an exception or UNKNOWN as the first answer."""

    def __init__(
        self,
        site: Site,
        group: str = "shop",
        *,
        instance: str | None = None,
        timeout: float = 4.0,
        lag: float = 0.0,
        wrong: float = 0.0,
        checks: bool = True,
    ) -> None:
        self.site, self.history = site, site.history
        self.books: dict[str, Outcome] = site.kept.setdefault("books", {})
        self._lag, self._wrong = lag, wrong
        bus = site.connect()
        name = instance or site.name
        checker = self.decide if checks else None
        self.producer: Producer = bus.producer(
            group, instance=name, timeout=timeout, checker=checker, unasked=not checks
        )
        self.plain: Producer = bus.producer(f"{group}-plain", instance=name, timeout=timeout)

    def decide(self, check: Check) -> Outcome:
        """Answer a check-back from the books."""
        content, _ = unpack(check.messages[0].body)
        name = str(content.get("transaction"))
        self.history.add(self.site.name, Act.ASKED, Kind.OK, transaction=name, attempt=check.attempt)
        if self._lag:
            self.site.pause(self._lag * self.site.chance.random())
        outcome = self.books.get(name, UNKNOWN)
        if self._wrong and self.site.chance.random() < self._wrong:
            outcome = UNKNOWN
        self.history.add(self.site.name, Act.ANSWER, Kind.UNKNOWN, value=OUTCOME_NAMES[outcome], transaction=name)
        return outcome

    def send(self, value: str, topic: str, **options: Any) -> Receipt | None:
        """Send one plain message. Returns its receipt if it is certainly stored."""
        details = _recorded_facts(options)
        if "delay" in options and (now := self.site.now_us()) is not None:
            details["due_us"] = now + int(1e6 * options["delay"])
        with self.history.call(self.site.name, Act.SEND, value=value, topic=topic, **details) as call:
            body = payload(value, options.pop("size", 40), labels=_labels(options))
            receipt = self.plain.send(topic, body, **options)
            call.details |= _place(receipt)
        return receipt if call.result is Kind.OK else None

    def send_many(self, values: list[str], topic: str, keys: list[str | None]) -> None:
        """Send plain messages as one batch."""
        for value, key in zip(values, keys, strict=True):
            self.history.add(self.site.name, Act.SEND, Kind.INVOKE, value=value, topic=topic, key=key)
        tags = [None if number % 3 else f"t-{number % 2}" for number in range(len(values))]
        messages = [
            Message(topic, payload(value, 40, labels=[key, tag]), key, tag)
            for value, key, tag in zip(values, keys, tags, strict=True)
        ]
        found: list[Any]
        try:
            receipts = self.plain.send_batch(messages)
        except EscrowError as problem:
            found = [problem] * len(values)
        else:
            found = [_row(receipts, row) for row in range(len(values))]
        for value, key, one in zip(values, keys, found, strict=True):
            kind = kind_of(one) if isinstance(one, EscrowError) else Kind.OK
            more = {} if isinstance(one, EscrowError) else _place(one)
            self.history.add(self.site.name, Act.SEND, kind, value=value, topic=topic, key=key, **more)

    def prepare(
        self, value: str, transaction: str, topic: str, join: TransactionId | None = None, **options: Any
    ) -> Receipt | None:
        """Prepare one half message. Returns its receipt if it is certainly stored."""
        receipt: Receipt | None = None
        details = _recorded_facts(options)
        with self.history.call(
            self.site.name, Act.PREPARE, value=value, transaction=transaction, topic=topic, **details
        ) as call:
            content = {"transaction": transaction, "labels": _labels(options), **options.pop("content", {})}
            body = payload(value, options.pop("size", 40), **content)
            receipt = self.producer.prepare(topic, body, transaction_id=join, **options)
            call.details |= _place(receipt)
        return receipt if call.result is Kind.OK else None

    def end(self, transaction: str, identity: TransactionId, outcome: Outcome) -> Kind:
        """End a transaction. Returns the recorded result."""
        act = Act.COMMIT if outcome is COMMIT else Act.ROLLBACK
        with self.history.call(self.site.name, act, transaction=transaction) as call:
            (self.producer.commit if outcome is COMMIT else self.producer.rollback)(identity)
        return call.result

    def transact(self, operation: Operation) -> None:
        """Run a transaction with the ``messages`` (topic, key, options) of an operation, to its ``end``: "commit",
        "rollback", the same "silently" (only in the books), "never", "twice" (committed again), "against" (rolled back
        after the commit)."""
        name, end, identity, whole = operation.name, operation.details["end"], None, True
        for number, (topic, key, options) in enumerate(operation.details["messages"]):
            receipt = self.prepare(f"{name}-{number}", name, topic, identity, key=key, **options)
            if receipt is None:
                whole = False
                break
            identity = receipt.transaction_id
            self.site.shared.setdefault("names", {})[str(identity)] = name
        if not whole:
            end = "rollback" if identity is not None else "silent rollback"
        if operation.details.get("thinks"):
            self.site.pause(operation.details["thinks"])
        if end != "never":
            self.books[name] = ROLLBACK if "rollback" in end else COMMIT
        if identity is None or end == "never" or "silent" in end:
            return
        self.end(name, identity, self.books[name])
        if end == "twice":
            self.end(name, identity, COMMIT)
        elif end == "against":
            self.end(name, identity, ROLLBACK)

    def work(self, plan: Iterable[Operation]) -> None:
        """Run the operations of a plan."""
        for operation in to_do(self.site, plan):
            self.do(operation)

    def do(self, operation: Operation) -> None:
        """Run one operation; those of "together" concurrently, so that they share requests."""
        details = operation.details
        if operation.verb == "send":
            self.send(operation.name, details["topic"], **details["options"])
        elif operation.verb == "send many":
            values = [f"{operation.name}-{number}" for number in range(len(details["keys"]))]
            self.send_many(values, details["topic"], details["keys"])
        elif operation.verb == "transact":
            self.transact(operation)
        elif operation.verb == "together":
            self.site.together([partial(self.do, one) for one in details["operations"]])


def _recorded_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded facts of a message besides its topic."""
    return {"key": options["key"]} if options.get("key") is not None else {}


def _labels(options: dict[str, Any]) -> list[str | None]:
    """Return key and tag for a message's own body; they must arrive with it."""
    return [options.get("key"), options.get("tag")]


def _row(receipts: Receipts, row: int) -> Receipt | EscrowError:
    try:
        return receipts[row]
    except EscrowError as problem:
        return problem


def _place(receipt: Receipt) -> dict[str, Any]:
    return {
        "message_id": receipt.message_id.hex(),
        "queue": receipt.queue,
        "offset": receipt.offset,
        "position": receipt.position,
    }
