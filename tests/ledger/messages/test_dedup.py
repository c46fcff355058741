"""De-duplication (I9): the same message of a topic and id, within the window, gets the same receipt; one copy
exists."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger.commands import Prepare, Retain, Rules, Send
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.messages.dedup import Dedup, split_runs
from escrowmq.ledger.transactions.table import ROLLED_BACK
from escrowmq.model import COMMIT, ROLLBACK, DecidedBy
from escrowmq.schemas import ID, Kind
from escrowmq.testing.ledgers import LedgerDriver, outgoing, tables_equal

WINDOW_US = 16_000_000
RULES = Rules(dedup_window_us=WINDOW_US)


def id_of(instance: int, sequence: int) -> bytes:
    return instance.to_bytes(8, "big") + sequence.to_bytes(8, "big")


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("half", [False, True])
def test_i9_the_same_id_in_one_batch(driver, half):
    session = driver.session()
    rows = [{"message_id": "a"}, {"message_id": "b"}, {"message_id": "a"}]
    answers = driver.prepare(session, *rows) if half else driver.send(*rows)
    assert answers[0] == answers[2] != answers[1]
    total = driver.ledger.counters["half_messages_total" if half else "messages_total"]
    assert total == 2


@pytest.mark.invariant("I9")
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


@pytest.mark.invariant("I9")
def test_i9_a_joined_message_resent_after_the_decision_gets_its_receipt(driver):
    session = driver.session()
    [begun] = driver.prepare(session, {})
    row = {"message_id": "joined", "transaction": begun["transaction"]}
    [first] = driver.prepare(session, row)
    driver.end(session, (begun["transaction"], COMMIT))
    assert driver.prepare(session, row) == [first]
    assert len(driver.visible()) == 2


@pytest.mark.invariant("I9")
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


@pytest.mark.invariant("I9")
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


@pytest.mark.invariant("I35")
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
topics = st.sampled_from(["orders", "orders", "points", "hints"])
named = st.tuples(st.integers(0, 1), sequences, topics)
batches = st.lists(st.lists(named, min_size=1, max_size=8), max_size=12)


@pytest.mark.invariant("I9")
@given(batches)
def test_i9_against_a_dict(batches):
    """Whatever ids come in whatever order: each has one place in its topic, and every answer names it."""
    driver = LedgerDriver(strict=False)
    places: dict[tuple, int] = {}
    for batch in batches:
        rows = [{"message_id": id_of(*pair), "topic": topic} for *pair, topic in batch]
        for name, answer in zip(batch, driver.send(*rows), strict=True):
            assert answer["code"] == Code.OK
            assert answer["position"] == places.setdefault(name, answer["position"])
    assert len(places) == len(set(places.values()))
    for topic in ("orders", "points", "hints"):
        assert driver.visible(topic) == sorted(at for (*_, name), at in places.items() if name == topic)


NAMES = ["orders", "points", "hints"]


def filled(batches, most, pauses) -> Dedup:
    rules, now, position, dedup = Rules(dedup_max=most, dedup_window_us=16), 0, 0, Dedup()
    for batch, pause in zip(batches, pauses, strict=False):
        now += pause
        batch = list(dict.fromkeys(batch))
        ids = pa.array([id_of(*pair) for *pair, _ in batch], pa.binary(16))
        of_row = np.array([NAMES.index(topic) for *_, topic in batch], np.int32)
        fresh = dedup.find(ids, of_row).positions < 0
        if fresh.any():
            dedup.add(ids.filter(pa.array(fresh)), of_row[fresh], position, now, rules, half=position % 2 == 1)
        position += int(fresh.sum())
    return dedup


def everything(dedup: Dedup) -> list:
    ids = [id_of(i, s) for i in (0, 1) for s in [*range(14), *range((1 << 64) - 4, 1 << 64)]]
    founds = [dedup.find(pa.array(ids, pa.binary(16)), np.full(len(ids), n, np.int32)) for n in range(3)]
    return [(found.positions.tolist(), found.halves.tolist()) for found in founds]


def nothing_known():
    raise AssertionError("only old snapshots ask where a message lies")


pauses = st.lists(st.integers(0, 9), min_size=12, max_size=12)


@pytest.mark.invariant("I9")
@given(batches, st.integers(1, 5), pauses)
def test_restored_dedup_answers_the_same(batches, most, pauses):
    dedup = filled(batches, most, pauses)
    restored = Dedup()
    restored.restore(dedup.snapshot(), nothing_known, Rules())
    assert everything(restored) == everything(dedup)
    more = [(0, n, NAMES[n % 3]) for n in range(13)]  # and goes on equally
    for one in (dedup, restored):
        ids = pa.array([id_of(*pair) for *pair, _ in more], pa.binary(16))
        one.add(ids, np.arange(13, dtype=np.int32) % 3, 1000, 1000, Rules(dedup_max=most))
    assert all(restored.snapshot()[name].equals(table) for name, table in dedup.snapshot().items())


# Topics


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("half", [False, True])
def test_i9_one_id_in_two_topics_is_two_messages(driver, half):
    session = driver.session()
    produce = (lambda *rows: driver.prepare(session, *rows)) if half else driver.send
    orders, points = {"message_id": "a", "body": b"a"}, {"message_id": "a", "topic": "points", "body": b"b"}
    [one], [other] = produce(orders), produce(points)
    assert one["code"] == other["code"] == Code.OK
    assert one["position"] != other["position"]
    assert produce(points, orders, points) == [other, one, other]
    if not half:
        assert driver.visible("points") == [other["position"]]


def test_i9_one_id_in_two_topics_of_one_batch(driver):
    driver.send({"message_id": "a"}, {"message_id": "a", "topic": "points"}, {"message_id": "a"})
    assert [len(driver.visible(topic)) for topic in ("orders", "points")] == [1, 1]


@pytest.mark.invariant("I9")
def test_i9_two_messages_of_one_transaction_and_id_both_come_out(driver):
    session = driver.session()
    [begun] = driver.prepare(session, {"message_id": "order-17"})
    row = {"message_id": "order-17", "topic": "points", "transaction": begun["transaction"]}
    [joined] = driver.prepare(session, row)
    assert (joined["code"], joined["transaction"]) == (Code.OK, begun["transaction"])
    driver.end(session, (begun["transaction"], COMMIT))
    assert driver.visible() == [begun["position"]]
    assert driver.visible("points") == [joined["position"]]
    assert driver.prepare(session, row) == [joined]


def test_batches_that_alternate_between_topics_are_one_run():
    driver = LedgerDriver(RULES, strict=False)
    for start in range(0, 3000, 1000):
        rows = [{"message_id": id_of(1, start + n), "topic": NAMES[n % 2]} for n in range(1000)]
        first = driver.send(*rows)
        assert driver.send(*rows) == first
    assert driver.ledger.stats(driver.now_us)["dedup_runs"] == 1


def test_single_messages_that_alternate_between_topics_are_one_run():
    driver = LedgerDriver(RULES, strict=False)
    driver.send({"message_id": id_of(1, 0)}, {"topic": "points", "message_id": id_of(1, 1)})
    for n in range(2, 40):
        driver.send({"message_id": id_of(1, n), "topic": NAMES[n % 2]})
    assert driver.ledger.stats(driver.now_us)["dedup_runs"] == 1


def test_the_same_ids_in_many_topics_and_what_is_forgotten_of_them():
    driver = LedgerDriver(RULES, strict=False)
    names = [f"t{n}" for n in range(20)]
    first = {name: driver.send(*({"message_id": id_of(1, n), "topic": name} for n in range(5))) for name in names}
    for name in names:
        assert driver.send(*({"message_id": id_of(1, n), "topic": name} for n in range(5))) == first[name]
    driver.now_us += WINDOW_US + WINDOW_US // 16 + 1
    driver.send({})  # whatever forgets, forgets now
    driver.send({"message_id": id_of(1, 0), "topic": "t7"})
    assert driver.ledger.stats(0)["dedup_runs"] == 2
    assert driver.ledger.counters["messages_total"] == 102
    assert len(driver.visible("t7")) == 6


# Contents and kinds

OTHER = {"body": b"x", "key": "x", "tag": "x", "properties": {"x": "1"}}


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("column", OTHER)
@pytest.mark.parametrize("together", [False, True], ids=["later", "in one batch"])
def test_i9_another_content_under_a_taken_id_is_refused(driver, half, column, together):
    session = driver.session()
    produce = (lambda *rows: driver.prepare(session, *rows)) if half else driver.send
    full = {"message_id": "a", "body": b"b", "key": "k", "tag": "t", "properties": {"p": "1", "q": "2"}}
    other = full | {column: OTHER[column]}
    if together:
        first, again, *refused = produce(full, full, other, full | {column: b"" if column == "body" else None})
    else:
        ([first], [again]), refused = (produce(full), produce(full)), produce(other)
    assert first == again
    assert {(row["code"], row["position"], row["transaction"]) for row in refused} == {
        (Code.MESSAGE_ID_TAKEN, -1, None)
    }
    assert driver.ledger.counters["half_messages_total" if half else "messages_total"] == 1


def test_the_order_of_properties_and_none_of_them_say_nothing(driver):
    [first] = driver.send({"message_id": "a", "properties": {"p": "1", "q": "2"}})
    assert driver.send({"message_id": "a", "properties": {"q": "2", "p": "1"}}) == [first]
    [bare] = driver.send({"message_id": "b", "properties": {}})
    assert driver.send({"message_id": "b"}) == [bare]


@pytest.mark.invariant("I9")
def test_a_repeat_from_another_group_or_for_another_transaction_is_refused(driver):
    session, stranger = driver.session(), driver.session("h")
    [a], [b] = driver.prepare(session, {"message_id": "a"}), driver.prepare(session, {"message_id": "b"})
    [c] = driver.prepare(session, {"message_id": "c", "transaction": a["transaction"]})
    refused = [
        driver.prepare(stranger, {"message_id": "a"}),
        driver.prepare(session, {"message_id": "a", "transaction": b["transaction"]}),
        driver.prepare(session, {"message_id": "c"}),
        driver.prepare(session, {"message_id": "c", "transaction": b["transaction"]}),
        driver.prepare(session, {"message_id": "d"}, {"message_id": "d", "transaction": a["transaction"]})[1:],
    ]
    assert {row["code"] for rows in refused for row in rows} == {Code.MESSAGE_ID_TAKEN}
    assert driver.prepare(session, {"message_id": "c", "transaction": a["transaction"]}) == [c]
    batch = outgoing([{"message_id": "e"}] * 2)
    answers = driver.do(Prepare(batch, np.array([session, stranger])))
    assert answers.column("code").to_pylist() == [Code.OK, Code.MESSAGE_ID_TAKEN]


@pytest.mark.invariant("I9")
def test_an_id_of_a_half_message_is_no_plain_one_after_retention_either():
    """The message stands nowhere as a plain one, so it must not be acknowledged as one."""
    driver = LedgerDriver(RULES)
    session, plain = driver.session(), driver.session("p", transactional=False)
    [begun] = driver.prepare(session, {"message_id": "begun"})
    driver.prepare(session, {"message_id": "joined", "transaction": begun["transaction"]})
    driver.end(session, (begun["transaction"], COMMIT))
    driver.now_us += 10
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    answers = driver.send({"message_id": "begun"}, {"message_id": "joined"}, session=plain)
    assert [row["code"] for row in answers] == [Code.MESSAGE_ID_TAKEN] * 2
    [again] = driver.prepare(session, {"message_id": "begun"})
    assert again["code"] == Code.UNKNOWN_TRANSACTION


# Snapshots of before: ids without topics


@pytest.mark.invariant("I9")
def test_a_snapshot_without_topics_finds_them_in_what_is_stored(driver):
    session = driver.session()
    rows = [{"message_id": id_of(1, n), "topic": NAMES[n % 3], "delay_us": 1000 * (n % 2)} for n in range(9)]
    first = driver.send(*rows)
    begun = driver.prepare(session, *({"message_id": id_of(2, n), "topic": NAMES[n % 2]} for n in range(4)))
    joined = {"message_id": id_of(2, 9), "topic": "points", "transaction": begun[0]["transaction"]}
    driver.prepare(session, joined)
    driver.end(session, (begun[0]["transaction"], COMMIT), (begun[1]["transaction"], ROLLBACK))
    tables = driver.ledger.snapshot()
    state = json.loads(tables["ledger"]["state"][0].as_py()) | {"format": 2}
    tables["ledger"] = pa.table({"state": [json.dumps(state)]})
    tables["dedup"] = tables["dedup"].drop_columns(["topic", "half"])
    del tables["dedup_topics"]
    assert Ledger.can_restore(tables)
    before, driver.ledger = driver.ledger, Ledger.restore(driver.ledger.shard, tables)
    assert everything(driver.ledger.dedup) == everything(before.dedup)
    assert driver.send(*rows) == first
    assert driver.send({"message_id": id_of(1, 0), "topic": "points"})[0]["position"] == before.next_position


def test_a_snapshot_without_topics_knows_nothing_of_what_has_left():
    driver = LedgerDriver(RULES)
    driver.send({"message_id": "a"})
    driver.now_us += 10
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    tables = driver.ledger.snapshot()
    tables["dedup"] = tables["dedup"].drop_columns(["topic", "half"])
    del tables["dedup_topics"]
    driver.ledger = Ledger.restore(driver.ledger.shard, tables)
    [stored] = driver.send({"message_id": "a", "body": b"another"})
    assert driver.visible() == [stored["position"]]


# Replacing


@pytest.mark.invariant("I9")
def test_the_last_prepare_of_an_id_counts_while_it_is_undecided(driver):
    session = driver.session()
    [a] = driver.prepare(session, {"message_id": "x", "body": b"a"})
    [b] = driver.replace(session, {"message_id": "x", "body": b"b"})
    assert b["code"] == Code.OK
    assert b["transaction"] != a["transaction"]
    assert driver.replace(session, {"message_id": "x", "body": b"b"}) == [b], "the same again is a repeat"
    assert driver.end(session, (a["transaction"], COMMIT), (b["transaction"], COMMIT)) == [
        Code.CONFLICT,
        Code.COMMITTED,
    ]
    assert driver.visible() == [b["position"]]
    decided = [batch.to_pylist() for kind, batch, _, _ in driver.events if kind == Kind.DECIDED]
    assert [(row["state"], row["decided_by"]) for row in decided[0]] == [(ROLLED_BACK, DecidedBy.REPLACED)]
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


def test_nothing_is_replaced_after_the_decision(driver):
    session = driver.session()
    [a] = driver.prepare(session, {"message_id": "x", "body": b"a"})
    driver.end(session, (a["transaction"], COMMIT))
    assert driver.replace(session, {"message_id": "x", "body": b"b"})[0]["code"] == Code.MESSAGE_ID_TAKEN
    assert driver.replace(session, {"message_id": "x", "body": b"a"}) == [a]
    assert driver.visible() == [a["position"]]


def test_only_a_transaction_of_one_message_and_of_its_own_group_is_replaced(driver):
    session, stranger = driver.session(), driver.session("h")
    [a] = driver.prepare(session, {"message_id": "x", "body": b"a"})
    assert driver.replace(stranger, {"message_id": "x", "body": b"b"})[0]["code"] == Code.MESSAGE_ID_TAKEN
    driver.prepare(session, {"message_id": "y", "transaction": a["transaction"]})
    assert driver.replace(session, {"message_id": "x", "body": b"b"})[0]["code"] == Code.MESSAGE_ID_TAKEN
    assert driver.end(session, (a["transaction"], COMMIT)) == [Code.COMMITTED]


def test_rows_of_one_replacing_batch_with_one_id(driver):
    session = driver.session()
    driver.prepare(session, {"message_id": "x", "body": b"a"})
    b, again, c = driver.replace(session, *({"message_id": "x", "body": body} for body in (b"b", b"b", b"c")))
    assert b == again
    assert c["code"] == Code.MESSAGE_ID_TAKEN
    assert driver.end(session, (b["transaction"], COMMIT)) == [Code.COMMITTED]


def test_replacing_needs_no_room():
    driver = LedgerDriver(Rules(max_open_transactions=1))
    session = driver.session()
    driver.prepare(session, {"message_id": "x", "body": b"a"})
    rows = {"message_id": "x", "body": b"b"}, {"message_id": "y"}
    assert [row["code"] for row in driver.replace(session, *rows)] == [Code.OK, Code.TOO_MANY_OPEN]


@pytest.mark.invariant("I9")
def test_a_crash_between_the_two_events_of_a_replacement(driver):
    """The earlier transaction is rolled back, nothing stands in its place: whatever is prepared next counts."""
    session = driver.session()
    [a] = driver.prepare(session, {"message_id": "x", "body": b"a"})
    for body in (b"b", b"a"):
        driver.replace(session, {"message_id": "x", "body": body + b"!"})
        kind, *_ = driver.events.pop()
        assert kind == Kind.HALF
        driver.ledger = driver.replay()
        [after] = driver.replace(session, {"message_id": "x", "body": body})
        assert after["code"] == Code.OK
    assert driver.end(session, (after["transaction"], COMMIT)) == [Code.COMMITTED]
    assert driver.visible() == [after["position"]]
    assert driver.end(session, (a["transaction"], COMMIT)) == [Code.CONFLICT]


def test_a_slice_of_ids_is_read_where_it_is(driver):
    whole = outgoing([{"message_id": id_of(1, n)} for n in range(10)])
    first = driver.do(Send(whole.slice(4, 3), np.zeros(3, np.int64)))
    assert driver.do(Send(whole.slice(4, 3), np.zeros(3, np.int64))).equals(first)
    again = driver.do(Send(whole, np.zeros(10, np.int64)))
    assert again.column("position").slice(4, 3).equals(first.column("position"))


def test_ids_that_go_round_are_two_runs():
    rows = [(7, (1 << 64) - 2), (7, (1 << 64) - 1), (7, 0), (7, 1), (8, 2)]
    instances, sequences, starts = split_runs(pa.array([id_of(*row) for row in rows], ID))
    assert starts.tolist() == [0, 2, 4]
    assert instances.tolist() == [7, 7, 7, 7, 8]
    assert sequences[2:].tolist() == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(1, 5), st.integers(0, 1)), max_size=5))
def test_an_id_that_stands_twice_in_a_batch_is_found_by_its_runs(runs):
    rows = [(instance, first + at, topic) for instance, first, count, topic in runs for at in range(count)]
    ids = pa.array([id_of(instance, sequence) for instance, sequence, _ in rows], ID)
    found = Dedup().find(ids, np.array([topic for *_, topic in rows], np.int32))
    firsts = [rows.index(row) for row in rows]
    assert (list(range(len(rows))) if found.firsts is None else found.firsts.tolist()) == firsts
