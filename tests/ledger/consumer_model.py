"""One consumer group, said naively: a state for every offset of every queue (I22, I23, I25 to I27)."""

from __future__ import annotations

from dataclasses import dataclass

from escrowmq.errors import Code
from escrowmq.ledger.commands import Rules
from escrowmq.model import Act

Place = tuple[str, int]


@dataclass(slots=True)
class Entry:
    """What became of one offset. ``due_us`` and ``attempt``: of the next delivery while retrying, else of this one."""

    state: str
    attempt: int = 1
    due_us: int = 0
    lease: int = -1
    instead: int | None = None
    """The log position of the message that a person put in its place."""


class Consumer:
    """An unordered group over all queues of its topics, with one member, which takes whole batches."""

    def __init__(self, rules: Rules, tags: tuple[str, ...], starts: dict[Place, int]) -> None:
        self.rules = rules
        self.tags = tags
        self.starts = starts
        self.entries: dict[Place, list[Entry]] = {}
        self.deadlines: dict[int, int] = {}
        self.delivered: dict[int, list[tuple[Place, int]]] = {}
        self.acked_ever: set[tuple[Place, int]] = set()
        self.paused = False

    def meet(self, queues: dict[Place, list]) -> None:
        """Learn of messages that became visible."""
        for place, messages in queues.items():
            known = self.entries.setdefault(place, [])
            for offset in range(len(known), len(messages)):
                skipped = offset < self.starts.get(place, 0)
                known.append(Entry("skipped" if skipped else "waiting"))

    def wants(self, message) -> bool:
        return not self.tags or message.tag in self.tags

    def eligible(self, queues: dict[Place, list], now: int) -> int:
        return not self.paused and sum(
            (entry.state == "waiting" and self.wants(queues[place][offset])) or self._is_due(entry, now)
            for place, entries in self.entries.items()
            for offset, entry in enumerate(entries)
        )

    @staticmethod
    def _is_due(entry: Entry, now: int) -> bool:
        return entry.state == "retrying" and entry.due_us <= now

    def receive(self, queues: dict[Place, list], most: int, lease_us: int, now: int, got: list[tuple]) -> None:
        """``got``: (lease, place, offset, attempt, position) of what was leased."""
        assert len(got) == min(most, self.eligible(queues, now)), "as many as there are, up to what was asked for"
        for lease, place, offset, attempt, position in got:
            message, entry = queues[place][offset], self.entries[place][offset]
            assert position == (message.position if entry.instead is None else entry.instead)
            assert self.wants(message)
            assert (place, offset) not in self.acked_ever, "acknowledged progress never goes back (I22)"
            assert entry.state == "waiting" or self._is_due(entry, now), f"{entry.state} delivered again (I23, I27)"
            assert attempt == entry.attempt <= self.rules.max_attempts
            entry.state, entry.lease = "leased", lease
            self.deadlines[lease] = now + lease_us
            self.delivered.setdefault(lease, []).append((place, offset))
            for passed in range(offset):  # what the tags exclude is done when it is passed over
                earlier = self.entries[place][passed]
                if earlier.state == "waiting" and not self.wants(queues[place][passed]):
                    earlier.state = "filtered"

    def settle(self, lease: int, place: Place, offset: int, act: Act, delay_us: int, now: int, code: int) -> None:
        """One message of a lease it was delivered under."""
        entry = self.entries[place][offset]
        mine = entry.lease == lease
        held = [self.entries[p][o] for p, o in self.delivered[lease]]
        if act == Act.EXTEND:
            alive = any(e.lease == lease and e.state == "leased" for e in held)
            assert code == (Code.OK if alive else Code.LEASE_LOST)
            if alive:
                self.deadlines[lease] = now + delay_us
            return
        if mine and entry.state == "leased":
            assert code == Code.OK
            if act == Act.ACK:
                entry.state = "acked"
                self.acked_ever.add((place, offset))
            elif act == Act.RELEASE:
                entry.state, entry.due_us, entry.lease = "retrying", now, -1
            elif act == Act.REJECT:
                entry.state = "dead"
            else:
                self._fail(entry, now, delay_us)
        else:
            repeated = act == Act.ACK and mine and entry.state == "acked"
            assert code == (Code.OK if repeated else Code.LEASE_LOST), (Code(code), entry)

    def _fail(self, entry: Entry, now: int, delay_us: int | None) -> None:
        if entry.attempt >= self.rules.max_attempts:
            entry.state = "dead"
            return
        if delay_us is None or delay_us < 0:
            wait = self.rules.retry_backoff_us << (entry.attempt - 1)
            delay_us = min(wait, self.rules.retry_backoff_max_us)
        entry.state, entry.due_us, entry.attempt, entry.lease = "retrying", now + delay_us, entry.attempt + 1, -1

    def times(self) -> list[int]:
        """When leases end and retries are due."""
        held = [e for entries in self.entries.values() for e in entries]
        return [e.due_us for e in held if e.state == "retrying"] + [
            self.deadlines[e.lease] for e in held if e.state == "leased"
        ]

    def tick(self, now: int) -> None:
        live: dict[int, list[Entry]] = {}
        for entries in self.entries.values():
            for entry in entries:
                if entry.state == "leased":
                    live.setdefault(entry.lease, []).append(entry)
        over = {lease for lease in live if self.deadlines[lease] <= now}
        unreached = self._unreached(live, over)
        for lease in sorted(over | unreached):
            for entry in live[lease]:
                if lease in unreached:
                    entry.state, entry.due_us, entry.lease = "retrying", now, -1
                elif self.paused:
                    entry.state, entry.due_us, entry.lease = "retrying", now, -1
                    entry.attempt = max(entry.attempt, self.repeated)
                else:
                    self._fail(entry, now, None)

    def _unreached(self, live: dict[int, list[Entry]], over: set[int]) -> set[int]:
        """Leases at their last attempt that their one member cannot have come to: nothing in them was settled, and
        before them it was given another that is not done (ledger/groups/members.py)."""
        found = set()
        for lease, held in live.items():
            before = [one for one in live if one < lease and self.deadlines[one] != self.deadlines[lease]]
            untouched = len(held) == len(self.delivered[lease])
            last = held[0].attempt >= self.rules.max_attempts
            if last and untouched and (before if lease in over else over.intersection(before)):
                found.add(lease)
        return found

    def dead(self) -> list[tuple[Place, int]]:
        return [(p, o) for p, es in self.entries.items() for o, e in enumerate(es) if e.state == "dead"]

    def settle_dead(self, place: Place, offset: int, retry: bool, now: int, code: int) -> None:
        entry = self.entries[place][offset]
        assert code == (Code.OK if entry.state == "dead" else Code.NOT_FOUND)
        if code == Code.OK:
            entry.state = "retrying" if retry else "discarded"
            entry.attempt, entry.due_us, entry.lease = 1, now, -1

    def edit(self, place: Place, offset: int, position: int, now: int) -> None:
        """A person put the message at a log position in place of a dead letter."""
        entry = self.entries[place][offset]
        entry.instead = position
        self.settle_dead(place, offset, True, now, Code.OK)

    @property
    def repeated(self) -> int:
        return min(2, self.rules.max_attempts)

    def reset(self, place: Place, target: int) -> None:
        """An operator set where it goes on: from ``target`` on all waits, a repeat if somebody had it."""
        for offset, entry in enumerate(self.entries[place]):
            entry.lease = -1
            if offset >= target:
                reached = entry.state in ("acked", "leased", "dead", "discarded") or entry.attempt > 1
                entry.state, entry.attempt = "waiting", self.repeated if reached else 1
                self.acked_ever.discard((place, offset))
            elif entry.state in ("waiting", "leased", "retrying"):
                entry.state, entry.attempt = "skipped", 1  # deliveries before a skip are not remembered

    def trim(self, heads: dict[Place, int]) -> None:
        for place, entries in self.entries.items():
            for entry in entries[: heads[place]]:
                if entry.state in ("waiting", "leased", "retrying", "dead"):
                    entry.state = "expired"

    def check(self, place: Place, queues: dict[Place, list], account: dict[str, list[int]]) -> None:
        """I26: each offset in exactly one state, and in this one."""
        states = {offset: state for state, offsets in account.items() for offset in offsets}
        assert sum(map(len, account.values())) == len(states) == len(queues[place])
        for offset, entry in enumerate(self.entries[place]):
            found = states[offset]
            passed = entry.state in ("waiting", "expired", "skipped") and not self.wants(queues[place][offset])
            assert found == entry.state or (passed and found == "filtered"), (place, offset, found, entry)
