"""Rows and columns are one rule: see ``ways_machine.py``. ``HYPOTHESIS_PROFILE=long`` looks much longer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ways_machine import RULES, SECOND, Part, Ways, WaysMachine

from escrowmq.errors import Code
from escrowmq.ledger.commands import (
    AlterProducers,
    Configure,
    CreateTopic,
    End,
    OpenSession,
    PrepareRows,
    ProducerRules,
    Receive,
    RowsCommand,
    Subscribe,
    Subscription,
    Tick,
)
from escrowmq.ledger.events import Decision
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.frames import Packed, pack
from escrowmq.message.hashes import hash_key, hash_keys
from escrowmq.message.immunity import PROPERTY
from escrowmq.message.row import OutgoingRow
from escrowmq.model import Act, DecidedBy, message_id
from escrowmq.schemas import Kind
from escrowmq.wire import Exchange
from escrowmq.wire.parcels import merged_batch

LONG = settings.default.max_examples > 1000

TestWays = pytest.mark.invariant("I5")(WaysMachine.TestCase)
TestWays.settings = settings(
    max_examples=settings.default.max_examples if LONG else 20,
    stateful_step_count=settings.default.stateful_step_count if LONG else 30,
)

OWN = message_id("own")


def row(**given: Any) -> OutgoingRow:
    empty: dict[str, Any] = {"topic": "orders", "body": b"b", "key": None, "tag": None, "properties": None, "queue": -1}
    empty |= {"message_id": None, "born_us": 1, "delay_us": 0, "immunity_us": 0, "transaction": None}
    return OutgoingRow(**{**empty, **given})


class Shop:
    """A ledger with a transaction and sessions of two groups, before the request that is looked at."""

    def __init__(self) -> None:
        self.ways = Ways()
        for topic, queues in (("orders", 3), ("points", 1)):
            self.ways.do(CreateTopic(topic, queues))
        names = (("g", True), ("h", True), ("g", True), ("p", False))
        self.fenced, self.other, self.shop, self.plain = (self.ways.do(OpenSession(n, "i", t)) for n, t in names)
        self.open, self.decided = (self.prepare(row(message_id=message_id(name)))[4] for name in ("open", "decided"))
        self.end(self.decided)

    def prepare(self, *rows: OutgoingRow, session: int | None = None) -> Any:
        part = Part(rows, self.shop if session is None else session, (50, self.ways.twin.next_position))
        return self.ways.parcels(Exchange.PREPARE, [part])[0]

    def end(self, transaction: bytes) -> None:
        batch = merged_batch(Exchange.END, [([(transaction, 1)], (0, 0))])
        self.ways.do(End(batch, np.array([self.shop]), DecidedBy.PRODUCER))

    def way(self, kind: Exchange, *parts: Part, options: Any = DecidedBy.PRODUCER) -> str:
        """How the request was decided; both ways agree on everything, or this fails."""
        self.ways.ways.clear()
        self.ways.parcels(kind, parts, options)
        self.ways.check()
        self.ways.check_replay()
        ((way, count),) = self.ways.ways.items()
        assert count == 1
        return way


PLAIN: dict[str, Any] = {
    "one": [row()],
    "several in two topics": [row(), row(topic="points"), row()],
    "everything that a message has": [
        row(key="ü", tag="new", properties=[("a", "ü")], message_id=OWN, queue=2, delay_us=9, born_us=7),
        row(key="", tag="", properties=[]),
    ],
    "own ids among others": [row(), row(message_id=OWN), row(message_id=message_id("own 2")), row()],
    "all within the limits": [row(body=bytes(100), key="k" * 20, tag="ä" * 4, properties=[("a", "x" * 59)])],
}
NOT_PLAIN: dict[str, Any] = {
    "unknown topic": [row(topic="new")],
    "no topic name": [row(topic="a b")],
    "an id that is known": [row(message_id=message_id("open"))],
    "an id twice": [row(message_id=OWN), row(), row(message_id=OWN)],
    "body too large": [row(body=bytes(101))],
    "key too large": [row(key="ü" * 11)],
    "tag too large": [row(tag="ä" * 5)],
    "properties too large": [row(properties=[("a", "x" * 60)])],
    "too many tags": [row(tag=tag) for tag in "abcdef"],
    "no such queue": [row(queue=3)],
    "a queue below all": [row(queue=-2)],
    "delay too long": [row(delay_us=61 * SECOND)],
    "delay below nothing": [row(delay_us=-1)],
    "immunity too long": [row(immunity_us=21 * SECOND)],
}


@pytest.mark.parametrize("rows", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("kind", [Exchange.SEND, Exchange.PREPARE])
def test_what_is_plain_goes_as_rows(kind, rows):
    shop = Shop()
    assert shop.way(kind, Part(rows, shop.plain if kind is Exchange.SEND else shop.shop, (5, 9))) == "rows"


@pytest.mark.parametrize("rows", NOT_PLAIN.values(), ids=NOT_PLAIN)
@pytest.mark.parametrize("kind", [Exchange.SEND, Exchange.PREPARE])
def test_what_is_not_plain_goes_as_columns(kind, rows):
    shop = Shop()
    assert shop.way(kind, Part(rows, shop.plain if kind is Exchange.SEND else shop.shop, (5, 9))) == "columns"


def test_half_messages_join_wait_and_are_asked_about_as_rows():
    shop = Shop()
    joins = [row(transaction=shop.open), row(), row(transaction=shop.open, delay_us=5, tag="t")]
    assert shop.way(Exchange.PREPARE, Part(joins, shop.shop, (5, 9))) == "rows"
    assert shop.way(Exchange.PREPARE, Part([row(immunity_us=7), row()], shop.shop, (5, 99))) == "rows"
    two = Part([row()], shop.shop, (5, 199)), Part([row(), row()], shop.other, (6, 1))
    assert shop.way(Exchange.PREPARE, *two) == "rows"
    shop.ways.do(AlterProducers("g", ProducerRules(transaction_timeout_us=SECOND), ()))
    assert shop.way(Exchange.PREPARE, Part([row()], shop.shop, (5, 299))) == "rows"
    shop.end(shop.open)
    assert shop.way(Exchange.PREPARE, Part([row(transaction=shop.open)], shop.shop, (5, 399))) == "columns"


def test_half_messages_that_may_not_go_as_columns():
    shop = Shop()
    wrong = {
        "decided": shop.decided,
        "unknown": bytes(16),
        "of another shard": bytes(4) + shop.open[4:],
        "of another epoch": shop.open[:4] + bytes(4) + shop.open[8:],
        "beyond all": shop.open[:8] + b"\xff" * 8,
    }
    for at, (what, transaction) in enumerate(wrong.items()):
        part = Part([row(), row(transaction=transaction)], shop.shop, (5, 9 + at * 9))
        assert shop.way(Exchange.PREPARE, part) == "columns", what
    foreign = Part([row(transaction=shop.open)], shop.other, (6, 1))
    assert shop.way(Exchange.PREPARE, foreign) == "columns"
    full = Part([row(transaction=shop.open)] * 4, shop.shop, (6, 9))
    assert shop.way(Exchange.PREPARE, full) == "columns"
    wish = Part([row(properties=[(PROPERTY, "5")])], shop.shop, (6, 19))
    assert shop.way(Exchange.PREPARE, wish) == "columns"
    for session in (0, 99, shop.fenced, shop.plain):
        assert shop.way(Exchange.PREPARE, Part([row()], session, (7 + session, 1))) == "columns"
    many = Part([row()] * 21, shop.shop, (9, 1))
    assert shop.way(Exchange.PREPARE, many) == "columns"
    shop.ways.do(Configure(replace(RULES, reject_transactional=True)))
    assert shop.way(Exchange.PREPARE, Part([row()], shop.shop, (9, 99))) == "columns"


def test_plain_messages_of_sessions_that_may_not_send_them_go_as_columns():
    shop = Shop()
    assert shop.way(Exchange.SEND, Part([row()], 0, (5, 1))) == "rows"
    for session in (99, shop.fenced, shop.shop):
        assert shop.way(Exchange.SEND, Part([row()], session, (5, session * 9))) == "columns"
    among = Part([row()], shop.plain, (6, 1)), Part([row()], shop.fenced, (6, 9))
    assert shop.way(Exchange.SEND, *among) == "columns"


@pytest.mark.invariant("I5")
def test_decisions_go_as_rows():
    """The first one, those that come too late, UNKNOWN, and what is parked; with messages that joined, and that
    wait."""
    shop = Shop()
    shop.prepare(row(transaction=shop.open, queue=1), row(transaction=shop.open, delay_us=SECOND), row(queue=1))
    other = shop.prepare(row(tag="t"))[4]
    two = Part([(shop.open, 0), (other, 2)], shop.shop), Part([(shop.decided, 1)], shop.shop)
    assert shop.way(Exchange.END, *two, options=DecidedBy.CHECK) == "rows"
    for late in ([(shop.decided, 2), (other, 0)], [(other, 1)], [(shop.open, 1)], [(shop.open, 1)]):
        assert shop.way(Exchange.END, Part(late, shop.shop)) == "rows"
    mine, theirs = shop.prepare(row())[4], shop.prepare(row(), session=shop.other)[4]
    shop.ways.now_us += 30 * SECOND
    shop.ways.do(Tick())
    ended = Part([(mine, 1)], shop.shop), Part([(theirs, 2)], shop.other)
    assert shop.way(Exchange.END, *ended) == "rows", "they are parked"
    assert shop.ways.twin.counters["parked_total"] >= 2


@pytest.mark.invariant("I7")
def test_decisions_that_are_not_plain_go_as_columns():
    shop = Shop()
    theirs = shop.prepare(row(), session=shop.other)[4]
    wrong = {
        "twice": [(shop.open, 0), (shop.open, 0)],
        "of another group": [(theirs, 1)],
        "no outcome": [(shop.open, 3)],
        "unknown": [(bytes(16), 1)],
        "of another shard": [(bytes(4) + shop.open[4:], 1)],
        "of another epoch": [(shop.open[:4] + bytes(4) + shop.open[8:], 1)],
        "none that begins there": [(shop.open[:8] + (1).to_bytes(8, "big"), 1)],
        "beyond all": [(shop.open[:8] + b"\xff" * 8, 1)],
    }
    for what, rows in wrong.items():
        assert shop.way(Exchange.END, Part(rows, shop.shop)) == "columns", what
        assert shop.way(Exchange.END, Part([(shop.decided, 1)], shop.shop), Part(rows, shop.shop)) == "columns", what
    for session in (0, 99, shop.fenced, shop.plain):
        assert shop.way(Exchange.END, Part([(shop.open, 1)], session)) == "columns"


def test_acknowledgements_go_as_rows_whatever_they_say():
    shop = Shop()
    shop.ways.do(Subscribe("cart", Subscription(topics=("orders",))))
    shop.ways.parcels(Exchange.SEND, [Part([row()] * 4, 0, (8, 1))])
    leased = shop.ways.do(Receive("cart", 1, 10, 4 * SECOND))
    runs = [(lease, offset, 1) for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True)]
    acts = [
        (Act.ACK, 0),
        (Act.ACK, 0),
        (Act.NACK, SECOND),
        (Act.EXTEND, SECOND),
        (Act.RELEASE, 0),
        (Act.NACK, -2),
        (Act.REJECT, 0),
        (9, 0),
    ]
    for act, delay in acts:
        rows = [(*run, int(act), delay, "why") for run in runs[:2]]
        assert shop.way(Exchange.SETTLE, Part(rows[:1]), Part(rows[1:]), options="cart") == "rows"
        runs = runs[1:] + runs[:1]
    assert shop.way(Exchange.SETTLE, Part([(77, 0, 1, 0, 0, None)]), options="cart") == "rows"
    assert shop.way(Exchange.SETTLE, Part([(77, 0, 1, 0, 0, None)]), options="none") == "columns"


def test_a_text_that_is_none_decides_nothing():
    """What no column takes is found while deciding, or when what was decided is packed: before anything is changed."""
    shop = Shop()
    before = shop.ways.mixed.snapshot()
    for bad in (row(key="\ud800"), row(topic="orders", properties=[("\ud800", "")]), row(born_us=1 << 63)):
        with pytest.raises((ValueError, OverflowError)):
            _packed(shop, bad)
    assert all(table.equals(before[name]) for name, table in shop.ways.mixed.snapshot().items())


def _packed(shop: Shop, bad: OutgoingRow) -> Packed:
    decision = shop.ways.mixed.decide_rows(PrepareRows([Part([bad], shop.shop, (5, 1))]), shop.ways.now_us)
    return pack(Kind.HALF, decision.events[0].content.columns)


@given(st.text(max_size=40))
@example("")
@example("eightby8")
@example("ninebytes")
def test_one_key_has_the_hash_of_its_column(key):
    assert hash_key(key) == int(hash_keys(pa.array([key], pa.utf8()))[0])


class Forgetful(Ledger):
    """A planted bug: the rows' way takes who was fenced for somebody who may act."""

    def decide_rows(self, command: RowsCommand, now_us: int) -> Decision | None:
        status = self.sessions.status

        def unfenced(epoch: int, **given: Any) -> int:
            return int(Code.OK) if (found := status(epoch, **given)) == Code.FENCED else found

        self.sessions.status = unfenced  # type: ignore[method-assign]
        try:
            return super().decide_rows(command, now_us)
        finally:
            del self.sessions.status


def prepares(shop: Shop, session: int) -> tuple[Exchange, Part]:
    return Exchange.PREPARE, Part([row()], session, (5, 1))


def ends(shop: Shop, session: int) -> tuple[Exchange, Part]:
    return Exchange.END, Part([(shop.open, 1)], session)


@pytest.mark.invariant("I7")
@pytest.mark.parametrize("request_of", [prepares, ends])
def test_a_plain_case_that_forgets_a_fence_is_caught(monkeypatch, request_of):
    monkeypatch.setattr("ways_machine.Ledger", Forgetful)
    shop = Shop()
    with pytest.raises(AssertionError):
        shop.way(*request_of(shop, shop.fenced))
