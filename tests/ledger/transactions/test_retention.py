"""Retention: nothing young, waiting or undecided-young is let go; what is old and undecided is decided first (4.11)."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger import listings
from escrowmq.ledger.commands import Receive, Recheck, Retain, Rules, Subscribe, Subscription
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions import table
from escrowmq.model import COMMIT, ROLLBACK, DecidedBy, TransactionId, TransactionState
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import LedgerDriver, tables_equal

SECOND = 1_000_000


def retain(driver: LedgerDriver, seconds: float, limit: int | None = None) -> int:
    """Let go of what is older than ``seconds``; segments end wherever it suits."""
    position: int = driver.do(
        Retain(driver.now_us - int(seconds * 1e6), driver.ledger.next_position if limit is None else limit)
    )
    return position


def test_old_messages_leave_young_ones_stay(driver):
    driver.send(*[{"queue": 0}] * 3)
    driver.advance(10)
    young = driver.send(*[{"queue": 0}] * 2)
    assert retain(driver, 5) == young[0]["position"]
    assert driver.queue() == [a["position"] for a in young]
    index = driver.ledger.queue(0)
    assert (index.head, index.end) == (3, 5)


def test_exactly_as_old_as_the_retention_stays(driver):
    [r] = driver.send({})
    driver.advance(10)
    assert retain(driver, 10) <= r["position"]
    driver.now_us += 1
    assert retain(driver, 10) > r["position"]


def test_segments_reach_only_so_far(driver):
    answers = driver.send(*[{"queue": 0}] * 4)
    driver.advance(10)
    assert retain(driver, 1, limit=answers[2]["position"]) == answers[2]["position"]
    assert driver.queue() == [a["position"] for a in answers[2:]]


def test_nothing_to_let_go_is_no_event(driver):
    [r] = driver.send({})
    driver.advance(20)
    assert retain(driver, 10, limit=r["position"]) == r["position"]
    events = len(driver.events)
    for seconds, limit in ((10, r["position"]), (10, 0), (30, r["position"] + 1)):
        assert retain(driver, seconds, limit=limit) == r["position"]
    assert len(driver.events) == events


def test_a_message_counts_from_its_becoming_visible(driver):
    """Prepared long ago, committed just now: as young as its commit."""
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(100)
    driver.end(session, (r["transaction"], COMMIT))
    assert retain(driver, 50) <= r["position"]
    driver.advance(51)
    assert retain(driver, 50) > r["position"]
    assert driver.visible() == []


def test_delayed_messages_stop_retention(driver):
    [r] = driver.send({"delay_us": 100 * SECOND})
    driver.advance(50)
    assert retain(driver, 10) == r["position"]
    driver.advance(50)
    driver.tick()
    assert retain(driver, 10) == r["position"]
    assert driver.visible() == [r["position"]]
    driver.advance(11)
    assert retain(driver, 10) > r["position"]


def test_4_11_old_and_undecided_is_expired_first_never_just_dropped(driver):
    session = driver.session()
    receipts = driver.prepare(session, {}, {}, {})
    driver.end(session, (receipts[2]["transaction"], ROLLBACK))
    driver.advance(10)
    before = len(driver.events)
    retain(driver, 5)
    kinds = [kind for kind, *_ in driver.events[before:]]
    assert kinds == [Kind.DECIDED, Kind.TRIMMED]
    decided = driver.events[before][1].to_pylist()
    assert [d["transaction"] for d in decided] == [r["position"] for r in receipts[:2]]
    assert {(d["state"], d["decided_by"]) for d in decided} == {(TransactionState.EXPIRED, DecidedBy.RETENTION)}
    assert driver.ledger.counters["expired_total"] == 2
    assert driver.ledger.stats(driver.now_us)["open_half_messages"] == 0
    assert driver.end(session, (receipts[0]["transaction"], COMMIT)) == [Code.EXPIRED]
    assert driver.end(session, (receipts[2]["transaction"], ROLLBACK)) == [Code.UNKNOWN_TRANSACTION]
    states, _, _, first, _ = driver.ledger.half_states(np.array([r["position"] for r in receipts]))
    assert set(states.tolist()) == {TransactionState.EXPIRED}
    assert set(first.tolist()) == {-1}


@pytest.mark.invariant("I12")
def test_parked_is_kept_for_the_retention_and_then_expired():
    driver = LedgerDriver(Rules(half_retention_us=SECOND))
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(2)
    driver.tick()
    assert listings.transactions(driver.ledger)[0]["state"] == "parked"
    retain(driver, 3)
    assert listings.transactions(driver.ledger)[0]["state"] == "parked"
    driver.advance(2)
    retain(driver, 3)
    assert listings.transactions(driver.ledger) == []
    assert listings.producers_list(driver.ledger)[0]["parked"] == 0
    assert driver.end(session, (r["transaction"], COMMIT)) == [Code.EXPIRED]


@pytest.mark.invariant("I12")
def test_i12_whoever_comes_after_retention_hears_that_it_expired(driver):
    """Also the producer who repeats its prepare, and the message that joined; after a restart, too; I6 as ever."""
    session = driver.session()
    [first] = driver.prepare(session, {"message_id": "a"})
    [joined] = driver.prepare(session, {"message_id": "b", "transaction": first["transaction"]})
    driver.advance(10)
    retain(driver, 5)
    identity = TransactionId.from_bytes(first["transaction"])
    others = [
        bytes(TransactionId(identity.shard, identity.epoch + 1, identity.position)),
        bytes(TransactionId(identity.shard, identity.epoch, joined["position"])),
    ]
    restored = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    for ledger in (driver.ledger, restored, driver.replay()):
        assert tables_equal(ledger.snapshot(), driver.ledger.snapshot())
        driver.ledger = ledger
        assert (
            driver.end(session, (first["transaction"], COMMIT), (first["transaction"], ROLLBACK)) == [Code.EXPIRED] * 2
        )
        assert driver.end(session, *((other, COMMIT) for other in others)) == [Code.UNKNOWN_TRANSACTION] * 2
        for repeat in ({"message_id": "a"}, {"message_id": "b", "transaction": first["transaction"]}):
            assert driver.prepare(session, repeat)[0]["code"] == Code.EXPIRED
        assert driver.do(Recheck(pa.array([first["transaction"]], pa.binary(16)))).tolist() == [Code.EXPIRED]


def test_what_expired_is_remembered_within_a_bound(driver, monkeypatch):
    monkeypatch.setattr(table, "MAX_EXPIRED", 2)
    session = driver.session()
    receipts = driver.prepare(session, {}, {}, {})
    driver.advance(10)
    retain(driver, 5)
    codes = driver.end(session, *((r["transaction"], COMMIT) for r in receipts))
    assert codes == [Code.UNKNOWN_TRANSACTION, Code.EXPIRED, Code.EXPIRED]


def test_young_and_undecided_stops_retention(driver):
    session = driver.session()
    [old] = driver.prepare(session, {})
    driver.advance(10)
    [young] = driver.prepare(session, {})
    driver.send({})
    driver.advance(3)
    assert retain(driver, 5) == young["position"]
    assert listings.transactions(driver.ledger, state="open")[0]["position"] == young["position"]
    assert driver.end(session, (young["transaction"], COMMIT)) == [Code.COMMITTED]
    assert driver.end(session, (old["transaction"], COMMIT)) == [Code.EXPIRED]


def test_a_stop_keeps_older_undecided_ones_above_it_open(driver):
    """What stays in the log need not be expired, however old."""
    session = driver.session()
    driver.send({"delay_us": 100 * SECOND})
    [r] = driver.prepare(session, {})
    driver.advance(50)
    retain(driver, 5)
    assert driver.end(session, (r["transaction"], COMMIT)) == [Code.COMMITTED]


def test_joined_messages_stay_with_a_transaction_that_stays(driver):
    session = driver.session()
    driver.send({})
    [begun] = driver.prepare(session, {})
    driver.advance(10)
    joined = driver.prepare(session, {"transaction": begun["transaction"]}, {"transaction": begun["transaction"]})
    driver.end(session, (begun["transaction"], COMMIT))
    assert retain(driver, 5) == begun["position"]
    assert driver.visible() == sorted([begun["position"], *(j["position"] for j in joined)])


@pytest.mark.invariant("I16")
def test_ids_dedup_and_offsets_go_on_afterwards(driver):
    session = driver.session()
    driver.send(*[{"queue": 0}] * 5)
    driver.prepare(session, *[{}] * 5)
    driver.advance(10)
    retain(driver, 1)
    [answer] = driver.send({"queue": 0})
    assert answer["offset"] == 5
    [r] = driver.prepare(session, {"queue": 0})
    assert TransactionId.from_bytes(r["transaction"]).position == r["position"] > answer["position"]
    driver.end(session, (r["transaction"], COMMIT))
    assert driver.queue() == [answer["position"], r["position"]]
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


@pytest.mark.invariant("I26")
def test_what_a_consumer_group_missed_expires_for_it(driver):
    driver.send(*[{"queue": 0}] * 4)
    driver.do(Subscribe("cart", Subscription(topics=("orders",))))
    driver.do(Receive("cart", 1, 2, 60 * SECOND))
    driver.advance(10)
    [late] = driver.send({"queue": 0})
    retain(driver, 5)
    leased = driver.do(Receive("cart", 1, 10, 60 * SECOND))
    assert leased.positions.tolist() == [late["position"]]


@pytest.mark.parametrize("restore", [False, True])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["send", "delay", "prepare", "join", "commit", "rollback", "pause", "tick", "retain"]),
            st.integers(0, 8),
        ),
        max_size=40,
    )
)
def test_nothing_young_is_ever_lost(steps, restore):
    """Visible messages by the time they became so, undecided ones by their prepare, against plain dictionaries."""
    driver = LedgerDriver(Rules(default_queues=2), strict=False)
    session = driver.session()
    plain = driver.session("p", transactional=False)
    seen: dict[int, int] = {}  # position → when visible
    waiting: dict[int, int] = {}  # position → when due
    open_: dict[bytes, tuple[int, list[int]]] = {}
    for act, n in steps:
        raw = list(open_)[n % len(open_)] if open_ else None
        if act in ("send", "delay"):
            [a] = driver.send({"key": str(n), "delay_us": (n + 1) * SECOND if act == "delay" else 0}, session=plain)
            (seen if act == "send" else waiting)[a["position"]] = driver.now_us + (n + 1) * SECOND * (act == "delay")
        elif act == "prepare":
            [a] = driver.prepare(session, {"key": str(n)})
            open_[a["transaction"]] = (driver.now_us, [a["position"]])
        elif act == "join" and raw is not None:
            [a] = driver.prepare(session, {"key": str(n), "transaction": raw})
            open_[raw][1].append(a["position"])
        elif act in ("commit", "rollback") and raw is not None:
            driver.end(session, (raw, COMMIT if act == "commit" else ROLLBACK))
            _, positions = open_.pop(raw)
            seen |= dict.fromkeys(positions if act == "commit" else [], driver.now_us)
        elif act == "pause":
            driver.advance(n)
        elif act == "tick":
            driver.tick()
            due = [p for p, at in waiting.items() if at <= driver.now_us]
            seen |= dict.fromkeys(due, driver.now_us)
            for position in due:
                del waiting[position]
        elif act == "retain":
            limit = retain(driver, n)
            horizon = driver.now_us - n * SECOND
            visible = set(driver.visible() if driver.ledger.topics.has("orders") else [])
            left = set(seen) - visible
            assert not any(seen[p] >= horizon for p in left), "visible and young is kept"
            assert all(p < limit or _passed(p, left, limit, seen) for p in left)
            seen = {p: at for p, at in seen.items() if p in visible}
            assert all(p >= limit for p in waiting)
            assert all(min(ps) >= limit for at, ps in open_.values() if at >= horizon)
            open_ = {raw: (at, ps) for raw, (at, ps) in open_.items() if min(ps) >= limit}
        if restore:
            driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
        visible = driver.visible() if driver.ledger.topics.has("orders") else []
        assert visible == sorted(seen)
    assert driver.end(session, *((raw, COMMIT) for raw in open_)) == [Code.COMMITTED] * len(open_)


def _passed(position: int, left: set[int], limit: int, seen: dict[int, int]) -> bool:
    """A message leaves together with one above it in its queue that does: both are old enough."""
    return any(other < limit and seen[other] >= seen[position] for other in left)
