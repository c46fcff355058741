"""A history checker: finds lost, repeated or wrong messages in recorded histories, by id and never by count.

Sets of values (see ``Report``):

- *committed*: sent plainly with *ok*, or prepared with *ok* in a transaction whose commit is *ok* or that is committed
  at the end; *ended otherwise*: rolled back in the same sense;
- *seen*: in a queue at the end, or delivered to any group at any time.

Violations:

| violation | when |
| --- | --- |
| lost | committed, but not in its queue at the end, or never delivered to a group of its topic (nor made a dead letter
of it) |
| resurrected | seen, though it was rolled back or its send failed |
| unexpected | seen, but never sent |
| repeated | the same value at two places of the topic, over all brokers |
| altered | a payload that does not match its hash |
| leaked | seen without any attempt to commit it, or delivered before the first attempt |
| torn | a transaction of which only some messages are visible |
| contradiction | a transaction with both outcomes, or with another state than was answered |
| moved | one place with two values; or a delivery or receipt that names another place than the message's |
| gap | offsets of a queue that are missing at the end |
| unacked | redelivered to a group, as a later attempt under a later lease, after an acknowledgement that was *ok* and
that no later reset by an operator has undone |
| overasked | more check-backs than allowed, or the same attempt number twice, or fewer stored than sent; the last two
not after an operator's recheck |
| unsettled | a transaction still open at the end |

*recovered* (seen, its call was *unknown*) is allowed, and counted.
"""

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
    """One broken promise: its kind, the value or transaction, and the events that prove it."""

    what: str
    subject: str
    detail: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        lines = "".join(f"\n    {event.line()}" for event in self.events[:12])
        return f"{self.what}: {self.subject}: {self.detail}{lines}"


@dataclass(slots=True)
class Report:
    """The findings of the history checker. ``counts``: events by "act kind", and sizes of the sets."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Return whether every promise held."""
        return not self.violations

    def named(self, what: str) -> list[str]:
        """Return the subjects of the violations of one kind."""
        return sorted(v.subject for v in self.violations if v.what == what)

    def __str__(self) -> str:
        head = "ok" if self.ok else f"{len(self.violations)} violations"
        numbers = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return "\n".join([f"{head}: {numbers}", *map(str, self.violations[:50])])


def check(events: Iterable[Event], *, check_max: int | None = None) -> Report:
    """Check a whole history, including its last phase."""
    return _Check(list(events), check_max).run()


class _Check:
    def __init__(self, events: list[Event], check_max: int | None) -> None:
        self.events = events
        self.check_max = check_max
        self.report = Report()
        self.events_of: dict[str, list[Event]] = defaultdict(list)  # by value and by transaction
        self.transaction_of: dict[str, str] = {}
        self.topic_of: dict[str, str | None] = {}
        self.sent: dict[str, Kind] = {}  # value -> how its send or prepare ended
        self.ended: dict[str, dict[str, Kind]] = defaultdict(dict)  # transaction -> outcome tried -> how
        self.state: dict[str, str] = {}  # transaction -> at the end
        self.stored_at: dict[str, list[Place]] = defaultdict(list)
        self.received: dict[str, set[str]] = defaultdict(set)  # group -> values
        self.groups_of: dict[str | None, set[str]] = defaultdict(set)  # topic -> groups
        self.delivered_at: dict[str, set[Place]] = defaultdict(set)
        self.check_attempts: dict[str, list[int]] = defaultdict(list)
        self.stored_checks: dict[str, int] = {}
        self.rechecks: Counter[str] = Counter()
        self.reported_at: dict[str, tuple[str | None, int | None, int]] = {}  # value -> topic, queue, offset
        self.done_without: set[tuple[str, str]] = (
            set()
        )  # group, value: dead letters, discarded or not; skipped by a reset
        self._resets = Resets()

    def run(self) -> Report:
        acked: dict[tuple[str | None, str], Event] = {}
        for event in self.events:
            self.report.counts[f"{event.act} {event.kind}"] += 1
            for subject in {event.value, event.transaction} - {None}:
                self.events_of[str(subject)].append(event)
            self._process(event, acked)
        self._check_messages()
        self._check_places()
        self._check_transactions()
        self._check_check_backs()
        return self.report

    def _add_violation(self, what: str, subject: str, detail: str) -> None:
        self.report.violations.append(Violation(what, subject, detail, tuple(self.events_of[subject])))

    # One event after the other

    def _process(self, event: Event, acked: dict[tuple[str | None, str], Event]) -> None:
        value, transaction = event.value or "", event.transaction
        holds = self._resets.see(event)
        if event.act in (Act.SEND, Act.PREPARE):
            self.topic_of[value] = event.topic
            self.sent[value] = event.kind
            if transaction is not None:
                self.transaction_of[value] = transaction
            if event.kind is Kind.OK and event.offset is not None:
                self.reported_at[value] = (event.topic, event.queue, event.offset)
        elif event.act in DECIDED and transaction is not None:
            self.ended[transaction][DECIDED[event.act]] = event.kind
        elif event.act is Act.ANSWER and transaction is not None and value in DECIDED.values():
            self.ended[transaction].setdefault(value, Kind.UNKNOWN)
        elif event.act is Act.ASKED and transaction is not None:
            self.check_attempts[transaction].append(event.attempt or 0)
        elif event.act is Act.FATE and event.note in ("dead", "discarded", "skipped"):
            self.done_without.add((event.group or "", value))
        elif event.act is Act.RECHECK and event.kind is Kind.INVOKE and transaction is not None:
            self.rechecks[transaction] += 1
        elif event.act is Act.STATE and transaction is not None:
            self.state[transaction] = value
            self.stored_checks[transaction] = event.attempt or 0
        elif event.act is Act.STANDS:
            self.stored_at[value].append(_place(event))
            self._check_intact(event)
        elif event.act is Act.RECEIVE:
            self._on_receive(event, value, acked)
        elif event.act is Act.ACK and event.kind is Kind.OK and holds:
            acked[event.group, value] = event
        elif event.act is Act.RESET:
            for key in [key for key in acked if key[0] == event.group]:
                del acked[key]

    def _on_receive(self, event: Event, value: str, acked: dict[tuple[str | None, str], Event]) -> None:
        group = event.group or ""
        self.received[group].add(value)
        self.groups_of[event.topic].add(group)
        self.delivered_at[value].add(_place(event))
        self._check_intact(event)
        before = acked.get((event.group, value))
        if before is not None and (event.attempt or 0) > (before.attempt or 0) and not _is_older(event, before):
            self._add_violation(
                "unacked", value, f"{group} acknowledged it and got it again as attempt {event.attempt}"
            )
        owner = self.transaction_of.get(value)
        if owner is not None and "committed" not in self.ended.get(owner, {}):
            self._add_violation("leaked", value, f"delivered to {group} before anybody committed {owner}")

    def _check_intact(self, event: Event) -> None:
        if event.intact is False:
            self._add_violation("altered", event.value or f"{_place(event)}", "the payload is not what its hash says")

    # The whole

    def _outcome(self, transaction: str) -> str | None:
        """Return the certain outcome of a transaction, by its final state or by a response; None if uncertain."""
        for outcome, kind in self.ended.get(transaction, {}).items():
            if kind is Kind.OK:
                return outcome
        return self.state.get(transaction)

    def _check_messages(self) -> None:
        seen = {*self.stored_at, *(value for values in self.received.values() for value in values)}
        committed: set[str] = set()
        dead: set[str] = set()
        for value, kind in self.sent.items():
            outcome = self._outcome(self.transaction_of[value]) if value in self.transaction_of else "committed"
            if kind is Kind.OK and outcome == "committed":
                committed.add(value)
            elif kind is Kind.FAIL or outcome == "rolled_back":
                dead.add(value)
        for value in sorted(committed):
            if value not in self.stored_at:
                self._add_violation("lost", value, "it does not stand in any queue")
                continue
            for group in sorted(self.groups_of[self.topic_of[value]]):
                if value not in self.received[group] and (group, value) not in self.done_without:
                    self._add_violation("lost", value, f"group {group} never got it")
        for value in sorted(seen & dead):
            self._add_violation("resurrected", value, "it was rolled back, or its send failed")
        for value in sorted(seen - set(self.sent)):
            self._add_violation("unexpected", value, "nobody tried to send it")
        for value in sorted(seen & set(self.transaction_of)):
            owner = self.transaction_of[value]
            if "committed" not in self.ended.get(owner, {}):
                self._add_violation("leaked", value, f"nobody committed {owner}")
        unknown = {v for v in seen if self.sent.get(v) in (Kind.UNKNOWN, Kind.INVOKE)}
        self.report.counts |= Counter({"committed": len(committed), "seen": len(seen), "recovered": len(unknown)})

    def _check_places(self) -> None:
        occupied: dict[Place, str] = {}
        offsets: dict[tuple[str | None, str | None, int | None], list[int]] = defaultdict(list)
        for value, places in self.stored_at.items():
            if len(places) > 1:
                self._add_violation("repeated", value, f"it stands at {places}")
            for place in places:
                offsets[place[:3]].append(place[3] or 0)
                if occupied.setdefault(place, value) != value:
                    self._add_violation("moved", value, f"{occupied[place]} stands at {place} too")
            if value in self.reported_at and self.reported_at[value] not in [place[1:] for place in places]:
                self._add_violation(
                    "moved", value, f"reported_at to stand at {self.reported_at[value]}, it stands at {places}"
                )
            known = {*places, *((None, *place[1:]) for place in places)}  # a consumer may not know the broker
            if strange := self.delivered_at[value] - known:
                self._add_violation(
                    "moved", value, f"delivered from {sorted(map(str, strange))}, it stands at {places}"
                )
        for queue, found in offsets.items():
            missing = sorted(set(range(min(found), max(found) + 1)) - set(found))
            if missing:
                self._add_violation("gap", f"{queue}", f"offsets {missing[:10]} are missing")

    def _check_transactions(self) -> None:
        values: dict[str, set[str]] = defaultdict(set)
        for value, owner in self.transaction_of.items():
            values[owner].add(value)
        for name, members in values.items():
            stored = {v for v in members if self.sent[v] is Kind.OK}
            standing = {v for v in members if v in self.stored_at}
            if standing and not stored <= standing:
                self._add_violation("torn", name, f"{sorted(standing)} stand, {sorted(stored - standing)} do not")
        for name, outcomes in self.ended.items():
            sure = {outcome for outcome, kind in outcomes.items() if kind is Kind.OK}
            if len(sure) > 1:
                self._add_violation("contradiction", name, "both outcomes were answered with ok")
            final = self.state.get(name)
            if final is not None and sure and final not in sure:
                self._add_violation("contradiction", name, f"{sorted(sure)} was answered and it stands {final}")
        for name, final in self.state.items():
            self.report.counts[f"transactions {final}"] += 1
            if final == "open":
                self._add_violation("unsettled", name, "it is still open")

    def _check_check_backs(self) -> None:
        for name, attempts in self.check_attempts.items():
            again = self.rechecks[name]  # each may be applied more than once: its response is lost, and it is repeated
            if not again and len(set(attempts)) < len(attempts):
                self._add_violation("overasked", name, f"asked as attempts {attempts}")
            if self.check_max is not None and max(attempts) > self.check_max:
                self._add_violation(
                    "overasked", name, f"asked as attempt {max(attempts)}; {self.check_max} are allowed"
                )
            if not again and self.stored_checks.get(name, max(attempts)) < max(attempts):
                self._add_violation(
                    "overasked", name, f"asked {max(attempts)} times, {self.stored_checks[name]} are stored"
                )


class Resets:
    """Tracks valid acknowledgements: those that began when no reset of their group was running, and ended before the
    next one began. A reset with an unknown result may still take effect."""

    def __init__(self) -> None:
        self._running: Counter[str | None] = Counter()
        self._count: Counter[str | None] = Counter()
        self._starts: dict[tuple[str, str | None, str | None], int | None] = {}

    def see(self, event: Event) -> bool:
        """Process the next event. Returns whether it is an acknowledgement that is valid if it is *ok*."""
        group = event.group
        if event.act is Act.RESET:
            self._count[group] += 1
            self._running[group] += (event.kind is Kind.INVOKE) - (event.kind in (Kind.OK, Kind.FAIL))
        if event.act is not Act.ACK:
            return False
        now = None if self._running[group] else self._count[group]
        name = event.process, group, event.value
        if event.kind is Kind.INVOKE:
            self._starts[name] = now
        return now is not None and self._starts.get(name, now) == now


def _is_older(event: Event, other: Event) -> bool:
    """Decide whether a delivery belongs to an older lease than that of the other event."""
    return event.lease is not None and other.lease is not None and event.lease <= other.lease


def _place(event: Event) -> Place:
    return (event.broker, event.topic, event.queue, event.offset)


if __name__ == "__main__":
    result = check(read(Path(sys.argv[1])), check_max=int(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(result)
    sys.exit(not result.ok)
