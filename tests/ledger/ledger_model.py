"""What a ledger must do, said naively: one object a message, one a transaction, lists and dictionaries, no columns.

The model says what each answer must be (asserting it) and what must be true afterwards. It takes over from the ledger
only what the ledger is free to choose: queues of keys, and how far retention goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from escrowmq.errors import Code
from escrowmq.ledger.commands import Rules, TopicRules
from escrowmq.ledger.queues.queues import ROW_BYTES
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, DecidedBy, Outcome

UNDECIDED = ("open", "parked")
GONE = object()


def name_of(row: dict) -> tuple[str, str]:
    """What names a message: the topic and the id."""
    return row["topic"], row["message_id"]


def content_of(row: dict) -> tuple:
    return row.get("key"), row.get("tag"), row.get("properties"), row.get("body", b"")


@dataclass(eq=False)
class Transaction:
    raw: bytes
    first: int
    epoch: int
    group: str | None  # None: forgotten, so it belongs to nobody
    prepared_us: int
    due_us: int
    messages: list[Message] = field(default_factory=list)
    state: str = "open"
    checks: int = 0
    reopened: bool = False
    times_decided: int = 0


@dataclass(eq=False)
class Message:
    position: int
    topic: str
    queue: int
    tag: str | None
    due_us: int
    owner: Transaction | None
    half: bool
    content: tuple
    seen_us: int | None = None


class Model:
    """The state of a shard without consumers."""

    def __init__(self, rules: Rules, next_position: int) -> None:
        self.rules = rules
        self.next_position = next_position
        self.sessions: dict[int, tuple[str, str, bool]] = {}
        self.next_epoch = 1
        self.used: dict[int, int] = {}
        self.transactional: set[str] = set()
        self.fenced: set[int] = set()
        self.by_id: dict[tuple[str, str], Message] = {}
        self.transactions: dict[bytes, Transaction] = {}
        self.gone: set[bytes] = set()
        self.queues: dict[tuple[str, int], list[Message]] = {}
        self.heads: dict[tuple[str, int], int] = {}
        self.waiting: list[Message] = []
        self.queue_of_key: dict[tuple[str, str], int] = {}
        self.trimmed = 0
        self.own: dict[str, TopicRules] = {}

    # Sessions

    def open(self, epoch: int, group: str, instance: str, transactional: bool, now: int) -> None:
        assert epoch == self.next_epoch, "epochs count up and are never given twice"
        self.next_epoch += 1
        self.fenced |= {e for e, s in self.sessions.items() if s[:2] == (group, instance)}
        self.sessions[epoch] = (group, instance, transactional)
        self.used[epoch] = now
        if transactional:
            self.transactional.add(group)
        self.next_position += 1

    def forget(self, before: int, connected: list[int], limit: int) -> int:
        """How many sessions are let go: of those without an undecided transaction."""
        alive = [t for t in self.transactions.values() if t.raw not in self.gone]
        needed = {t.epoch for t in alive if t.state in UNDECIDED} | set(connected)
        idle = sorted(e for e in self.sessions if self.used[e] < before and e not in needed)[:limit]
        for epoch in idle:
            del self.sessions[epoch], self.used[epoch]
        left = {group for group, _, _ in self.sessions.values()}
        self.transactional &= left
        for transaction in alive:
            if transaction.epoch not in self.sessions:  # nobody knows any more whose it was
                assert transaction.state not in UNDECIDED
                transaction.group = None
        self.next_position += len(idle)
        return len(idle)

    def session_code(self, epoch: int, half: bool | None) -> Code:
        if epoch == 0:
            return Code.UNKNOWN_SESSION if half else Code.OK
        if epoch not in self.sessions:
            return Code.UNKNOWN_SESSION
        if epoch in self.fenced:
            return Code.FENCED
        group, _, transactional = self.sessions[epoch]
        if half and not transactional:
            return Code.GROUP_KIND
        if half is False and group in self.transactional:
            return Code.GROUP_KIND
        return Code.OK

    # Messages

    def produce(
        self, rows: list[dict], epoch: int, half: bool, now: int, answers: list[dict], replace: bool = False
    ) -> None:
        assert len(answers) == len(rows)
        pairs = list(zip(rows, answers, strict=True))
        made = {row["topic"] for row, a in pairs if a["code"] == Code.OK} - {topic for topic, _ in self.queues}
        first = {name_of(row): number for number, row in reversed(list(enumerate(rows)))}
        replacing = [
            replace and first[name_of(row)] == number and self._is_replaceable(row, epoch)
            for number, row in enumerate(rows)
        ]
        at = (
            self.next_position
            + len(made)
            + sum(r and a["code"] == Code.OK for r, (_, a) in zip(replacing, pairs, strict=True))
        )
        before = at
        refused: dict[tuple[str, str], Code] = {}  # the first row of a new message speaks for the others of the batch
        for (row, answer), instead in zip(pairs, replacing, strict=True):
            name = name_of(row)
            new = name not in self.by_id or instead
            code = refused.get(name) or (self._new_code if new else self._code)(row, epoch, half)
            assert answer["code"] == code, (row, Code(answer["code"]), code)
            if code != Code.OK:
                if new:
                    refused[name] = code
                assert (answer["position"], answer["offset"], answer["transaction"]) == (-1, -1, None)
            elif not new:
                self._repeat(self.by_id[name], answer, half)
            else:
                if instead:
                    self.decide(self.by_id[name].owner, "rolled_back", now)
                assert answer["position"] == at, "positions count up over all rows of the log"
                at += 1
                self._take(row, epoch, half, now, answer)
        self.next_position = at if at > before else self.next_position
        if at > before and epoch:
            self.used[epoch] = now

    def _is_replaceable(self, row: dict, epoch: int) -> bool:
        """4.3: only the last prepare of an id counts, while it is undecided."""
        known = self.by_id.get(name_of(row))
        if known is None or not known.half or row.get("transaction") or self.session_code(epoch, True) != Code.OK:
            return False
        owner = known.owner
        return (
            owner.raw not in self.gone
            and owner.state in UNDECIDED
            and owner.group == self.sessions[epoch][0]
            and len(owner.messages) == 1
            and known.content != content_of(row)
        )

    def _code(self, row: dict, epoch: int, half: bool) -> Code:
        """Of a row whose id its topic knows: only the same message gets the receipt."""
        if (code := self.session_code(epoch, half)) != Code.OK:
            return code
        known = self.by_id[name_of(row)]
        if known.half != half:
            return Code.MESSAGE_ID_TAKEN
        if half:
            if known.position < self.trimmed or known.owner.raw in self.gone:
                return self._left(known.owner)
            begins = known.position == known.owner.first
            same = row.get("transaction") == known.owner.raw or (row.get("transaction") is None and begins)
            if known.owner.group not in (self.sessions[epoch][0], None) or not same:
                return Code.MESSAGE_ID_TAKEN
        stored = known.position >= self.trimmed  # else only the id is left to be compared
        return Code.MESSAGE_ID_TAKEN if stored and known.content != content_of(row) else Code.OK

    @staticmethod
    def _left(transaction: Transaction | None) -> Code:
        """Of a transaction that is not there (any more): only what left undecided is remembered (I12)."""
        return Code.EXPIRED if transaction is not None and transaction.state == "expired" else Code.UNKNOWN_TRANSACTION

    def _new_code(self, row: dict, epoch: int, half: bool) -> Code:
        if (code := self.session_code(epoch, half)) != Code.OK:
            return code
        group = self.sessions[epoch][0] if epoch else ""
        if half and row.get("transaction") is not None:
            owner = self.transactions.get(row["transaction"])
            if owner is None or owner.raw in self.gone:
                return self._left(owner)
            if owner.group not in (group, None):
                return Code.WRONG_GROUP
            return Code.OK if owner.state == "open" else Code.TRANSACTION_DECIDED
        count = sum(t.group == group and t.state == "open" for t in self.transactions.values())
        if name_of(row) in self.by_id:  # the one that it replaces
            count -= self.by_id[name_of(row)].owner.state == "open"
        return Code.TOO_MANY_OPEN if half and count >= self.rules.max_open_transactions else Code.OK

    def _repeat(self, message: Message, answer: dict, half: bool) -> None:
        """I9: the receipt of the first time; a plain message's offset is that which it has by now."""
        assert answer["position"] == message.position
        if message.position < self.trimmed:
            assert answer["offset"] == -1
            return
        assert answer["transaction"] == (message.owner.raw if half and message.owner else None)
        place = (message.topic, message.queue)
        listed = self.queues[place]
        offset = listed.index(message) if not half and message in listed else -1
        if offset < self.heads[place]:
            offset = -1
        assert answer["offset"] == offset
        if half or message.seen_us is None or answer["offset"] >= 0:
            assert answer["queue"] == message.queue

    def _take(self, row: dict, epoch: int, half: bool, now: int, answer: dict) -> None:
        queue, topic, position = answer["queue"], row["topic"], answer["position"]
        if row.get("key") is not None and row.get("queue", -1) < 0:
            assert self.queue_of_key.setdefault((topic, row["key"]), queue) == queue, "equal keys share a queue"
        if row.get("queue", -1) >= 0:
            assert queue == row["queue"]
        for number in range(self.rules.default_queues):
            self.queues.setdefault((topic, number), [])
            self.heads.setdefault((topic, number), 0)
        due = now + row["delay_us"] if row.get("delay_us") else 0
        message = Message(position, topic, queue, row.get("tag"), due, None, half, content_of(row))
        self.by_id[name_of(row)] = message
        if not half:
            offset = len(self.queues[topic, queue])
            self._place(message, now)
            assert answer["offset"] == (-1 if due else offset)
            return
        assert answer["offset"] == -1
        raw = row.get("transaction")
        if raw is None:
            raw = answer["transaction"]
            assert raw not in self.transactions, "an id is never given twice"
            wait = row.get("immunity_us") or self.rules.transaction_timeout_us
            group = self.sessions[epoch][0]
            self.transactions[raw] = Transaction(raw, position, epoch, group, now, now + wait)
        assert answer["transaction"] == raw
        message.owner = self.transactions[raw]
        message.owner.messages.append(message)

    def _place(self, message: Message, now: int) -> None:
        if message.due_us > now:
            self.waiting.append(message)
            return
        message.seen_us = now
        self.queues[message.topic, message.queue].append(message)

    # Decisions

    def end(self, pairs: list[tuple[bytes, Outcome]], epoch: int, by: DecidedBy, now: int, codes: list[int]) -> None:
        wins = 0
        for (raw, outcome), code in zip(pairs, codes, strict=True):
            expected = self._end(raw, outcome, epoch, by, now)
            assert code == expected, (Code(code), expected)
            wins += expected in (Code.COMMITTED, Code.ROLLED_BACK)
        self.next_position += wins
        if wins and epoch:
            self.used[epoch] = now

    def _end(self, raw: bytes, outcome: Outcome, epoch: int, by: DecidedBy, now: int) -> Code:
        if (code := self.session_code(epoch, None)) != Code.OK:
            return code
        transaction = self.transactions.get(raw)
        if transaction is None or raw in self.gone:
            return self._left(transaction)
        if by == DecidedBy.OPERATOR:
            if epoch:
                return Code.BAD_REQUEST
        elif epoch == 0:
            return Code.UNKNOWN_SESSION
        elif transaction.group not in (self.sessions[epoch][0], None):
            return Code.WRONG_GROUP
        if transaction.state == "committed":
            return Code.CONFLICT if outcome == ROLLBACK else Code.ALREADY_COMMITTED
        if transaction.state == "rolled_back":
            return Code.CONFLICT if outcome == COMMIT else Code.ALREADY_ROLLED_BACK
        if outcome == UNKNOWN:
            return Code.NOTED
        self.decide(transaction, "committed" if outcome == COMMIT else "rolled_back", now)
        return Code.COMMITTED if outcome == COMMIT else Code.ROLLED_BACK

    def decide(self, transaction: Transaction, state: str, now: int) -> None:
        assert transaction.state in UNDECIDED, "the first decision is final (I5)"
        transaction.state = state
        transaction.times_decided += 1
        if state == "committed":
            for message in transaction.messages:
                self._place(message, now)

    # Check-back and time

    def askable(self, group: str, now: int) -> list[Transaction]:
        most = self.rules.check_max
        found = [t for t in self.transactions.values() if t.group == group and t.state == "open"]
        return [t for t in found if t.checks < most and t.due_us <= now]

    def ask(self, group: str, limit: int, now: int, asked: list[tuple[int, int, int]]) -> None:
        able = {t.first: t for t in self.askable(group, now)}
        dues = sorted(t.due_us for t in able.values())
        assert len(asked) == len({first for first, _, _ in asked}), "no transaction twice in one question"
        assert sorted(able[first].due_us for first, _, _ in asked) == dues[:limit], (
            "the longest overdue, up to the limit"
        )
        for first, epoch, attempt in asked:
            transaction = able[first]
            transaction.checks += 1
            assert (epoch, attempt) == (transaction.epoch, transaction.checks)
            transaction.due_us = now + self.rules.check_interval_us
        self.next_position += len(asked)

    def tick(self, now: int) -> None:
        due = sorted((m for m in self.waiting if m.due_us <= now), key=lambda m: m.due_us)
        for message in due:
            self.waiting.remove(message)
            self._place(message, now)
        exhausted = [t for t in self.transactions.values() if self._is_exhausted(t, now)]
        for transaction in exhausted:
            if self.rules.exhausted_rollback:
                self.decide(transaction, "rolled_back", now)
            else:
                transaction.state = "parked"
        self.next_position += len(due) + len(exhausted)

    def _is_exhausted(self, t: Transaction, now: int) -> bool:
        if t.state != "open":
            return False
        asked_out = t.checks >= self.rules.check_max and t.due_us <= now
        return asked_out or (not t.reopened and t.prepared_us + self.rules.half_retention_us <= now)

    def recheck(self, raws: list[bytes], now: int, codes: list[int]) -> None:
        chosen = set()
        for raw, code in zip(raws, codes, strict=True):
            transaction = self.transactions.get(raw)
            if transaction is None or raw in self.gone:
                assert code == self._left(transaction)
            elif transaction.state not in UNDECIDED:
                assert code == Code.TRANSACTION_DECIDED
            else:
                assert code == Code.OK
                chosen.add(raw)
        for raw in chosen:
            transaction = self.transactions[raw]
            transaction.state, transaction.checks, transaction.due_us, transaction.reopened = "open", 0, now, True
        self.next_position += len(chosen)

    # Retention

    def cut(self, topic: str, now: int, broker_us: int | None) -> None:
        """A topic's own: message by message, but what became visible at one time is counted as one."""
        rules = self.own.get(topic, TopicRules())
        kept_us = broker_us if rules.retention_us is None else rules.retention_us
        for place in [place for place in self.queues if place[0] == topic]:
            messages, head = self.queues[place], self.heads[place]
            while kept_us is not None and head < len(messages) and messages[head].seen_us < now - kept_us:
                head += 1
            if rules.retention_bytes is not None:
                for start in range(len(messages)):
                    first_of_its_time = start == 0 or messages[start - 1].seen_us < messages[start].seen_us
                    rest = sum(len(m.content[-1]) + ROW_BYTES for m in messages[start:])
                    last_time = messages[start].seen_us == messages[-1].seen_us
                    if first_of_its_time and (rest <= rules.retention_bytes or last_time):
                        head = max(head, start)
                        break
            self.heads[place] = head

    def retain(self, horizon: int, limit: int, position: int, heads: dict[tuple[str, int], int]) -> None:
        if position <= self.trimmed:
            return
        assert position <= limit
        self.trimmed = position
        assert all(m.position >= position for m in self.waiting), "what waits for its time is kept"
        expired = 0
        for transaction in self.transactions.values():
            if transaction.first >= position or transaction.raw in self.gone:
                continue
            self.gone.add(transaction.raw)
            if transaction.state in UNDECIDED:
                assert transaction.prepared_us < horizon, "undecided and young is kept"
                self.decide(transaction, "expired", horizon)
                expired += 1
        for place, messages in self.queues.items():
            assert heads[place] >= self.heads[place], "heads never go back"
            for message in messages[self.heads[place] : heads[place]]:  # an earlier retention may have been shorter
                assert message.seen_us < horizon, "visible and young is kept"
            assert all(m.position >= position for m in messages[heads[place] :])
            self.heads[place] = heads[place]
        self.next_position += expired + 1
