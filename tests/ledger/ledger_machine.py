"""The state machine of a whole ledger: every command in any order, the naive model beside it, invariants at every
step."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from consumer_model import Consumer
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import UNDECIDED, Model

from escrowmq.errors import Code
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import (
    AlterTopic,
    CreateTopic,
    Cut,
    DeleteGroup,
    EditDead,
    Forget,
    PauseGroup,
    Receive,
    Recheck,
    ResetGroup,
    Retain,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
    TopicRules,
)
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.queues.queues import ROW_BYTES
from escrowmq.message.columns import outgoing_batch
from escrowmq.model import Act, DecidedBy, Outcome, TransactionId, TransactionState
from escrowmq.schemas import SETTLING
from escrowmq.testing.ledgers import LedgerDriver, ask_us, tables_equal, wake_us

SECOND = 1_000_000
RULES = Rules(
    transaction_timeout_us=2 * SECOND,
    check_interval_us=3 * SECOND,
    check_max=2,
    half_retention_us=20 * SECOND,
    default_queues=2,
    max_attempts=2,
    retry_backoff_us=SECOND,
    max_open_transactions=8,
)
LEASE_US = 4 * SECOND

groups = st.sampled_from(["g", "g", "h"])
numbers = st.integers(0, 25)
contents = {n: {"key": "abcd"[n % 4] if n % 5 else None, "tag": ("red", "blue", None)[n % 3]} for n in range(26)}
rows = st.fixed_dictionaries(
    {"message_id": numbers, "topic": st.sampled_from(["orders", "orders", "points"])},
    optional={
        "body": st.sampled_from([b"", b"", b"other"]),
        "queue": st.integers(0, 1),
        "delay_us": st.sampled_from([SECOND, 5 * SECOND]),
        "immunity_us": st.sampled_from([SECOND, 9 * SECOND]),
    },
).map(lambda row: row | contents[row["message_id"]] | {"message_id": f"m{row['message_id']}"})
"""Mostly the same content for the same id: a repeat; sometimes another one."""
indexes = st.integers(0, 40)
jumps = st.sampled_from(["no", "a moment", "just before", "due", "due", "long after"])


class LedgerMachine(RuleBasedStateMachine):
    """``driver_of`` makes the ledger under test; planted bugs come in there or by monkeypatch."""

    ledger_rules = RULES

    @initialize()
    def start(self) -> None:
        self.driver = LedgerDriver(
            self.ledger_rules, strict=False
        )  # a decide that changes state parts it from its shadow
        self.shadow = Ledger(self.driver.ledger.shard)
        self.applied = 0
        for topic in ("orders", "points"):
            self.driver.do(CreateTopic(topic))
        self.model = Model(self.ledger_rules, self.driver.ledger.next_position)
        for place in [(topic, queue) for topic in ("orders", "points") for queue in range(2)]:
            self.model.queues[place], self.model.heads[place] = [], 0
        self.consumers: dict[str, Consumer] = {}
        self.leased: list[tuple[str, int, tuple[str, int], int]] = []
        for group, instance, transactional in (("g", "a", True), ("h", "a", True), ("p", "a", False)):
            self.open_session(group, instance, transactional)
        self.subscribe("cart", (), "earliest")

    def pass_time(self, jump: str) -> None:
        """Time that matters: to the next moment at which something is due, or just not to it."""
        now, model = self.driver.now_us, self.model
        times = [m.due_us for m in model.waiting]
        for t in model.transactions.values():
            if t.state == "open":
                times += [t.due_us, t.prepared_us + self.ledger_rules.half_retention_us]
        for consumer in self.consumers.values():
            times += consumer.times()
        due = min((at for at in times if at > now), default=now + SECOND)
        self.driver.now_us = {
            "no": now,
            "a moment": now + 1,
            "just before": due - 1,
            "due": due,
            "long after": now + 7 * SECOND,
        }[jump]

    # Producers

    def open_session(self, group: str, instance: str, transactional: bool) -> None:
        epoch = self.driver.session(group, instance, transactional=transactional)
        self.model.open(epoch, group, instance, transactional, self.driver.now_us)

    @rule(group=groups, instance=st.sampled_from("ab"))
    def open(self, group, instance) -> None:
        self.open_session(group, instance, True)

    def plain_session(self) -> int:
        """The session that sends plain messages; its process comes back if it was forgotten."""
        found = [e for e, s in self.model.sessions.items() if s[0] == "p" and e not in self.model.fenced]
        if not found:
            self.open_session("p", "a", False)
        return found[0] if found else self.model.next_epoch - 1

    @rule(
        age=st.sampled_from([0, 1, 6, 15]),
        connected=st.lists(indexes, max_size=2),
        limit=st.sampled_from([1, 100, 100]),
        jump=jumps,
    )
    def forget(self, age, connected, limit, jump) -> None:
        self.pass_time(jump)
        before = self.driver.now_us - age * SECOND
        listening = [n % self.model.next_epoch for n in connected]
        count = self.driver.do(Forget(before, np.array(listening, np.int64), limit))
        assert count == self.model.forget(before, listening, limit)

    @rule(chosen=st.lists(rows, min_size=1, max_size=4), session=st.sampled_from([0, 0, "plain", "plain", 1, 99]))
    def send(self, chosen, session) -> None:
        session = self.plain_session() if session == "plain" else session
        answers = self.driver.send(*chosen, session=session)
        self.model.produce(chosen, session, False, self.driver.now_us, answers)

    @rule(chosen=st.lists(rows, min_size=1, max_size=4), data=indexes, join=st.lists(st.none() | indexes, max_size=4))
    def prepare(self, chosen, data, join) -> None:
        session = self.session_of(data)
        raws = list(self.model.transactions)
        for row, index in zip(chosen, join, strict=False):
            if index is not None and raws:
                row["transaction"] = raws[-1 - index % len(raws)]
        answers = self.driver.prepare(session, *chosen)
        self.model.produce(chosen, session, True, self.driver.now_us, answers)

    @rule(chosen=st.lists(rows, min_size=1, max_size=4), data=indexes, body=st.sampled_from([b"", b"new"]))
    def replace(self, chosen, data, body) -> None:
        """4.3: the last prepare of an id counts. Often of what is undecided."""
        undecided = {t.messages[0] for t in self.model.transactions.values() if t.state in UNDECIDED}
        names = [name for name, message in self.model.by_id.items() if message in undecided]
        if names:
            topic, identity = names[data % len(names)]
            chosen = [*chosen, {"topic": topic, "message_id": identity, "body": body}]
        session = self.session_of(data)
        answers = self.driver.replace(session, *chosen)
        self.model.produce(chosen, session, True, self.driver.now_us, answers, replace=True)

    def session_of(self, number: int) -> int:
        """Mostly sessions that may act."""
        good = [e for e, s in self.model.sessions.items() if s[2] and e not in self.model.fenced]
        if not good:
            self.open_session("g", "a", True)
            return self.model.next_epoch - 1
        return good[number % len(good)] if number % 8 else number % (self.model.next_epoch + 1)

    def raw_of(self, number: int) -> bytes:
        """Mostly ids of transactions, sometimes with another epoch or position."""
        raws = list(self.model.transactions)
        if not raws:
            return bytes(TransactionId(self.driver.ledger.shard, 1, number))
        raw = raws[-1 - number % len(raws)]
        if number % 10:
            return raw
        right = TransactionId.from_bytes(raw)
        return bytes(TransactionId(right.shard, right.epoch + number % 3, right.position + number % 2))

    def ended(self, session: int, pairs: list[tuple[bytes, Outcome]], by: DecidedBy) -> None:
        codes = self.driver.end(session, *pairs, by=by)
        self.model.end(pairs, session, by, self.driver.now_us, codes)

    @rule(count=st.integers(1, 4), data=st.data(), outcome=st.sampled_from([None, *Outcome]), number=indexes)
    def transaction(self, count, data, outcome, number) -> None:
        """A whole one: several messages, often in one queue, plain ones between them, and perhaps its end."""
        fresh = self.model.next_position
        raw = None
        for n in range(count):
            row = {"message_id": f"t{fresh}-{n}", "topic": "orders", "queue": data.draw(st.sampled_from([0, 0, 1]))}
            if n and data.draw(st.booleans()):
                self.send([row | {"message_id": f"p{fresh}-{n}", "tag": "red"}], "plain")
            row["transaction"] = raw
            session = self.session_of(number | 1)
            answers = self.driver.prepare(session, row)
            self.model.produce([row], session, True, self.driver.now_us, answers)
            raw = raw or answers[0]["transaction"]
            if raw is None:
                return
        if outcome is not None:
            self.ended(self.session_of(number | 1), [(raw, outcome)], DecidedBy.PRODUCER)

    @rule(ends=st.lists(st.tuples(indexes, st.sampled_from(Outcome)), min_size=1, max_size=4), number=indexes)
    def end(self, ends, number) -> None:
        pairs = [(self.raw_of(n), outcome) for n, outcome in ends]
        if number % 4 == 0:
            self.ended(number % 3 // 2, pairs, DecidedBy.OPERATOR)
        else:
            self.ended(self.session_of(number), pairs, DecidedBy.PRODUCER)

    @precondition(lambda self: any(t.state in UNDECIDED for t in self.model.transactions.values()))
    @rule(number=indexes, outcome=st.sampled_from(Outcome), by=st.sampled_from([DecidedBy.PRODUCER, DecidedBy.CHECK]))
    def end_by_owner(self, number, outcome, by) -> None:
        undecided = [t for t in self.model.transactions.values() if t.state in UNDECIDED]
        transaction = undecided[number % len(undecided)]
        owners = [e for e, s in self.model.sessions.items() if s[0] == transaction.group and e not in self.model.fenced]
        if not owners:  # fenced is what prepared it, forgotten what fenced that
            self.open_session(transaction.group, "a", True)
            owners = [self.model.next_epoch - 1]
        self.ended(owners[number % len(owners)], [(transaction.raw, outcome)], by)

    # Check-back and time

    @rule(group=groups, limit=st.sampled_from([1, 100, 100]), jump=jumps)
    def ask(self, group, limit, jump) -> None:
        self.pass_time(jump)
        asked = self.driver.ask(group, limit)
        listed = zip(asked.transactions.tolist(), asked.epochs.tolist(), asked.attempts.tolist(), strict=True)
        self.model.ask(group, limit, self.driver.now_us, list(listed))

    @rule(group=groups)
    def ask_in_vain(self, group) -> None:
        """All questions of a group that may be put, none answered; then the end of waiting."""
        for _ in range(self.ledger_rules.check_max + 1):
            self.pass_time("long after")
            self.ask(group, 100, "no")
        self.tick("no")

    @rule(jump=jumps)
    def tick(self, jump) -> None:
        self.pass_time(jump)
        self.driver.tick()
        self.model.tick(self.driver.now_us)
        for consumer in self.consumers.values():
            consumer.tick(self.driver.now_us)
        self.model.next_position = max(self.model.next_position, self.driver.ledger.next_position)

    @rule(numbers=st.lists(indexes, min_size=1, max_size=3))
    def recheck(self, numbers) -> None:
        raws = [self.raw_of(n) for n in numbers]
        codes = self.driver.do(Recheck(pa.array(raws, pa.binary(16)))).tolist()
        self.model.recheck(raws, self.driver.now_us, codes)

    @rule(age=st.sampled_from([0, 0, 2, 10]), segment=st.sampled_from([1, 2, 3, 3]), jump=jumps)
    def retain(self, age, segment, jump) -> None:
        self.pass_time(jump)
        ledger = self.driver.ledger
        horizon, limit = self.driver.now_us - age * SECOND, ledger.next_position * segment // 3
        position = self.driver.do(Retain(horizon, limit))
        heads = {place: ledger.queue(ledger.queue_id(*place)).head for place in self.model.queues}
        self.model.retain(horizon, limit, position, heads)
        for consumer in self.consumers.values():
            consumer.meet(self.model.queues)
            consumer.trim(heads)

    @rule(
        topic=st.sampled_from(["orders", "points"]),
        age=st.sampled_from([None, None, 3, 20]),
        size=st.sampled_from([None, None, 1, 2 * ROW_BYTES]),
        jump=jumps,
    )
    def keep(self, topic, age, size, jump) -> None:
        """A person gives a topic a retention of its own, or takes it back."""
        self.pass_time(jump)
        rules = TopicRules(retention_us=age and age * SECOND, retention_bytes=size)
        reset = [name for name in ("retention_us", "retention_bytes") if getattr(rules, name) is None]
        self.driver.do(AlterTopic(topic, None, rules, reset))
        self.model.own[topic] = rules
        self.model.cut(topic, self.driver.now_us, None)
        self.tell_consumers()

    @rule(age=st.sampled_from([0, 5, 10]), jump=jumps)
    def cut(self, age, jump) -> None:
        self.pass_time(jump)
        self.driver.do(Cut(age * SECOND))
        longer = any((rules.retention_us or 0) > age * SECOND for rules in self.model.own.values())
        for topic in ("orders", "points"):
            if longer or self.model.own.get(topic, TopicRules()).is_own:
                self.model.cut(topic, self.driver.now_us, age * SECOND)
        self.tell_consumers()

    def tell_consumers(self) -> None:
        self.model.next_position = self.driver.ledger.next_position
        for consumer in self.consumers.values():
            consumer.meet(self.model.queues)
            consumer.trim(self.model.heads)

    # Consumers

    def subscribe(self, group: str, tags: tuple[str, ...], start: str) -> None:
        self.driver.do(Subscribe(group, Subscription(topics=("orders", "points"), tags=tags, start=start)))
        end = {place: len(messages) for place, messages in self.model.queues.items()}
        self.consumers[group] = Consumer(self.ledger_rules, tags, self.model.heads | {} if start == "earliest" else end)
        self.model.next_position = self.driver.ledger.next_position

    @precondition(lambda self: len(self.consumers) < 3)
    @rule(tags=st.sampled_from([(), ("red",)]), start=st.sampled_from(["earliest", "latest"]))
    def join(self, tags, start) -> None:
        self.subscribe(next(name for name in ("late-1", "late-2", "late-3") if name not in self.consumers), tags, start)

    @rule(group=indexes, to=st.sampled_from(["earliest", "latest", -1, -1, -4, 1, 0, "time"]), one=st.booleans())
    def reset_group(self, group, to, one) -> None:
        """I22: acknowledged progress goes back by this act alone, and leases from before are lost (I27)."""
        name, consumer = self.chosen(group)
        consumer.meet(self.model.queues)
        where = {"shift": to} if isinstance(to, int) else {"start": str(self.driver.now_us) if to == "time" else to}
        if one:
            where |= {"topic": "orders", "queue": group % 2}
        moves = self.driver.do(ResetGroup(group=name, **where))
        events = self.events_since()
        changed = [events[0][1].column(n).to_pylist() for n in ("queue_id", "offset")] if events else [[], []]
        told = {move["queue_id"]: move for move in moves}
        assert len(told) == (1 if one else 4)
        for queue_id, offset in zip(*changed, strict=True):
            place, move = self.place_of(queue_id), told[queue_id]
            assert move["now"] == offset
            before = [entry.state for entry in consumer.entries[place]]
            consumer.reset(place, offset)
            assert move["again"] == sum(state in ("acked", "discarded") for state in before[offset:])
            assert move["leased"] == before.count("leased")
            assert move["dead"] == before[offset:].count("dead")
        self.model.next_position = self.driver.ledger.next_position

    @rule(group=indexes)
    def pause_or_resume(self, group) -> None:
        name, consumer = self.chosen(group)
        consumer.paused = not consumer.paused
        self.driver.do(PauseGroup(name, (), consumer.paused))
        self.model.next_position = self.driver.ledger.next_position

    @precondition(lambda self: len(self.consumers) > 1)
    @rule(group=indexes)
    def delete_group(self, group) -> None:
        name, consumer = self.chosen(group)
        answer = self.driver.do(DeleteGroup(name, force=True))
        assert answer["dead_letters"] == len(consumer.dead())
        del self.consumers[name]
        self.leased = [one for one in self.leased if one[0] != name]
        self.model.next_position = self.driver.ledger.next_position

    def chosen(self, group: int) -> tuple[str, Consumer]:
        return list(self.consumers.items())[group % len(self.consumers)]

    def events_since(self) -> list:
        """Those of the last command."""
        return self.driver.events[self.applied :]

    @rule(group=indexes, most=st.sampled_from([1, 3, 100]), jump=jumps, acts=st.lists(st.sampled_from([*Act, None])))
    def consume(self, group, most, jump, acts) -> None:
        """Receive and settle, each message in its way; what is left is settled late or never."""
        self.pass_time(jump)
        start = len(self.leased)
        self.receive(group, most)
        for number, act in enumerate(acts[: len(self.leased) - start]):
            if act is not None:
                self.settle(len(self.leased) - 1 - start - number, act, -1)

    def receive(self, group: int, most: int) -> None:
        name, consumer = list(self.consumers.items())[group % len(self.consumers)]
        consumer.meet(self.model.queues)
        leased = self.driver.do(Receive(name, 1, most, LEASE_US))
        columns = (leased.leases, leased.queue_ids, leased.offsets, leased.attempts, leased.positions)
        got = [
            (lease, self.place_of(queue_id), offset, attempt, position)
            for lease, queue_id, offset, attempt, position in zip(*(c.tolist() for c in columns), strict=True)
        ]
        consumer.receive(self.model.queues, most, LEASE_US, self.driver.now_us, got)
        self.leased += [(name, lease, place, offset) for lease, place, offset, _, _ in got]
        self.model.next_position = self.driver.ledger.next_position

    def place_of(self, queue_id: int) -> tuple[str, int]:
        place = self.driver.ledger.queue(queue_id).place
        return place.topic, place.queue

    @precondition(lambda self: self.leased)
    @rule(
        number=indexes,
        act=st.sampled_from([Act.ACK, Act.ACK, Act.NACK, Act.EXTEND, Act.REJECT]),
        delay=st.sampled_from([-1, 2]),
    )
    def settle(self, number, act, delay) -> None:
        group, lease, place, offset = self.leased[-1 - number % len(self.leased)]
        delay_us = SECOND * 2 if act == Act.EXTEND else delay
        row = {"lease": lease, "start": offset, "count": 1, "act": int(act), "delay_us": delay_us, "cause": None}
        answer = self.driver.do(Settle(group, pa.RecordBatch.from_pylist([row], schema=SETTLING)))
        [code] = answer.column("code").to_pylist()
        self.consumers[group].settle(lease, place, offset, act, delay_us, self.driver.now_us, code)
        self.model.next_position = self.driver.ledger.next_position

    @precondition(lambda self: self.lost())
    @rule(number=indexes, act=st.sampled_from(Act))
    def settle_what_is_lost(self, number, act) -> None:
        """I27: a lease that ended does nothing any more."""
        lost = self.lost()
        self.settle(lost[number % len(lost)], act, -1)

    def lost(self) -> list[int]:
        held = [self.consumers[group].entries[place][offset].lease for group, _, place, offset in self.leased]
        return [len(held) - 1 - n for n, (_, lease, _, _) in enumerate(self.leased) if held[n] != lease]

    @precondition(lambda self: any(c.dead() for c in self.consumers.values()))
    @rule(number=indexes, retry=st.booleans())
    def settle_dead(self, number, retry) -> None:
        for name, consumer in self.consumers.items():
            for place, offset in consumer.dead()[: 1 + number % 2]:
                queue_id = self.driver.ledger.queue_id(*place)
                command = SettleDead(name, np.array([queue_id]), np.array([offset]), retry)
                [code] = self.driver.do(command).tolist()
                consumer.settle_dead(place, offset, retry, self.driver.now_us, code)
        self.model.next_position = self.driver.ledger.next_position

    @precondition(lambda self: any(c.dead() for c in self.consumers.values()))
    @rule(number=indexes)
    def edit_dead(self, number) -> None:
        """Another message in place of a dead letter: for its group alone, once, however often it is asked for."""
        name, consumer = next((name, one) for name, one in self.consumers.items() if one.dead())
        place, offset = consumer.dead()[number % len(consumer.dead())]
        position = self.driver.ledger.next_position
        identity = position.to_bytes(16, "big")
        batch = outgoing_batch([(place[0], b"edited", "k", None, None, identity, place[1], 7, 0, 0, None)], identity)
        command = EditDead(name, self.driver.ledger.queue_id(*place), offset, None, batch)
        assert self.driver.do(command) == Code.OK
        assert self.driver.do(command) == Code.ALREADY_EXISTS
        consumer.edit(place, offset, position, self.driver.now_us)
        self.model.next_position = self.driver.ledger.next_position

    # Crashes

    @rule()
    def crash_and_replay(self) -> None:
        """Without a snapshot, and with one."""
        replayed = self.driver.replay()
        assert tables_equal(replayed.snapshot(), self.driver.ledger.snapshot()), "state is the fold of the log (I28)"
        self.driver.ledger = Ledger.restore(replayed.shard, replayed.snapshot())
        assert tables_equal(replayed.snapshot(), self.driver.ledger.snapshot())

    # What must hold at every step

    @invariant()
    def the_fold_of_the_log_is_the_state(self) -> None:
        for event in self.driver.events[self.applied :]:
            self.shadow.apply(*event)
        self.applied = len(self.driver.events)
        assert tables_equal(self.shadow.snapshot(), self.driver.ledger.snapshot())

    @invariant()
    def positions_are_dense(self) -> None:
        counted = sum(batch.num_rows for _, batch, _, _ in self.driver.events)
        assert self.driver.ledger.next_position == counted == self.model.next_position

    @invariant()
    def queues_hold_what_is_committed_and_nothing_else(self) -> None:
        """I3, I4, I8, I16 to I19, I21: the same messages at the same offsets as in the model's lists."""
        for place, messages in self.model.queues.items():
            index = self.driver.ledger.queue(self.driver.ledger.queue_id(*place))
            assert (index.head, index.end) == (self.model.heads[place], len(messages))
            expected = [m.position for m in messages[index.head :]]
            assert index.positions(index.head, index.end).tolist() == expected
            assert all(m.owner is None or m.owner.state == "committed" for m in messages)
            assert all(m.due_us <= m.seen_us for m in messages)
            owners = [m.owner for m in messages if m.owner is not None and m.due_us == 0]
            runs = [o for n, o in enumerate(owners) if n == 0 or owners[n - 1] is not o]
            assert len(runs) == len(set(runs)), "a transaction's messages stand in one run"

    @invariant()
    def sessions_are_as_the_model_says(self) -> None:
        """I7: nothing is remembered that is to be forgotten, nothing forgotten that is needed."""
        sessions, model = self.driver.ledger.sessions, self.model
        assert sessions.idle(1 << 62).tolist() == sorted(model.sessions)
        used: dict[str, int] = {}
        for epoch, (group, instance, _) in model.sessions.items():
            assert sessions.instance(epoch) == instance
            used[group] = max(used.get(group, 0), model.used[epoch])
        assert {sessions.groups[number]: time_us for number, time_us in sessions.used_us().items()} == used
        codes = sessions.check(np.arange(model.next_epoch + 1), transactional=None, rules=self.driver.ledger.rules)
        assert codes.tolist() == [model.session_code(epoch, None) for epoch in range(model.next_epoch + 1)]

    @invariant()
    def transactions_are_as_the_model_says(self) -> None:
        alive = [t for t in self.model.transactions.values() if t.raw not in self.model.gone]
        for t in self.model.transactions.values():
            assert t.times_decided <= 1
            assert t.checks <= self.ledger_rules.check_max
        if alive:
            positions = np.array([t.first for t in alive])
            states, checks, due, first, epochs = self.driver.ledger.half_states(positions)
            assert [TransactionState(s).name.lower() for s in states] == [t.state for t in alive]
            assert checks.tolist() == [t.checks for t in alive]
            assert first.tolist() == positions.tolist()
            assert epochs.tolist() == [t.epoch for t in alive]
            assert [d for d, t in zip(due.tolist(), alive, strict=True) if t.state == "open"] == [
                t.due_us for t in alive if t.state == "open"
            ]
        stats = self.driver.ledger.stats(self.driver.now_us)
        assert stats["open_half_messages"] == sum(t.state == "open" for t in alive)
        assert stats["parked"] == sum(t.state == "parked" for t in alive)
        assert stats["delayed_waiting"] == len(self.model.waiting)

    @invariant()
    def what_is_due_is_announced(self) -> None:
        """A shell that sleeps until it is told misses nothing (I14)."""
        times = [t.due_us for t in self.model.askable("g", 1 << 62)]
        ledger, now_us = self.driver.ledger, self.driver.now_us
        assert ledger.checkback.ask_us("g") <= min(times, default=NEVER_US), "a lower bound before one has looked"
        assert ask_us(ledger, now_us) == min(times, default=NEVER_US)
        if self.model.waiting:
            assert ledger.wake_us <= min(m.due_us for m in self.model.waiting)
            assert wake_us(ledger, now_us) <= min(m.due_us for m in self.model.waiting)

    @invariant()
    def every_offset_of_every_group_is_accounted_for(self) -> None:
        for name, consumer in self.consumers.items():
            consumer.meet(self.model.queues)
            for place in self.model.queues:
                queue_id = self.driver.ledger.queue_id(*place)
                account = self.driver.ledger.groups.account(name, queue_id, self.driver.ledger.topics)
                consumer.check(place, self.model.queues, {k: v.tolist() for k, v in account.items()})

    def teardown(self) -> None:
        """Faults end, everything is drained: each committed message reaches each group, or is accounted for (I23,
        I25)."""
        if not hasattr(self, "driver"):
            return
        for _ in range(4):
            self.driver.advance(60)
            self.tick("no")
            for number, (name, consumer) in enumerate(self.consumers.items()):
                self.driver.do(PauseGroup(name, (), False))
                consumer.paused = False
                start = len(self.leased)
                self.receive(number, 1000)
                self.ack_all(name, [(lease, place, offset) for _, lease, place, offset in self.leased[start:]])
        final = {"acked", "dead", "discarded", "expired", "skipped"}
        for consumer in self.consumers.values():
            for place, entries in consumer.entries.items():
                for entry, message in zip(entries, self.model.queues[place], strict=True):
                    assert entry.state in final or not consumer.wants(message)
        assert all(t.state != "open" or t.reopened for t in self.model.transactions.values()), "I14"

    def ack_all(self, group: str, messages: list[tuple[int, tuple[str, int], int]]) -> None:
        if not messages:
            return
        rows = [
            {"lease": lease, "start": offset, "count": 1, "act": int(Act.ACK), "delay_us": 0, "cause": None}
            for lease, _, offset in messages
        ]
        answer = self.driver.do(Settle(group, pa.RecordBatch.from_pylist(rows, schema=SETTLING)))
        for (lease, place, offset), code in zip(messages, answer.column("code").to_pylist(), strict=True):
            self.consumers[group].settle(lease, place, offset, Act.ACK, 0, self.driver.now_us, code)
