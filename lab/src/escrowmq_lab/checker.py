"""Checks recorded histories for lost, repeated or wrong messages, by id and never by count.

Sets of values (see ``Report``):

- *committed*: sent plainly with *ok*, or prepared with *ok* in a transaction whose commit is *ok* or that stands
  committed at the end; *ended otherwise*: rolled back in the same sense;
- *seen*: what stands in a queue at the end, or was delivered to anybody at any time.

What is checked:

| violation | when |
| --- | --- |
| lost | committed, and it does not stand in its queue at the end, or a group of its topic never got it (nor made a dead letter of it) |
| resurrected | seen, though it was rolled back or its send failed |
| unexpected | seen, and nobody tried to send it |
| repeated | the same value at two places of the topic, brokers counted |
| altered | a payload that is not what its hash says |
| leaked | seen without anybody having tried to commit it, or delivered before anybody had |
| torn | a transaction of which some messages stand and others do not |
| contradiction | a transaction with both outcomes, or with another state than was answered |
| moved | one place with two values; or a delivery from another place than where it stands, or than was told |
| gap | offsets of a queue that are missing at the end |
| unacked | delivered to a group again, as a later attempt under a later lease, after an acknowledgement that was *ok*, and that no reset by an operator has undone since |
| overasked | more questions than allowed, or the same attempt number twice, or fewer checks stored than asked; the last two not of what an operator had asked anew |
| unsettled | a transaction still open at the end |

*recovered* (seen, its call was *unknown*) is fine, and counted.
"""  # noqa: E501  # rows of a table

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from escrowmq_lab.history import Act, Event, Kind, read

Place = tuple[str | None, str | None, int | None, int | None]
DECIDED = {Act.COMMIT: "committed", Act.ROLLBACK: "rolled_back"}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: what, about which value or transaction, and the events that tell of it."""

    what: str
    subject: str
    detail: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        lines = "".join(f"\n    {event.line()}" for event in self.events[:12])
        return f"{self.what}: {self.subject}: {self.detail}{lines}"


@dataclass(slots=True)
class Report:
    """What the checker found. ``counts``: events by "act kind", and sizes of the sets."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.violations

    def named(self, what: str) -> list[str]:
        """Subjects of the violations of one kind."""
        return sorted(v.subject for v in self.violations if v.what == what)

    def __str__(self) -> str:
        head = "ok" if self.ok else f"{len(self.violations)} violations"
        numbers = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return "\n".join([f"{head}: {numbers}", *map(str, self.violations[:50])])


def check(events: Iterable[Event], *, check_max: int | None = None) -> Report:
    """Check a whole history, its last phase included."""
    return _Check(list(events), check_max).run()


class _Check:
    def __init__(self, events: list[Event], check_max: int | None) -> None:
        self.events = events
        self.check_max = check_max
        self.report = Report()
        self.about: dict[str, list[Event]] = defaultdict(list)  # by value and by transaction
        self.transaction_of: dict[str, str] = {}
        self.topic_of: dict[str, str | None] = {}
        self.sent: dict[str, Kind] = {}  # value -> how its send or prepare ended
        self.ended: dict[str, dict[str, Kind]] = defaultdict(dict)  # transaction -> outcome tried -> how
        self.state: dict[str, str] = {}  # transaction -> at the end
        self.stands: dict[str, list[Place]] = defaultdict(list)
        self.got: dict[str, set[str]] = defaultdict(set)  # group -> values
        self.groups_of: dict[str | None, set[str]] = defaultdict(set)  # topic -> groups
        self.delivered_at: dict[str, set[Place]] = defaultdict(set)
        self.asked: dict[str, list[int]] = defaultdict(list)
        self.stored_checks: dict[str, int] = {}
        self.rechecks: Counter[str] = Counter()
        self.told: dict[str, tuple[str | None, int | None, int]] = {}  # value -> topic, queue, offset
        self.done_without: set[tuple[str, str]] = (
            set()
        )  # group, value: dead letters, let go or not; passed over by a reset
        self._resets = Resets()

    def run(self) -> Report:
        acked: dict[tuple[str | None, str], Event] = {}
        for event in self.events:
            self.report.counts[f"{event.act} {event.kind}"] += 1
            for subject in {event.value, event.transaction} - {None}:
                self.about[str(subject)].append(event)
            self._take(event, acked)
        self._messages()
        self._places()
        self._transactions()
        self._questions()
        return self.report

    def _wrong(self, what: str, subject: str, detail: str) -> None:
        self.report.violations.append(Violation(what, subject, detail, tuple(self.about[subject])))

    # One event after the other

    def _take(self, event: Event, acked: dict[tuple[str | None, str], Event]) -> None:
        value, transaction = event.value or "", event.transaction
        holds = self._resets.see(event)
        if event.act in (Act.SEND, Act.PREPARE):
            self.topic_of[value] = event.topic
            self.sent[value] = event.kind
            if transaction is not None:
                self.transaction_of[value] = transaction
            if event.kind is Kind.OK and event.offset is not None:
                self.told[value] = (event.topic, event.queue, event.offset)
        elif event.act in DECIDED and transaction is not None:
            self.ended[transaction][DECIDED[event.act]] = event.kind
        elif event.act is Act.ANSWER and transaction is not None and value in DECIDED.values():
            self.ended[transaction].setdefault(value, Kind.UNKNOWN)
        elif event.act is Act.ASKED and transaction is not None:
            self.asked[transaction].append(event.attempt or 0)
        elif event.act is Act.FATE and event.note in ("dead", "discarded", "skipped"):
            self.done_without.add((event.group or "", value))
        elif event.act is Act.RECHECK and event.kind is Kind.INVOKE and transaction is not None:
            self.rechecks[transaction] += 1
        elif event.act is Act.STATE and transaction is not None:
            self.state[transaction] = value
            self.stored_checks[transaction] = event.attempt or 0
        elif event.act is Act.STANDS:
            self.stands[value].append(_place(event))
            self._look(event)
        elif event.act is Act.RECEIVE:
            self._received(event, value, acked)
        elif event.act is Act.ACK and event.kind is Kind.OK and holds:
            acked[event.group, value] = event
        elif event.act is Act.RESET:
            for key in [key for key in acked if key[0] == event.group]:
                del acked[key]

    def _received(self, event: Event, value: str, acked: dict[tuple[str | None, str], Event]) -> None:
        group = event.group or ""
        self.got[group].add(value)
        self.groups_of[event.topic].add(group)
        self.delivered_at[value].add(_place(event))
        self._look(event)
        before = acked.get((event.group, value))
        if before is not None and (event.attempt or 0) > (before.attempt or 0) and not _is_older(event, before):
            self._wrong("unacked", value, f"{group} acknowledged it and got it again as attempt {event.attempt}")
        owner = self.transaction_of.get(value)
        if owner is not None and "committed" not in self.ended.get(owner, {}):
            self._wrong("leaked", value, f"delivered to {group} before anybody committed {owner}")

    def _look(self, event: Event) -> None:
        if event.intact is False:
            self._wrong("altered", event.value or f"{_place(event)}", "the payload is not what its hash says")

    # The whole

    def _outcome(self, transaction: str) -> str | None:
        """Return the certain outcome of a transaction, by its final state or by an answer, or None."""
        for outcome, kind in self.ended.get(transaction, {}).items():
            if kind is Kind.OK:
                return outcome
        return self.state.get(transaction)

    def _messages(self) -> None:
        seen = {*self.stands, *(value for values in self.got.values() for value in values)}
        committed: set[str] = set()
        dead: set[str] = set()
        for value, kind in self.sent.items():
            outcome = self._outcome(self.transaction_of[value]) if value in self.transaction_of else "committed"
            if kind is Kind.OK and outcome == "committed":
                committed.add(value)
            elif kind is Kind.FAIL or outcome == "rolled_back":
                dead.add(value)
        for value in sorted(committed):
            if value not in self.stands:
                self._wrong("lost", value, "it does not stand in any queue")
                continue
            for group in sorted(self.groups_of[self.topic_of[value]]):
                if value not in self.got[group] and (group, value) not in self.done_without:
                    self._wrong("lost", value, f"group {group} never got it")
        for value in sorted(seen & dead):
            self._wrong("resurrected", value, "it was rolled back, or its send failed")
        for value in sorted(seen - set(self.sent)):
            self._wrong("unexpected", value, "nobody tried to send it")
        for value in sorted(seen & set(self.transaction_of)):
            owner = self.transaction_of[value]
            if "committed" not in self.ended.get(owner, {}):
                self._wrong("leaked", value, f"nobody committed {owner}")
        unknown = {v for v in seen if self.sent.get(v) in (Kind.UNKNOWN, Kind.INVOKE)}
        self.report.counts |= Counter({"committed": len(committed), "seen": len(seen), "recovered": len(unknown)})

    def _places(self) -> None:
        held: dict[Place, str] = {}
        offsets: dict[tuple[str | None, str | None, int | None], list[int]] = defaultdict(list)
        for value, places in self.stands.items():
            if len(places) > 1:
                self._wrong("repeated", value, f"it stands at {places}")
            for place in places:
                offsets[place[:3]].append(place[3] or 0)
                if held.setdefault(place, value) != value:
                    self._wrong("moved", value, f"{held[place]} stands at {place} too")
            if value in self.told and self.told[value] not in [place[1:] for place in places]:
                self._wrong("moved", value, f"told to stand at {self.told[value]}, it stands at {places}")
            known = {*places, *((None, *place[1:]) for place in places)}  # a consumer may not know the broker
            if strange := self.delivered_at[value] - known:
                self._wrong("moved", value, f"delivered from {sorted(map(str, strange))}, it stands at {places}")
        for queue, found in offsets.items():
            missing = sorted(set(range(min(found), max(found) + 1)) - set(found))
            if missing:
                self._wrong("gap", f"{queue}", f"offsets {missing[:10]} are missing")

    def _transactions(self) -> None:
        values: dict[str, set[str]] = defaultdict(set)
        for value, owner in self.transaction_of.items():
            values[owner].add(value)
        for name, members in values.items():
            stored = {v for v in members if self.sent[v] is Kind.OK}
            standing = {v for v in members if v in self.stands}
            if standing and not stored <= standing:
                self._wrong("torn", name, f"{sorted(standing)} stand, {sorted(stored - standing)} do not")
        for name, outcomes in self.ended.items():
            sure = {outcome for outcome, kind in outcomes.items() if kind is Kind.OK}
            if len(sure) > 1:
                self._wrong("contradiction", name, "both outcomes were answered with ok")
            final = self.state.get(name)
            if final is not None and sure and final not in sure:
                self._wrong("contradiction", name, f"{sorted(sure)} was answered and it stands {final}")
        for name, final in self.state.items():
            self.report.counts[f"transactions {final}"] += 1
            if final == "open":
                self._wrong("unsettled", name, "it is still open")

    def _questions(self) -> None:
        for name, attempts in self.asked.items():
            again = self.rechecks[name]  # each may be applied more than once: its answer is lost, and it is repeated
            if not again and len(set(attempts)) < len(attempts):
                self._wrong("overasked", name, f"asked as attempts {attempts}")
            if self.check_max is not None and max(attempts) > self.check_max:
                self._wrong("overasked", name, f"asked as attempt {max(attempts)}; {self.check_max} are allowed")
            if not again and self.stored_checks.get(name, max(attempts)) < max(attempts):
                self._wrong("overasked", name, f"asked {max(attempts)} times, {self.stored_checks[name]} are stored")


class Resets:
    """Which acknowledgements hold: those that were begun when no reset of their group by an operator was under way, and
    ended before the next one was begun. A reset whose end is unknown may still come to pass."""

    def __init__(self) -> None:
        self._under_way: Counter[str | None] = Counter()
        self._count: Counter[str | None] = Counter()
        self._begun: dict[tuple[str, str | None, str | None], int | None] = {}

    def see(self, event: Event) -> bool:
        """Take the next event in; whether it is an acknowledgement that holds, if it is *ok*."""
        group = event.group
        if event.act is Act.RESET:
            self._count[group] += 1
            self._under_way[group] += (event.kind is Kind.INVOKE) - (event.kind in (Kind.OK, Kind.FAIL))
        if event.act is not Act.ACK:
            return False
        now = None if self._under_way[group] else self._count[group]
        name = event.process, group, event.value
        if event.kind is Kind.INVOKE:
            self._begun[name] = now
        return now is not None and self._begun.get(name, now) == now


def _is_older(event: Event, other: Event) -> bool:
    """Return whether a delivery is of a lease that was made before that of the other event."""
    return event.lease is not None and other.lease is not None and event.lease <= other.lease


def _place(event: Event) -> Place:
    return (event.broker, event.topic, event.queue, event.offset)


if __name__ == "__main__":
    result = check(read(Path(sys.argv[1])), check_max=int(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(result)
    sys.exit(not result.ok)
