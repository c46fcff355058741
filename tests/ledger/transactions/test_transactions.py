"""Decisions: every cell of the state table, repeats within a batch, and ends that have no right."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger.commands import Recheck, Retain, Rules
from escrowmq.ledger.transactions.table import decided
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, DecidedBy, Outcome, TransactionId, TransactionState
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import LedgerDriver, tables_equal

HALF_RETENTION = 100.0
RULES = Rules(half_retention_us=int(HALF_RETENTION * 1e6), check_max=1)

T = TransactionState
TABLE = {  # (state, outcome) → (answer, state after)
    (T.OPEN, COMMIT): (Code.COMMITTED, T.COMMITTED),
    (T.OPEN, ROLLBACK): (Code.ROLLED_BACK, T.ROLLED_BACK),
    (T.OPEN, UNKNOWN): (Code.NOTED, T.OPEN),
    (T.PARKED, COMMIT): (Code.COMMITTED, T.COMMITTED),
    (T.PARKED, ROLLBACK): (Code.ROLLED_BACK, T.ROLLED_BACK),
    (T.PARKED, UNKNOWN): (Code.NOTED, T.PARKED),
    (T.COMMITTED, COMMIT): (Code.ALREADY_COMMITTED, T.COMMITTED),
    (T.COMMITTED, ROLLBACK): (Code.CONFLICT, T.COMMITTED),
    (T.COMMITTED, UNKNOWN): (Code.ALREADY_COMMITTED, T.COMMITTED),
    (T.ROLLED_BACK, COMMIT): (Code.CONFLICT, T.ROLLED_BACK),
    (T.ROLLED_BACK, ROLLBACK): (Code.ALREADY_ROLLED_BACK, T.ROLLED_BACK),
    (T.ROLLED_BACK, UNKNOWN): (Code.ALREADY_ROLLED_BACK, T.ROLLED_BACK),
    (T.EXPIRED, COMMIT): (Code.EXPIRED, T.EXPIRED),
    (T.EXPIRED, ROLLBACK): (Code.EXPIRED, T.EXPIRED),
    (T.EXPIRED, UNKNOWN): (Code.EXPIRED, T.EXPIRED),
}


def state_of(driver: LedgerDriver, raw: bytes) -> TransactionState:
    position = TransactionId.from_bytes(raw).position
    return TransactionState(int(driver.ledger.half_states(np.array([position]))[0][0]))


def bring_to(driver: LedgerDriver, session: int, state: TransactionState) -> bytes:
    """A transaction of one message in ``state``."""
    [receipt] = driver.prepare(session, {})
    raw = receipt["transaction"]
    if state == T.COMMITTED:
        driver.end(session, (raw, COMMIT))
    elif state == T.ROLLED_BACK:
        driver.end(session, (raw, ROLLBACK))
    elif state == T.PARKED:
        driver.advance(HALF_RETENTION)
        driver.tick()
    elif state == T.EXPIRED:
        # Expired, but with an older stop in the log, so that it has not left.
        driver.events.clear()
        event = decided(np.array([TransactionId.from_bytes(raw).position]), T.EXPIRED, DecidedBy.RETENTION, 0)
        driver.ledger.apply(event.kind, event.batch, driver.ledger.next_position, driver.now_us)
    assert state_of(driver, raw) == state
    return raw


@pytest.mark.invariant("I5")
@pytest.mark.parametrize("by", [DecidedBy.PRODUCER, DecidedBy.CHECK, DecidedBy.OPERATOR])
@pytest.mark.parametrize(("cell", "expected"), TABLE.items(), ids=lambda v: "-".join(getattr(x, "name", "") for x in v))
def test_i5_every_cell_of_the_state_table(cell, expected, by):
    driver = LedgerDriver(RULES)
    session = driver.session()
    raw = bring_to(driver, session, cell[0])
    visible = driver.visible()
    assert driver.end(0 if by == DecidedBy.OPERATOR else session, (raw, cell[1]), by=by) == [expected[0]]
    assert state_of(driver, raw) == expected[1]
    newly = [TransactionId.from_bytes(raw).position] if expected[0] == Code.COMMITTED else []
    assert driver.visible() == visible + newly


@pytest.mark.invariant("I5")
def test_the_table_is_complete():
    assert set(TABLE) == {(state, outcome) for state in TransactionState for outcome in Outcome}


@pytest.mark.parametrize(
    ("state", "code", "after"),
    [
        (T.OPEN, Code.OK, T.OPEN),
        (T.PARKED, Code.OK, T.OPEN),
        (T.COMMITTED, Code.TRANSACTION_DECIDED, T.COMMITTED),
        (T.ROLLED_BACK, Code.TRANSACTION_DECIDED, T.ROLLED_BACK),
        (T.EXPIRED, Code.TRANSACTION_DECIDED, T.EXPIRED),
    ],
)
def test_recheck_column_of_the_state_table(state, code, after):
    driver = LedgerDriver(RULES)
    raw = bring_to(driver, driver.session(), state)
    assert driver.do(Recheck(pa.array([raw], pa.binary(16)))).tolist() == [code]
    assert state_of(driver, raw) == after


def test_a_decision_is_one_small_event(driver):
    session = driver.session()
    receipts = driver.prepare(session, *[{"body": b"x" * 1000}] * 3)
    before = len(driver.events)
    driver.end(session, *((r["transaction"], COMMIT) for r in receipts))
    [(kind, batch, _, _)] = driver.events[before:]
    assert (kind, batch.num_rows) == (Kind.DECIDED, 3)
    assert batch.nbytes <= 3 * 16


@pytest.mark.invariant("I5")
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Outcome)), max_size=10), st.integers(0, 3))
def test_a_batch_answers_as_its_rows_one_after_the_other(ends, parked):
    together, apart = LedgerDriver(RULES, strict=False), LedgerDriver(RULES, strict=False)
    for driver in (together, apart):
        driver.session()
        driver.prepare(1, *({"message_id": str(n), "key": str(n)} for n in range(parked)))
        driver.advance(HALF_RETENTION)
        driver.tick()
        ids = [r["transaction"] for r in driver.prepare(1, *({"message_id": str(n), "key": str(n)} for n in range(4)))]
    pairs = [(ids[n], outcome) for n, outcome in ends]
    assert together.end(1, *pairs) == [code for pair in pairs for code in apart.end(1, pair)]
    assert [state_of(together, raw) for raw in ids] == [state_of(apart, raw) for raw in ids]
    assert [together.queue(queue=q) for q in range(4)] == [apart.queue(queue=q) for q in range(4)]


def wrong_ends(driver: LedgerDriver, raw: bytes):
    right = TransactionId.from_bytes(raw)
    yield TransactionId(right.shard + 1, right.epoch, right.position), Code.WRONG_SHARD
    yield TransactionId(0, right.epoch, right.position), Code.WRONG_SHARD
    yield TransactionId(right.shard, right.epoch + 1, right.position), Code.UNKNOWN_TRANSACTION
    yield TransactionId(right.shard, 0, right.position), Code.UNKNOWN_TRANSACTION
    yield TransactionId(right.shard, 2**32 - 1, right.position), Code.UNKNOWN_TRANSACTION
    for position in (right.position - 1, right.position + 1, 0, 2**63, 2**64 - 1):
        yield TransactionId(right.shard, right.epoch, position), Code.UNKNOWN_TRANSACTION


@pytest.mark.invariant("I6")
@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("by", [DecidedBy.PRODUCER, DecidedBy.OPERATOR])
def test_i6_ids_that_are_wrong_in_one_part_touch_nothing(driver, outcome, by):
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    before, events = driver.ledger.snapshot(), len(driver.events)
    for wrong, code in wrong_ends(driver, receipt["transaction"]):
        assert driver.end(0 if by == DecidedBy.OPERATOR else session, (bytes(wrong), outcome), by=by) == [code], wrong
    assert len(driver.events) == events
    assert tables_equal(before, driver.ledger.snapshot())


@pytest.mark.invariant("I6")
def test_i6_an_id_names_a_half_message_that_began_a_transaction_not_one_that_joined(driver):
    session = driver.session()
    [begun] = driver.prepare(session, {})
    [joined] = driver.prepare(session, {"transaction": begun["transaction"]})
    inner = TransactionId(driver.ledger.shard, session, joined["position"])
    assert driver.end(session, (bytes(inner), COMMIT)) == [Code.UNKNOWN_TRANSACTION]


@pytest.mark.invariant("I15")
def test_i15_only_a_session_of_the_group_ends_a_transaction(driver):
    owner, peer, stranger = driver.session("g", "a"), driver.session("g", "b"), driver.session("h", "a")
    one, two = driver.prepare(owner, {}, {})
    for by in (DecidedBy.PRODUCER, DecidedBy.CHECK):
        assert driver.end(stranger, (one["transaction"], COMMIT), by=by) == [Code.WRONG_GROUP]
        assert driver.end(0, (one["transaction"], COMMIT), by=by) == [Code.UNKNOWN_SESSION]
        assert driver.end(9, (one["transaction"], COMMIT), by=by) == [Code.UNKNOWN_SESSION]
    assert driver.visible() == []
    assert driver.end(peer, (one["transaction"], COMMIT), by=DecidedBy.CHECK) == [Code.COMMITTED]
    assert driver.end(peer, (two["transaction"], ROLLBACK)) == [Code.ROLLED_BACK]


@pytest.mark.invariant("I15")
def test_an_operator_has_no_session_and_a_session_is_no_operator(driver):
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    assert driver.end(session, (receipt["transaction"], COMMIT), by=DecidedBy.OPERATOR) == [Code.BAD_REQUEST]
    assert driver.end(0, (receipt["transaction"], COMMIT), by=DecidedBy.OPERATOR) == [Code.COMMITTED]


def test_outcomes_that_are_none(driver):
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    assert driver.end(session, (receipt["transaction"], 3), (receipt["transaction"], 255)) == [Code.BAD_REQUEST] * 2


@pytest.mark.invariant("I6")
def test_one_wrong_row_holds_up_no_neighbour(driver):
    session = driver.session()
    one, two = driver.prepare(session, {}, {})
    codes = driver.end(session, (one["transaction"], COMMIT), (b"\0" * 16, COMMIT), (two["transaction"], ROLLBACK))
    assert codes == [Code.COMMITTED, Code.WRONG_SHARD, Code.ROLLED_BACK]


def test_an_expired_transaction_that_left_the_log_stays_expired():
    driver = LedgerDriver()
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    driver.advance(1)
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    assert driver.end(session, (receipt["transaction"], COMMIT)) == [Code.EXPIRED]
    assert driver.visible() == []


def test_transactions_are_found_among_many():
    driver = LedgerDriver(strict=False)
    session = driver.session()
    ids = []
    for n in range(50):
        ids += [r["transaction"] for r in driver.prepare(session, *[{}] * (n % 7 + 1))]
        driver.send({})
    assert driver.end(session, *((raw, COMMIT) for raw in ids[::2])) == [Code.COMMITTED] * len(ids[::2])
    assert driver.end(session, *((raw, ROLLBACK) for raw in ids)) == [
        Code.CONFLICT if n % 2 == 0 else Code.ROLLED_BACK for n in range(len(ids))
    ]


@pytest.mark.invariant("I8")
def test_i8_publishing_writes_nothing_but_the_decision(driver):
    session = driver.session()
    [receipt] = driver.prepare(session, {"body": b"x"})
    driver.end(session, (receipt["transaction"], COMMIT))
    assert [kind for kind, *_ in driver.events][-2:] == [Kind.HALF, Kind.DECIDED]
    assert driver.visible() == [receipt["position"]]
