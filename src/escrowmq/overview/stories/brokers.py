"""Facts that the brokers store about a message: its content, its transaction, its state in each consumer group, and
operator actions; and the possible meanings of a search text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.model import TransactionId, message_id
from escrowmq.overview.sources import Sources
from escrowmq.wire.actions import acts, producers, standing, transactions
from escrowmq.wire.values import LARGEST_NUMBER, MAX_QUEUE

MOST_ACTS = 8
"""Maximum number of operator actions that are looked up for one message."""
_FAMILIES = {"retried": "dead_letters.", "discarded": "dead_letters.", "edited": "dead_letters.", "reset": "groups."}
"""Prefix of the operator actions that cause an event, by event."""


MOST = 10_000
"""Maximum length of a search text, in characters. No key or id is longer."""
_TRANSACTION = re.compile(r"[0-9a-fA-F]{1,8}-[0-9a-fA-F]{1,8}-[0-9a-fA-F]{1,16}")
_PLACE = re.compile(r"([A-Za-z0-9._-]{1,127})/([0-9]{1,10})/([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class Sought:
    """A search text with each of its possible meanings."""

    text: str
    message_id: bytes
    """The id itself, or the id that is derived from the text."""
    transaction: TransactionId | None
    place: tuple[str, int, int] | None
    """Topic, queue and offset, written as in the names of dead letters."""


def parse_wanted(wanted: str) -> Sought:
    """Return the possible meanings of ``wanted``. Raises Misuse(BAD_ARGUMENT) for an empty or too long text."""
    if not isinstance(wanted, str) or not wanted.strip():
        raise Misuse(
            Code.BAD_ARGUMENT, "the search text is empty", "an id, a key, a transaction, or TOPIC/QUEUE/OFFSET"
        )
    if len(wanted) > MOST:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(wanted):,} characters are no id and no key", f"at most {MOST:,}")
    place = None
    if (match := _PLACE.fullmatch(wanted.strip())) is not None:
        queue, offset = int(match[2]), int(match[3])
        place = (match[1], queue, offset) if queue <= MAX_QUEUE and offset <= LARGEST_NUMBER else None
    transaction = None
    if _TRANSACTION.fullmatch(wanted.strip()):
        with suppress(Misuse):
            transaction = TransactionId.parse(wanted.strip())
    return Sought(wanted, message_id(wanted), transaction, place)


@dataclass(slots=True)
class AtBroker:
    """One message at one broker."""

    broker: str
    message: Mapping[str, Any]
    """The row of ``lookup``."""
    transaction: Mapping[str, Any] | None = None
    """The answer of ``transactions.show``."""
    producers: Mapping[str, Any] | None = None
    """Its producer group: the row of ``producers.list``."""
    stands: Mapping[str, Any] | None = None
    """The answer of ``messages.standing``."""
    acts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Operator actions by the time of the event that they caused."""
    notes: list[str] = field(default_factory=list)


class BrokerLookup:
    """Look-ups of one search. Facts that messages share are requested once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._transactions: dict[str, Mapping[str, Any] | None] = {}
        self._producers: dict[str, list[Any]] = {}

    def find(self, wanted: Sought, limit: int) -> tuple[list[AtBroker], bool]:
        """Return at most ``limit`` messages, newest first, and whether there are more."""
        found: dict[tuple[str, int], Mapping[str, Any]] = {}
        for row in self._find_rows(wanted, limit + 1):
            found.setdefault((row["broker"], row["position"]), row)
        rows = sorted(found.values(), key=lambda row: -row["stored_us"])
        return [self._add_details(row) for row in rows[:limit]], len(rows) > limit

    def find_ids(self, ids: Iterable[bytes], limit: int) -> list[AtBroker]:
        """Return the messages with these ids, at most ``limit``."""
        rows = [row for identity in ids for row in self._lookup(limit, message_id=identity)]
        return [self._add_details(row) for row in rows[:limit]]

    def _find_rows(self, wanted: Sought, limit: int) -> Iterable[Any]:
        """Yield the messages of each possible meaning. A message may come more than once."""
        if wanted.transaction is not None:
            yield from self._find_in_transaction(wanted, limit)
        if wanted.place is not None:
            topic, queue, offset = wanted.place
            for broker, identity in self._find_at_place(topic, queue, offset):
                rows = self._lookup(limit, message_id=identity, topic=topic)
                yield from (row for row in rows if row["broker"] == broker and row["offset"] == offset)
        yield from self._lookup(limit, message_id=wanted.message_id)
        yield from self._lookup(limit, key=wanted.text)

    def _lookup(self, limit: int, **given: Any) -> list[Any]:
        return self._sources.request_all(lambda admin: admin.lookup(**given, limit=limit))

    def _find_in_transaction(self, wanted: Sought, limit: int) -> Iterable[Any]:
        """Yield the messages of a transaction."""
        printed = str(wanted.transaction)
        for address in self._sources.addresses:
            shown = self._show_transaction(address, printed) or {}
            for identity in [message["message_id"] for message in shown.get("messages", [])[:limit]]:
                if identity is not None:
                    rows = self._lookup(limit, message_id=bytes.fromhex(identity))
                    yield from (row for row in rows if row["transaction"] == printed)

    def _find_at_place(self, topic: str, queue: int, offset: int) -> Iterable[tuple[str, bytes]]:
        for address, link in zip(self._sources.addresses, self._sources.router.links, strict=True):
            request: Any = {
                "source": topic, "queue": queue, "start": offset, "end": offset + 1, "max_rows": 1,
                "columns": ["message_id"],
            }  # fmt: skip
            try:
                identities = link.read(request).read_all().column("message_id").to_pylist()
            except EscrowError as problem:
                if problem.code not in (Code.UNKNOWN_TOPIC, Code.BAD_QUEUE, Code.RANGE_PURGED, Code.NOT_FOUND):
                    self._sources.note(address, str(problem))
                continue
            yield from ((address, identity) for identity in identities if identity is not None)

    def _add_details(self, row: Mapping[str, Any]) -> AtBroker:
        """Return a message with its transaction, producer group, state in consumer groups, and operator actions."""
        at = AtBroker(row["broker"], row)
        if row["transaction"] is not None:
            at.transaction = self._show_transaction(at.broker, row["transaction"])
            if at.transaction is None:
                at.notes.append("The log no longer has its transaction: who decided it, and when, is not known.")
            else:
                at.producers = self._find_producers(at.broker, at.transaction["group"])
        if row["offset"] is not None and row["topic"] is not None:
            self._add_standing(at, row)
        self._add_acts(at)
        return at

    def _show_transaction(self, broker: str, printed: str) -> Mapping[str, Any] | None:
        if printed not in self._transactions:
            try:
                self._transactions[printed] = self._sources.request(broker, transactions.SHOW({"id": printed}))
            except EscrowError as problem:
                if problem.code is Code.WRONG_SHARD:
                    return None
                if problem.code not in (Code.UNKNOWN_TRANSACTION, Code.RANGE_PURGED):
                    self._sources.note(broker, str(problem))
                    return None
                self._transactions[printed] = None
        return self._transactions[printed]

    def _find_producers(self, broker: str, name: str | None) -> Mapping[str, Any] | None:
        if broker not in self._producers:
            answer = self._sources.request_one(broker, producers.LIST({}))
            self._producers[broker] = [] if answer is None else answer["producers"]
        return next((one for one in self._producers[broker] if one["group"] == name), None)

    def _add_standing(self, at: AtBroker, row: Mapping[str, Any]) -> None:
        place: standing.AskOfMessage = {
            "topic": row["topic"], "queue": row["queue"], "offset": row["offset"], "history": True,
        }  # fmt: skip
        try:
            at.stands = self._sources.request(at.broker, standing.OF_MESSAGE(place))
        except EscrowError as problem:
            known = {
                Code.RANGE_PURGED: "Retention removed it from its queue: what consumers did with it is not known.",
                Code.BAD_REQUEST: "This broker is older and does not report the state of a message in consumer groups.",
            }
            at.notes.append(known.get(problem.code, f"Its state in consumer groups is not available: {problem}"))
        if at.stands is not None and row["state"] == "edited":
            at.stands = _restrict_to_group(at.stands, row)

    def _add_acts(self, at: AtBroker) -> None:
        """Add the newest operator actions on a message."""
        by_hand = [
            (event["time_us"], "transactions.")
            for event in (at.transaction or {}).get("timeline", [])
            if event.get("by") == "operator" or event["event"] == "reopened"
        ]
        events = (at.stands or {}).get("events", [])
        by_hand += [(event["time_us"], _FAMILIES[event["event"]]) for event in events if event["event"] in _FAMILIES]
        for time_us, family in sorted(by_hand)[-MOST_ACTS:]:
            act = self._find_act(at.broker, time_us)
            if act is not None and act["act"].startswith(family):
                at.acts[time_us] = act

    def _find_act(self, broker: str, time_us: int) -> Mapping[str, Any] | None:
        """Return the last operator action that began at or before a time. Actions of one broker do not overlap."""
        newest = self._sources.request_one(broker, acts.LIST({"limit": 1, "newest": True}))
        if newest is None or not newest["acts"]:
            return None
        last = newest["acts"][-1]
        if last["time_us"] <= time_us:
            return last
        found: Mapping[str, Any] | None = None
        low, high = 1, last["number"]
        while low < high:  # the numbers below ``low`` began before, ``high`` did not
            middle = (low + high) // 2
            page = self._sources.request_one(broker, acts.LIST({"limit": 1, "after": middle - 1}))
            if page is None or not page["acts"]:
                return None
            if page["acts"][0]["time_us"] <= time_us:
                found, low = page["acts"][0], max(page["acts"][0]["number"], middle) + 1
            else:
                high = middle
        return found


def _restrict_to_group(stands: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state and events of an edited message in its only group, without events of the message that it
    replaced."""
    events = [event for event in stands.get("events", []) if event["group"] == row["group"]]
    begun = next((n for n, event in enumerate(events) if event.get("message_id") == row["message_id"]), 0)
    mine = [one for one in stands["groups"] if one["group"] == row["group"]]
    return {**stands, "groups": mine, "events": events[begun:]}
