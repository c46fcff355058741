"""One ledger, two ways: what is plain is decided and applied as rows, everything else as columns, in any mixture.

A twin goes by columns alone. At every step both give the same events and the same answers and come to the same state;
at the end the log, replayed by columns, gives that state once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from escrowmq.errors import EscrowError
from escrowmq.ledger.commands import (
    AlterProducers,
    AskChecks,
    Command,
    Configure,
    CreateTopic,
    End,
    EndRows,
    Forget,
    OpenSession,
    Prepare,
    PrepareRows,
    ProducerRules,
    Receive,
    Recheck,
    Retain,
    RowsCommand,
    Rules,
    Send,
    SendRows,
    Settle,
    SettleRows,
    Subscribe,
    Subscription,
    Tick,
)
from escrowmq.ledger.events import Decision, Few
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.frames import Content, can_pack, encode, pack
from escrowmq.message.immunity import PROPERTY
from escrowmq.message.row import OutgoingRow
from escrowmq.model import Act, DecidedBy, Outcome, TransactionId, message_id
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import tables_equal
from escrowmq.wire import Exchange
from escrowmq.wire.parcels import Row, answer_of, merged_batch

SECOND = 1_000_000
SHARD = 0xE5C0
RULES = Rules(
    transaction_timeout_us=2 * SECOND,
    check_interval_us=3 * SECOND,
    check_max=2,
    half_retention_us=20 * SECOND,
    default_queues=3,
    max_attempts=2,
    dedup_window_us=30 * SECOND,
    max_open_transactions=20,
    max_transaction_messages=4,
    max_tags=5,
    max_key_bytes=20,
    max_tag_bytes=8,
    max_properties_bytes=60,
    max_body_bytes=100,
    max_delay_us=60 * SECOND,
)
ALL_RULES = [
    *[RULES] * 6,
    replace(RULES, reject_transactional=True),
    replace(RULES, auto_create_topics=False),
    replace(RULES, mixed_groups=True, dedup_max=5),
    replace(RULES, max_open_transactions=2),
]
OWN_RULES: list[tuple[ProducerRules, tuple[str, ...]]] = [
    (ProducerRules(transaction_timeout_us=SECOND), ("kind",)),
    (ProducerRules(check_max=1), ("kind",)),
    (ProducerRules(kind="mixed"), ()),
    (ProducerRules(kind="plain"), ()),
]


@dataclass(frozen=True)
class Part:
    """A parcel as the round has it."""

    rows: Sequence[Row]
    session: int = 0
    first_id: tuple[int, int] = (0, 0)


class Ways:
    """The two ledgers. ``ways`` counts the commands that were decided as ``"rows"`` and as ``"columns"``."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.mixed, self.twin = Ledger(SHARD), Ledger(SHARD)
        self.events: list[tuple[Kind, pa.RecordBatch, int, int]] = []
        self.now_us = 1_700_000_000_000_000
        self.ways: Counter[str] = Counter()
        self.do(Configure(rules))

    def do(self, command: Command) -> Any:
        """A command that has no rows' way; the answer, or the refusal."""
        return self._both(command, None, None)

    def parcels(self, kind: Exchange, parts: Sequence[Part], options: Any = None, *, as_rows: bool = True) -> Any:
        """Parcels of one kind in one round; the answer for all their rows, or the refusal."""
        batch = merged_batch(kind, [(part.rows, part.first_id) for part in parts])
        sessions = np.concatenate([np.full(len(part.rows), part.session) for part in parts])
        few: RowsCommand
        command: Command
        match kind:
            case Exchange.PREPARE:
                command, few = Prepare(batch, sessions), PrepareRows(parts)
            case Exchange.SEND:
                command, few = Send(batch, sessions), SendRows(parts)
            case Exchange.END:
                command, few = End(batch, sessions, options), EndRows(parts, options)
            case _:
                command, few = Settle(options, batch), SettleRows(options, parts)
        return self._both(command, few if as_rows else None, kind)

    def _both(self, command: Command, few: RowsCommand | None, kind: Exchange | None) -> Any:
        wanted = self._decided(self.twin, command)
        given = None if few is None else self.mixed.decide_rows(few, self.now_us)
        if given is not None:
            assert kind is not None
            assert isinstance(wanted, Decision), f"refused as a whole by columns: {wanted!r}"
            assert wanted.repeats is None, "a repeat is not plain"
            assert given.answer == answer_of(kind, wanted.answer)
        if few is not None:
            self.ways["columns" if given is None else "rows"] += 1
        taken = self._decided(self.mixed, command) if given is None else given
        if isinstance(wanted, EscrowError) or isinstance(taken, EscrowError):
            assert repr(wanted) == repr(taken)
            return wanted
        assert [event.kind for event in taken.events] == [event.kind for event in wanted.events]
        for mine, theirs in zip(taken.events, wanted.events, strict=True):
            mine.batch.validate(full=True)
            assert mine.batch.equals(theirs.batch)
            if isinstance(mine.content, Few) and can_pack(mine.kind):
                packed = pack(mine.kind, mine.content.columns)
                packed.batch.validate(full=True)
                assert packed.batch.equals(theirs.batch)
                assert _frame(mine.kind, packed) == _frame(mine.kind, mine.batch), "other bytes than Arrow's"
            position = self.twin.next_position
            self.events.append((theirs.kind, theirs.batch, position, self.now_us))
            self.twin.apply(theirs.kind, theirs.batch, position, self.now_us)
            self.mixed.apply(mine.kind, mine.batch, position, self.now_us, mine.rows)
        return wanted.answer if kind is None else answer_of(kind, wanted.answer)

    def _decided(self, ledger: Ledger, command: Command) -> Decision | EscrowError:
        try:
            return ledger.decide(command, self.now_us)
        except EscrowError as problem:
            return problem

    def check(self) -> None:
        """Both are in the same state, and wait for the same times."""
        assert tables_equal(self.mixed.snapshot(), self.twin.snapshot())
        assert self.mixed.stats(self.now_us) == self.twin.stats(self.now_us)
        assert self.mixed.wake_us == self.twin.wake_us
        for one, other in ((self.mixed.transactions, self.twin.transactions),):
            assert (one.open, one.parked) == (other.open, other.parked)
        for group in self.twin.sessions.groups.values():
            assert self.mixed.checkback.ask_us(group) == self.twin.checkback.ask_us(group)

    def check_replay(self) -> None:
        """The log, replayed by columns, gives the state; so does the snapshot."""
        replayed = Ledger(SHARD)
        for event in self.events:
            replayed.apply(*event)
        tables = self.mixed.snapshot()
        assert tables_equal(replayed.snapshot(), tables)
        assert tables_equal(Ledger.restore(SHARD, tables).snapshot(), tables)


def _frame(kind: Kind, content: Content) -> bytes:
    """The bytes of a frame with these rows."""
    return b"".join(encode(kind, content, sequence=7, position=9, time_us=11, epoch=1, synced=5, salt=13))


few_tags = st.sampled_from([None, None, "red", "blue", "größe"])
any_tags = few_tags | st.sampled_from(["", "a", "b", "c", "d", "ttttttttt", "äääää"])
few_keys = st.sampled_from([None, None, "a", "b", "order-17", "schlüssel", "eight888", ""])
any_keys = few_keys | st.sampled_from(["k" * 21, "ü" * 11])
few_pairs = st.sampled_from([None, None, None, [], [("a", "b")], [("ä", "1"), ("b", "")]])
any_pairs = few_pairs | st.sampled_from([[("a", "x" * 61)], [(PROPERTY, "2")], [(PROPERTY, "no")]])
few_times = st.sampled_from([0, 0, 0, 0, SECOND, 5 * SECOND])
any_times = few_times | st.sampled_from([-1, 61 * SECOND])


def rows_of(*, strange: bool) -> st.SearchStrategy[OutgoingRow]:
    """Rows that are mostly plain, or that often break a rule. ``transaction`` is a number, to be replaced by an id."""
    return st.builds(
        OutgoingRow,
        topic=st.sampled_from(["orders", "orders", "orders", "points"] + ["fresh", "a b"] * strange),
        body=st.sampled_from([b"", b"x", b"body"] + [bytes(101)] * strange),
        key=any_keys if strange else few_keys,
        tag=any_tags if strange else few_tags,
        properties=any_pairs if strange else few_pairs,
        message_id=st.none()
        | st.integers(0, 40 if strange else 1 << 40).map(lambda n: message_id(f"m{n}"))
        | st.integers(0, 300 if strange else 1 << 40).map(lambda n: (3).to_bytes(8, "big") + n.to_bytes(8, "big")),
        queue=st.sampled_from([-1, -1, -1, 0, 1] + [2, 3, -2] * strange),
        born_us=st.just(1),
        delay_us=any_times if strange else few_times,
        immunity_us=any_times if strange else few_times,
        transaction=st.none() | st.none() | st.integers(0, 14 if strange else 2),  # type: ignore[arg-type]
    )


def requests_of(*, strange: bool) -> st.SearchStrategy[list[Any]]:
    """Requests of one round: a session, rows, an instance of message ids, and a step aside from where its series
    stands."""
    request = st.tuples(
        st.integers(0, 9 if strange else 5),
        st.lists(rows_of(strange=strange), min_size=1, max_size=3),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([0, 0, 0, 0, 0, -1, -3, 7] if strange else [0, 0, 0, 7]),
    )
    return st.lists(request, min_size=1, max_size=4)


requests = st.one_of(requests_of(strange=False), requests_of(strange=False), requests_of(strange=True))
jumps = st.sampled_from([0, 0, 1, SECOND, 2 * SECOND, 3 * SECOND, 15 * SECOND])
ways = st.sampled_from([True, True, True, False])


class WaysMachine(RuleBasedStateMachine):
    """Every command, in any order and either way."""

    @initialize()
    def start(self) -> None:
        self.ways = Ways()
        for topic, queues in (("orders", 3), ("points", 1)):
            self.ways.do(CreateTopic(topic, queues))
        self.sessions: list[int] = []
        self.newest: dict[str, int] = {}
        for group, instance, transactional in (("g", "a", True), ("g", "b", True), ("h", "a", True), ("p", "a", False)):
            self.open(group, instance, transactional)
        self.ways.do(Subscribe("cart", Subscription(topics=("orders", "points"))))
        self.ways.do(Subscribe("belt", Subscription(topics=("orders",), ordered=True, tags=("red", "blue"))))
        self.transactions: list[bytes] = []
        self.leased: list[tuple[int, int]] = []
        self.sequences = {1: 1, 2: 1}

    def session(self, number: int, *, half: bool) -> int:
        """Mostly one that may act; from 6 on often one that may not."""
        if number < 6:
            names = ("ga", "ga", "ga", "gb", "gb", "ha") if half else ("", "", "", "pa", "pa", "pa")
            return self.newest.get(names[number], 0)
        return [0, 99, *self.sessions][number * 7 % (2 + len(self.sessions))]

    def parts(self, given: list[Any], *, half: bool) -> list[Part]:
        parts = []
        for number, rows, instance, aside in given:
            first = max(self.sequences[instance] + aside, 0)
            self.sequences[instance] = max(self.sequences[instance], first + len(rows))
            filled = [row._replace(transaction=self.raw(row.transaction) if half else None) for row in rows]
            parts.append(Part(filled, self.session(number, half=half), (instance, first)))
        return parts

    def raw(self, number: Any) -> bytes | None:
        """Mostly a transaction of the last ones, sometimes what is none."""
        if number is None or not self.transactions or number > 14:
            return None
        raw = self.transactions[-1 - number % len(self.transactions)]
        if number != 14:
            return raw
        right = TransactionId.from_bytes(raw)
        wrong = ({"shard": 1}, {"epoch": right.epoch + 1}, {"position": 1 << 63})[len(self.transactions) % 3]
        return bytes(replace(right, **wrong))

    @rule(given=requests, as_rows=ways)
    def prepare(self, given, as_rows) -> None:
        answer = self.ways.parcels(Exchange.PREPARE, self.parts(given, half=True), as_rows=as_rows)
        self.transactions += [row[4] for row in answer if row[4] is not None and row[4] not in self.transactions[-20:]]

    @rule(given=requests, as_rows=ways)
    def send(self, given, as_rows) -> None:
        self.ways.parcels(Exchange.SEND, self.parts(given, half=False), as_rows=as_rows)

    @rule(
        given=st.lists(
            st.tuples(
                st.sampled_from([0, 0, 0, 0, 3, 5, 6, 8]),
                st.lists(st.tuples(st.integers(0, 14), st.sampled_from([*Outcome, 1, 1])), min_size=1, max_size=2),
            ),
            min_size=1,
            max_size=2,
        ),
        by=st.sampled_from([DecidedBy.PRODUCER, DecidedBy.PRODUCER, DecidedBy.CHECK]),
        as_rows=ways,
    )
    def end(self, given, by, as_rows) -> None:
        parts = []
        for number, ends in given:
            rows = [(self.raw(n) or bytes(16), int(outcome)) for n, outcome in ends]
            parts.append(Part(rows, self.session(number, half=True)))
        self.ways.parcels(Exchange.END, parts, by, as_rows=as_rows)

    @rule(most=st.sampled_from([1, 3, 100]), group=st.sampled_from(["cart", "cart", "belt"]))
    def receive(self, most, group) -> None:
        leased = self.ways.do(Receive(group, 1, most, 4 * SECOND))
        self.leased += zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True)

    @rule(
        numbers=st.lists(st.integers(0, 20), min_size=1, max_size=5),
        act=st.sampled_from([Act.ACK, Act.ACK, *Act]),
        extra=st.sampled_from([0, 0, 0, 1]),
        group=st.sampled_from(["cart", "cart", "cart", "belt", "none"]),
        as_rows=ways,
    )
    def settle(self, numbers, act, extra, group, as_rows) -> None:
        if self.leased:
            held = [self.leased[-1 - n % len(self.leased)] for n in numbers]
            rows = [(lease, offset, 1 + extra, int(act), SECOND, None) for lease, offset in held]
            self.ways.parcels(Exchange.SETTLE, [Part(rows)], group, as_rows=as_rows)

    @rule(group=st.sampled_from("gghp"), instance=st.sampled_from("ab"))
    def fence(self, group, instance) -> None:
        self.open(group, instance, group != "p")

    def open(self, group: str, instance: str, transactional: bool) -> None:
        epoch = self.ways.do(OpenSession(group, instance, transactional))
        if not isinstance(epoch, EscrowError):
            self.sessions.append(epoch)
            self.newest[group + instance] = epoch

    @rule(group=st.sampled_from("gh"), limit=st.sampled_from([1, 100]), jump=jumps)
    def ask(self, group, limit, jump) -> None:
        self.ways.now_us += jump
        self.ways.do(AskChecks(group, limit))

    @rule(jump=jumps)
    def tick(self, jump) -> None:
        self.ways.now_us += jump
        self.ways.do(Tick())

    @rule(jump=jumps, age=st.sampled_from([1, 5, 15]), number=st.integers(0, 20), data=st.data())
    def rare(self, jump, age, number, data) -> None:
        """What happens now and then in the life of a shard."""
        self.ways.now_us += jump
        before = self.ways.now_us - age * SECOND
        command = data.draw(
            st.sampled_from(
                [
                    Retain(before, self.ways.twin.next_position * 2 // 3),
                    Forget(before, np.array(list(self.newest.values()), np.int64)),
                    Recheck(pa.array([self.raw(number) or bytes(16)], pa.binary(16))),
                    *(Configure(rules) for rules in ALL_RULES),
                    *(AlterProducers(group, own, reset) for own, reset in OWN_RULES for group in "ghp"),
                ]
            )
        )
        self.ways.do(command)

    @invariant()
    def both_are_one(self) -> None:
        self.ways.check()

    def teardown(self) -> None:
        if hasattr(self, "ways"):
            self.ways.check_replay()
