"""Batches of numbered writers: decided once, all or nothing, and their repeats roll back what lost."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import CommitBatch, Retain, Rules
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions.writers import Writers
from escrowmq.model import COMMIT, ROLLBACK
from escrowmq.schemas import ID, Kind
from escrowmq.testing.ledgers import LedgerDriver, tables_equal

QUERY = b"q" * 16


def commit(driver, session, batch, *receipts, writer=QUERY):
    ids = pa.array([r["transaction"] for r in receipts], ID)
    return driver.do(CommitBatch(writer, batch, ids, session))


@pytest.fixture
def driver():
    return LedgerDriver()


def bodies(driver):
    return sorted(driver.visible())


@pytest.mark.invariant("I42")
def test_a_batch_is_committed_once_and_its_repeat_rolls_back_what_lost(driver):
    session = driver.session()
    first = driver.prepare(session, {"body": b"a"}, {"body": b"b"})
    assert commit(driver, session, 0, *first) == {"status": "COMMITTED", "last": 0, "rolled_back": 0}
    seen = bodies(driver)
    assert len(seen) == 2
    again = driver.prepare(session, {"body": b"a"}, {"body": b"b"})
    assert commit(driver, session, 0, *again) == {"status": "ALREADY_COMMITTED", "last": 0, "rolled_back": 2}
    assert bodies(driver) == seen
    assert driver.end(session, (again[0]["transaction"], COMMIT)) == [Code.CONFLICT]


def test_the_same_commit_repeated_after_a_lost_answer_changes_nothing(driver):
    session = driver.session()
    receipts = driver.prepare(session, {}, {})
    commit(driver, session, 3, *receipts)
    before = driver.ledger.snapshot()
    assert commit(driver, session, 3, *receipts) == {"status": "ALREADY_COMMITTED", "last": 3, "rolled_back": 0}
    assert tables_equal(before, driver.ledger.snapshot())


@pytest.mark.invariant("I42")
def test_one_frame_decides_all(driver):
    session = driver.session()
    receipts = driver.prepare(session, *({} for _ in range(50)))
    events = len(driver.events)
    commit(driver, session, 0, *receipts)
    assert [kind for kind, *_ in driver.events[events:]] == [Kind.BATCH_DECIDED]
    assert len(driver.visible()) == 50


def test_a_batch_of_nothing_is_remembered(driver):
    session = driver.session()
    assert commit(driver, session, 0)["status"] == "COMMITTED"
    late = driver.prepare(session, {})
    assert commit(driver, session, 0, *late) == {"status": "ALREADY_COMMITTED", "last": 0, "rolled_back": 1}
    assert driver.visible() == []


def test_older_batches_are_repeats_and_gaps_are_allowed(driver):
    session = driver.session()
    commit(driver, session, 7, *driver.prepare(session, {}))
    assert commit(driver, session, 5, *driver.prepare(session, {}))["status"] == "ALREADY_COMMITTED"
    assert commit(driver, session, 9, *driver.prepare(session, {}))["status"] == "COMMITTED"
    assert len(driver.visible()) == 2


def test_what_the_commit_does_not_name_has_lost(driver):
    session, peer, other = driver.session("g", "a"), driver.session("g", "b"), driver.session("h", "a")
    loser, winner = driver.prepare(session, {"body": b"speculative"}, {"body": b"counts"})
    [zombie], [foreign] = driver.prepare(peer, {}), driver.prepare(other, {})
    assert commit(driver, session, 0, winner)["rolled_back"] == 2
    assert len(driver.visible()) == 1
    for lost in (loser, zombie):
        assert driver.end(session, (lost["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.end(other, (foreign["transaction"], COMMIT)) == [Code.COMMITTED]


@pytest.mark.parametrize("spoil", ["rolled back", "unknown", "foreign"])
def test_one_transaction_that_cannot_be_committed_refuses_the_whole_batch(driver, spoil):
    session, stranger = driver.session("g", "a"), driver.session("h", "a")
    good, bad = driver.prepare(session, {}, {})
    if spoil == "rolled back":
        driver.end(session, (bad["transaction"], ROLLBACK))
    elif spoil == "unknown":
        bad = {"transaction": bad["transaction"][:8] + b"\xff" * 8}
    else:
        [bad] = driver.prepare(stranger, {})
    before = driver.ledger.snapshot()
    with pytest.raises(EscrowError) as refused:
        commit(driver, session, 0, good, bad)
    expected = {"rolled back": Code.CONFLICT, "unknown": Code.UNKNOWN_TRANSACTION, "foreign": Code.WRONG_GROUP}
    assert refused.value.code is expected[spoil]
    assert tables_equal(before, driver.ledger.snapshot())
    assert driver.visible() == []


def test_writers_belong_to_their_group_and_sessions_are_checked(driver):
    session, stranger = driver.session("g", "a"), driver.session("h", "a")
    commit(driver, session, 0)
    with pytest.raises(EscrowError) as refused:
        commit(driver, session, 0, writer=b"x" * 16)
    assert refused.value.code is Code.WRONG_GROUP
    for epoch, code in ((stranger, Code.WRONG_GROUP), (0, Code.UNKNOWN_SESSION), (99, Code.UNKNOWN_SESSION)):
        with pytest.raises(EscrowError) as refused:
            commit(driver, epoch, 1)
        assert refused.value.code is code
    driver.session("g", "a")
    with pytest.raises(EscrowError) as refused:
        commit(driver, session, 1)
    assert refused.value.code is Code.FENCED


def test_the_number_of_writers_is_bounded():
    driver = LedgerDriver(Rules(max_writers=2))
    sessions = [driver.session(f"g{n}") for n in range(3)]
    for n in range(2):
        commit(driver, sessions[n], 0, writer=bytes([n]) * 16)
    with pytest.raises(EscrowError) as refused:
        commit(driver, sessions[2], 0, writer=bytes([2]) * 16)
    assert refused.value.code is Code.TOO_MANY
    assert commit(driver, sessions[1], 1, writer=bytes([1]) * 16)["status"] == "COMMITTED"


def test_a_repeat_whose_first_attempt_left_with_retention_is_still_a_repeat():
    driver = LedgerDriver()
    session = driver.session()
    receipts = driver.prepare(session, {}, {})
    commit(driver, session, 0, *receipts)
    driver.advance(10)
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    assert commit(driver, session, 0, *receipts)["status"] == "ALREADY_COMMITTED"


def test_snapshots_keep_writers_and_older_ones_have_none(driver):
    session = driver.session()
    commit(driver, session, 4, *driver.prepare(session, {}))
    tables = driver.ledger.snapshot()
    again = Ledger.restore(driver.ledger.shard, tables)
    assert again.writers.last(QUERY) == 4
    assert tables_equal(tables, again.snapshot())
    del tables["writers"]
    assert Ledger.restore(driver.ledger.shard, tables).writers.last(QUERY) is None


attempts = st.lists(
    st.tuples(st.sampled_from([b"a" * 16, b"b" * 16]), st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=25
)


def outcome_of(history):
    """Which attempts became visible, by the rule in words: the first attempt of a number above all before it."""
    last, visible = {}, []
    for attempt, (writer, batch, size, told) in enumerate(history):
        if not told:
            continue
        if batch > last.get(writer, -1):
            last[writer] = batch
            visible += [attempt] * size
    return visible


def replayed(history):
    driver = LedgerDriver(strict=False)
    sessions, owner = {name * 16: driver.session(name.decode()) for name in (b"a", b"b")}, {}
    for attempt, (writer, batch, size, told) in enumerate(history):
        session = sessions[writer]
        receipts = driver.prepare(session, *({} for _ in range(size))) if size else []
        owner |= {receipt["position"]: attempt for receipt in receipts}
        if told:  # else: the attempt died before its driver spoke
            commit(driver, session, batch, *receipts, writer=writer)
    positions = np.concatenate([q.positions(q.head, q.end) for q in driver.ledger.topics.queues] or [[]])
    return sorted(owner[int(position)] for position in positions)


@given(attempts)
def test_whatever_the_attempts_each_batch_counts_once(history):
    assert replayed(history) == outcome_of(history)


def test_planted_a_repeat_that_commits_again_is_caught(monkeypatch):
    monkeypatch.setattr(Writers, "apply_decided", lambda self, batch, time_us: None)
    history = [(b"a" * 16, 0, 2, True), (b"a" * 16, 0, 2, True)]
    assert replayed(history) != outcome_of(history)
