"""De-duplication (I9): the same message id within the window gets the same receipt, and one copy exists."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger.commands import Prepare, Retain, Rules, Send
from escrowmq.ledger.messages.dedup import Dedup
from escrowmq.model import COMMIT
from escrowmq.testing.ledgers import LedgerDriver, outgoing

WINDOW_US = 16_000_000
RULES = Rules(dedup_window_us=WINDOW_US)


def id_of(instance: int, sequence: int) -> bytes:
    return instance.to_bytes(8, "big") + sequence.to_bytes(8, "big")


@pytest.mark.parametrize("half", [False, True])
def test_i9_the_same_id_in_one_batch(driver, half):
    session = driver.session()
    rows = [{"message_id": "a"}, {"message_id": "b"}, {"message_id": "a"}]
    answers = driver.prepare(session, *rows) if half else driver.send(*rows)
    assert answers[0] == answers[2] != answers[1]
    total = driver.ledger.counters["half_messages_total" if half else "messages_total"]
    assert total == 2


@pytest.mark.parametrize("half", [False, True])
def test_i9_the_same_id_across_batches(driver, half):
    session = driver.session()
    produce = (lambda *rows: driver.prepare(session, *rows)) if half else driver.send
    first = produce({"message_id": "a"}, {"message_id": "b", "topic": "other"})
    events = len(driver.events)
    assert produce({"message_id": "a"}, {"message_id": "b", "topic": "other"}) == first
    assert len(driver.events) == events
    mixed = produce({"message_id": "new"}, {"message_id": "b", "topic": "other"}, {"message_id": "a"})
    assert mixed[1:] == first[::-1]


def test_i9_the_receipt_of_a_committed_half_message_names_its_transaction(driver):
    session = driver.session()
    [first] = driver.prepare(session, {"message_id": "a"})
    driver.end(session, (first["transaction"], COMMIT))
    [again] = driver.prepare(session, {"message_id": "a"})
    assert again == first
    assert driver.end(session, (again["transaction"], COMMIT)) == [Code.ALREADY_COMMITTED]
    assert driver.visible() == [first["position"]]


def test_i9_a_keyless_half_message_keeps_its_queue(driver):
    session = driver.session()
    [first] = driver.prepare(session, {"message_id": "a"})
    driver.send({})  # takes a turn
    assert driver.prepare(session, {"message_id": "a"}) == [first]


def test_i9_a_joined_message_resent_after_the_decision_gets_its_receipt(driver):
    session = driver.session()
    [begun] = driver.prepare(session, {})
    row = {"message_id": "joined", "transaction": begun["transaction"]}
    [first] = driver.prepare(session, row)
    driver.end(session, (begun["transaction"], COMMIT))
    assert driver.prepare(session, row) == [first]
    assert len(driver.visible()) == 2


def test_i9_a_resend_under_a_newer_session_gets_the_first_transaction(driver):
    [first] = driver.prepare(driver.session(), {"message_id": "a"})
    assert driver.prepare(driver.session(), {"message_id": "a"}) == [first]


def test_i9_offsets_of_plain_messages_are_told_again(driver):
    first = driver.send(*({"message_id": str(n), "key": str(n)} for n in range(30)))
    driver.send(*({"key": str(n)} for n in range(30)))
    shuffled = np.random.default_rng(1).permutation(30)
    again = driver.send(*({"message_id": str(n), "key": str(n)} for n in shuffled))
    assert again == [first[n] for n in shuffled]


def test_i9_a_delayed_message_keeps_its_queue_and_tells_its_offset_when_it_has_one(driver):
    row = {"message_id": "a", "delay_us": 1_000_000}
    [first] = driver.send(row)
    driver.send({})
    assert driver.send(row) == [first]
    driver.advance(1)
    driver.tick()
    [later] = driver.send(row)
    assert later["offset"] == 0
    assert {**later, "offset": -1} == first


def test_i9_a_repeat_needs_no_room():
    driver = LedgerDriver(Rules(max_open_transactions=1, max_transaction_messages=2))
    session = driver.session()
    [begun] = driver.prepare(session, {"message_id": "a"})
    row = {"message_id": "b", "transaction": begun["transaction"]}
    [joined] = driver.prepare(session, row, row)[:1]
    assert driver.prepare(session, {"message_id": "a"}, row) == [begun, joined]


def test_message_id_of_another_kind(driver):
    session, plain = driver.session(), driver.session("p", transactional=False)
    driver.prepare(session, {"message_id": "half"})
    driver.send({"message_id": "plain"}, session=plain)
    refused = {"code": Code.MESSAGE_ID_TAKEN, "position": -1, "queue": -1, "offset": -1, "transaction": None}
    assert driver.send({"message_id": "half"}, session=plain) == [refused]
    assert driver.prepare(session, {"message_id": "plain"}) == [refused]


def test_a_refused_row_does_not_use_its_id_up(driver):
    driver.send({"message_id": "a", "queue": 99})
    assert driver.send({"message_id": "a"})[0]["code"] == Code.OK


def test_a_refused_row_does_not_speak_for_a_later_one_with_its_id(driver):
    old = driver.session()
    new = driver.session()
    batch = outgoing([{"message_id": "a"}] * 3)
    codes = driver.do(Prepare(batch, np.array([old, new, old]))).column("code").to_pylist()
    assert codes == [Code.FENCED, Code.OK, Code.FENCED]
    assert driver.ledger.counters["half_messages_total"] == 1


def test_window_edge_is_inside(driver):
    driver = LedgerDriver(RULES)
    [first] = driver.send({"message_id": "a"})
    driver.now_us += WINDOW_US
    driver.send({})  # whatever forgets, forgets now
    assert driver.send({"message_id": "a"}) == [first]


def test_window_edge_of_the_last_id_of_an_extended_run():
    """A run that grew is kept until the window of its last id is over."""
    driver = LedgerDriver(RULES)
    for n in range(5):
        if n:
            driver.now_us += WINDOW_US // 64
        [last] = driver.send({"message_id": id_of(1, n)})
    assert driver.ledger.stats(driver.now_us)["dedup_runs"] == 1
    driver.now_us += WINDOW_US
    driver.send({})
    assert driver.send({"message_id": id_of(1, 4)}) == [last]


def test_what_is_older_is_forgotten_in_the_end():
    driver = LedgerDriver(RULES)
    [first] = driver.send({"message_id": "a"})
    driver.now_us += WINDOW_US + WINDOW_US // 16 + 1
    driver.send({})
    assert driver.ledger.stats(0)["dedup_runs"] == 1
    assert driver.send({"message_id": "a"})[0]["position"] != first["position"]


def test_a_steady_client_is_one_run_and_not_much_more():
    driver = LedgerDriver(RULES, strict=False)
    for n in range(200):
        driver.send(*({"message_id": id_of(9, 10 * n + k)} for k in range(10)))
        driver.now_us += WINDOW_US // 100
    assert len(driver.ledger.dedup) <= 19


def test_dedup_max_bounds_the_runs():
    driver = LedgerDriver(Rules(dedup_max=3))
    answers = [driver.send({"message_id": str(n)})[0] for n in range(5)]
    assert len(driver.ledger.dedup) == 3
    assert [driver.send({"message_id": str(n)})[0] for n in (2, 3, 4)] == answers[2:]
    assert driver.send({"message_id": "1"})[0]["position"] != answers[1]["position"]


def test_runs_partly_known(driver):
    first = driver.send(*({"message_id": id_of(1, n)} for n in range(3, 7)))
    again = driver.send(*({"message_id": id_of(1, n)} for n in range(10)))
    assert again[3:7] == first
    assert driver.ledger.counters["messages_total"] == 10
    assert driver.send(*({"message_id": id_of(1, n)} for n in range(10))) == again


def test_the_highest_sequence_is_followed_by_nothing(driver):
    ends = [{"message_id": id_of(1, (1 << 64) - 1)}, {"message_id": id_of(1, 0)}, {"message_id": id_of(1, 1)}]
    first = driver.send(*ends)
    assert driver.send(*ends[::-1]) == first[::-1]
    assert driver.ledger.counters["messages_total"] == 3


def test_a_message_that_left_with_retention_is_not_stored_again():
    driver = LedgerDriver(RULES)
    driver.send({"message_id": "a"})
    driver.now_us += 10
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    [again] = driver.send({"message_id": "a"})
    assert (again["code"], again["offset"]) == (Code.OK, -1)
    assert driver.ledger.counters["messages_total"] == 1


sequences = st.integers(0, 12) | st.integers((1 << 64) - 3, (1 << 64) - 1)
batches = st.lists(st.lists(st.tuples(st.integers(0, 1), sequences), min_size=1, max_size=8), max_size=12)


@given(batches)
def test_i9_against_a_dict(batches):
    """Whatever ids come in whatever order: each has one place, and every answer names it."""
    driver = LedgerDriver(strict=False)
    places: dict[bytes, int] = {}
    for batch in batches:
        ids = [id_of(*pair) for pair in batch]
        for identity, answer in zip(ids, driver.send(*({"message_id": i} for i in ids)), strict=True):
            assert answer["position"] == places.setdefault(identity, answer["position"])
    assert len(driver.visible() if batches else []) == len(places) == len(set(places.values()))


@given(batches, st.integers(1, 5), st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_restored_dedup_answers_the_same(batches, most, pauses):
    rules, now, position, dedup = Rules(dedup_max=most, dedup_window_us=16), 0, 0, Dedup()
    for batch, pause in zip(batches, pauses, strict=False):
        now += pause
        ids = pa.array([id_of(*pair) for pair in dict.fromkeys(batch)], pa.binary(16))
        fresh = ids.filter(pa.array(dedup.find(ids)[0] < 0))
        if len(fresh):
            dedup.add(fresh, position, now, rules)
        position += len(fresh)
    restored = Dedup()
    restored.restore(dedup.snapshot())
    every = pa.array([id_of(i, s) for i in (0, 1) for s in [*range(14), *range((1 << 64) - 4, 1 << 64)]], pa.binary(16))
    assert restored.find(every)[0].tolist() == dedup.find(every)[0].tolist()


def test_a_slice_of_ids_is_read_where_it_is(driver):
    whole = outgoing([{"message_id": id_of(1, n)} for n in range(10)])
    first = driver.do(Send(whole.slice(4, 3), np.zeros(3, np.int64)))
    assert driver.do(Send(whole.slice(4, 3), np.zeros(3, np.int64))).equals(first)
    again = driver.do(Send(whole, np.zeros(10, np.int64)))
    assert again.column("position").slice(4, 3).equals(first.column("position"))
