"""Checks during a run: facts reported with *ok* must exist after every recovery, and forbidden messages are never
delivered. Checks at the end would find the same, later and with more events around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.groups.cursors import State
from escrowmq.ledger.groups.subscriptions import queue_ids
from escrowmq.model import TransactionState
from escrowmq_lab.checker import DECIDED, Violation
from escrowmq_lab.history import Act, Event, Kind, unpack

LEASED, RETRYING = State.LEASED, State.RETRYING


class Named(Protocol):
    """A broker."""

    name: str


class Watch:
    """See the module. ``wrong`` is called with violations."""

    def __init__(self, wrong: Callable[[Violation], None]) -> None:
        self._report = wrong
        self._stored: dict[str, Event] = {}  # value -> its ok
        self._attempted: set[str] = set()
        self._tried: dict[str, set[str]] = {}  # transaction -> outcomes that were tried
        self._ended: dict[str, tuple[str, Event]] = {}  # transaction -> its outcome, once reported
        self._owner: dict[str, str] = {}

    # Events

    def see(self, event: Event) -> None:
        """Process an event."""
        value, transaction = event.value or "", event.transaction or ""
        if event.act in (Act.SEND, Act.PREPARE):
            self._attempted.add(value)
            if transaction:
                self._owner[value] = transaction
            if event.kind is Kind.OK and event.position is not None:
                self._stored[value] = event
        elif event.act in DECIDED:
            outcome = DECIDED[event.act]
            self._tried.setdefault(transaction, set()).add(outcome)
            if event.kind is Kind.OK:
                self._on_decision(transaction, outcome, event)
        elif event.act is Act.ANSWER:
            self._tried.setdefault(transaction, set()).add(value)
        elif event.act is Act.RECEIVE:
            self._on_delivery(value, event)

    def _on_decision(self, transaction: str, outcome: str, event: Event) -> None:
        known = self._ended.setdefault(transaction, (outcome, event))
        if known[0] != outcome:
            detail = f"it was {known[0]}, and now {outcome}"
            self._report(Violation("contradiction", transaction, detail, (known[1], event)))

    def _on_delivery(self, value: str, event: Event) -> None:
        if event.intact is False:
            self._report(Violation("altered", value, "the payload is not what its hash says", (event,)))
        elif value not in self._attempted:
            self._report(Violation("unexpected", value, "nobody tried to send it", (event,)))
        elif (owner := self._owner.get(value)) is not None and "committed" not in self._tried.get(owner, ()):
            self._report(Violation("leaked", value, f"delivered before anybody committed {owner}", (event,)))
        elif owner is not None and self._ended.get(owner, ("committed",))[0] != "committed":
            self._report(Violation("resurrected", value, f"{owner} was rolled back", (event,)))

    # After a recovery

    def recovered(self, broker: Named, engine: Engine) -> None:
        """Compare the state of a broker after its start with reported facts."""
        bodies = self._by_position(engine)
        mine = {value: event for value, event in self._stored.items() if (event.broker or broker.name) == broker.name}
        known = {value for value, _ in bodies.values()}
        for value, event in mine.items():
            if event.broker is None and value not in known:
                continue  # with several brokers, it may be at another
            position = event.position
            if position is None or bodies.get(position, ("", True))[0] != value:
                self._report(Violation("lost", value, f"not at {position} of {broker.name} after its start", (event,)))
        states = self._states(engine, bodies)
        for name, (outcome, event) in self._ended.items():
            if name in states and states[name] != outcome:
                detail = f"{outcome} was told, and after a start of {broker.name} it is {states[name]}"
                self._report(Violation("contradiction", name, detail, (event,)))

    def _by_position(self, engine: Engine) -> dict[int, tuple[str, bool]]:
        """Return value and intactness of every message in the log, by position."""
        positions = [queue.positions(queue.head, queue.end) for queue in engine.shard.ledger.topics.queues]
        table = engine.shard.ledger.transactions
        ordinals = np.arange(table.rows.first, table.rows.end)
        halves = table.messages_of(ordinals)[1] if len(ordinals) else np.zeros(0, np.int64)
        every = np.unique(np.concatenate([*positions, halves])) if len(positions) or len(halves) else halves
        if not len(every):
            return {}
        try:
            bodies = engine.log.read(every, ["body"]).column("body").to_pylist()
        except EscrowError as problem:
            self._report(Violation("lost", "messages", f"what is stored cannot be read: {problem}"))
            return {}
        found = {}
        for position, body in zip(every.tolist(), bodies, strict=True):
            content, intact = unpack(body)
            found[position] = str(content.get("value")), intact
        return found

    def _states(self, engine: Engine, bodies: dict[int, tuple[str, bool]]) -> dict[str, str]:
        table = engine.shard.ledger.transactions
        firsts, states = table.rows["first"].tolist(), table.rows["state"].tolist()
        named = (
            (self._owner.get(bodies.get(first, ("", True))[0]), state)
            for first, state in zip(firsts, states, strict=True)
        )
        return {name: TransactionState(state).name.lower() for name, state in named if name is not None}

    # At the end

    def left(self, name: str, engine: Engine) -> list[str]:
        """Return the pending work of a broker."""
        ledger = engine.shard.ledger
        left = [
            f"{name}: {count} open transactions of group {group}"
            for group, count in ledger.transactions.open.items()
            if count
        ]
        if waiting := len(ledger.delays.held()[0]):
            left.append(f"{name}: {waiting} delayed messages")
        for group in self.groups(engine):
            unread = [q for q in group["queues"] if q["waiting"] or q["leased"] or q["retrying"]]
            left += [
                f"{name}: {group['name']} is at {q['floor']} of {q['end']} of {q['topic']}/{q['queue']}" for q in unread
            ]
        return left

    def rests(self, engine: Engine) -> bool:
        """Decide quickly, for frequent polls, whether a broker has no pending work, like :meth:`left`."""
        ledger = engine.shard.ledger
        if any(ledger.transactions.open.values()) or len(ledger.delays.held()[0]):
            return False
        for group in ledger.groups.groups.values():
            for number in queue_ids(group.subscription.topics, ledger.topics):
                cursor = group.cursor(number)
                if cursor.next != ledger.topics.queues[number].end or cursor.counts[LEASED] or cursor.counts[RETRYING]:
                    return False
        return True

    def groups(self, engine: Engine) -> list[dict[str, Any]]:
        """Return the consumer groups of a broker."""
        return engine.shard.ledger.groups.describe(engine.shard.ledger.topics, engine.shard.ledger.rules)

    def _fates(self, engine: Engine, bodies: dict[int, tuple[str, bool]]) -> Iterator[tuple[Act, dict[str, Any]]]:
        ledger = engine.shard.ledger
        for group in self.groups(engine):
            for one in group["queues"]:
                queue = ledger.topics.queues[one["queue_id"]]
                for state, offsets in ledger.groups.account(group["name"], one["queue_id"], ledger.topics).items():
                    for offset in offsets.tolist() if state != "acked" else ():
                        value = bodies[int(queue.positions(offset, offset + 1)[0])][0]
                        yield Act.FATE, {"value": value, "topic": one["topic"], "group": group["name"], "note": state}

    def audited(self, engine: Engine) -> Iterator[tuple[Act, dict[str, Any]]]:
        """Iterate over the messages in the topics, and the state of every transaction."""
        bodies = self._by_position(engine)
        for queue in engine.shard.ledger.topics.queues:
            for offset, position in enumerate(queue.positions(queue.head, queue.end).tolist(), queue.head):
                value, intact = bodies[position]
                place = {"topic": queue.place.topic, "queue": queue.place.queue, "offset": offset}
                yield Act.STANDS, {"value": value, "intact": intact, "position": position, **place}
        yield from self._fates(engine, bodies)
        for one in listings.transactions(engine.shard.ledger, limit=1 << 30):
            value = bodies.get(one["position"], ("", True))[0]
            yield Act.STATE, {"transaction": self._owner.get(value), "value": one["state"], "attempt": one["checks"]}
