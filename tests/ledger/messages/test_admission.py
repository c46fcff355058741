"""What may enter: every limit at its value and over by one, a code a row, topics and queues chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger.commands import CreateTopic, Rules, Send
from escrowmq.ledger.messages.admission import group_by_queue
from escrowmq.model import ROLLBACK
from escrowmq.testing.ledgers import LedgerDriver, outgoing

LIMITS = Rules(
    max_body_bytes=10,
    max_key_bytes=4,
    max_tag_bytes=3,
    max_properties_bytes=6,
    max_delay_us=100,
    half_retention_us=1000,
    dedup_window_us=0,
)
AT_LIMIT = [
    {"body": b"x" * 10},
    {"key": "kkkk"},
    {"key": "éé"},
    {"tag": "ttt"},
    {"properties": [("aaa", "bbb")]},
    {"properties": [("a", "b"), ("c", "d"), ("e", "")]},
    {"delay_us": 100},
    {"delay_us": 0},
    {"immunity_us": 1000},
    {"topic": "t" * 127},
    {"queue": 3},
]
OVER = [
    ({"body": b"x" * 11}, Code.BODY_TOO_LARGE),
    ({"key": "kkkkk"}, Code.KEY_TOO_LARGE),
    ({"key": "ééé"}, Code.KEY_TOO_LARGE),
    ({"tag": "tttt"}, Code.TAG_TOO_LARGE),
    ({"properties": [("aaa", "bbbb")]}, Code.PROPERTIES_TOO_LARGE),
    ({"delay_us": 101}, Code.BAD_DELAY),
    ({"delay_us": -1}, Code.BAD_DELAY),
    ({"immunity_us": 1001}, Code.BAD_DELAY),
    ({"immunity_us": -1}, Code.BAD_DELAY),
    ({"topic": "t" * 128}, Code.BAD_TOPIC_NAME),
    ({"topic": ""}, Code.BAD_TOPIC_NAME),
    ({"topic": "%half"}, Code.BAD_TOPIC_NAME),
    ({"topic": "../etc"}, Code.BAD_TOPIC_NAME),
    ({"topic": "a\nb"}, Code.BAD_TOPIC_NAME),
    ({"queue": 4}, Code.BAD_QUEUE),
    ({"queue": -2}, Code.BAD_QUEUE),
    ({"queue": 2**31 - 1}, Code.BAD_QUEUE),
]


@pytest.mark.invariant("I46")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("row", AT_LIMIT)
def test_at_the_limit(row, half):
    driver = LedgerDriver(LIMITS)
    [answer] = driver.prepare(driver.session(), row) if half else driver.send(row)
    assert answer["code"] == Code.OK


@pytest.mark.invariant("I46")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("row", "code"), OVER)
def test_over_the_limit_changes_nothing(row, code, half):
    driver = LedgerDriver(LIMITS)
    session = driver.session()
    before = len(driver.events)
    [answer] = driver.prepare(session, row) if half else driver.send(row)
    assert answer == {"code": code, "position": -1, "queue": -1, "offset": -1, "transaction": None}
    assert len(driver.events) == before


def test_a_refused_row_holds_up_no_neighbour():
    driver = LedgerDriver(LIMITS)
    rows = [{"body": b"1", "queue": 0}, *(row for row, _ in OVER), {"body": b"2", "queue": 0}]
    answers = driver.send(*rows)
    assert [a["code"] for a in answers] == [Code.OK, *(code for _, code in OVER), Code.OK]
    assert (answers[0]["offset"], answers[-1]["offset"]) == (0, 1)
    assert answers[-1]["position"] == answers[0]["position"] + 1
    assert driver.queue() == [answers[0]["position"], answers[-1]["position"]]


def test_the_stored_rows_are_those_that_were_accepted():
    driver = LedgerDriver(LIMITS)
    driver.send({"body": b"1"}, {"body": b"x" * 11}, {"body": b"2", "key": "k", "tag": "t", "properties": [("a", "b")]})
    stored = driver.events[-1][1].to_pylist()
    assert [row["body"] for row in stored] == [b"1", b"2"]
    assert (stored[1]["key"], stored[1]["tag"], stored[1]["properties"]) == ("k", "t", [("a", "b")])


def test_an_empty_batch_is_answered_with_an_empty_one(driver):
    assert driver.send() == []
    assert driver.prepare(driver.session()) == []
    assert driver.end(1) == []


@pytest.mark.invariant("I35")
def test_distinct_tags_are_bounded():
    driver = LedgerDriver(Rules(max_tags=2))
    codes = [a["code"] for a in driver.send({"tag": "a"}, {"tag": "b"}, {"tag": "c"}, {"tag": "a"}, {})]
    assert codes == [Code.OK, Code.OK, Code.TOO_MANY, Code.OK, Code.OK]
    assert driver.send({"tag": "b"}, {"tag": "d"})[1]["code"] == Code.TOO_MANY


def test_unknown_topic_with_auto_creation_off():
    driver = LedgerDriver(Rules(auto_create_topics=False))
    assert driver.send({})[0]["code"] == Code.UNKNOWN_TOPIC
    assert not driver.ledger.topics.has("orders")
    driver.do(CreateTopic("orders", 2))
    assert driver.send({})[0]["code"] == Code.OK


def test_topics_are_made_with_the_default_queues_at_their_first_message():
    driver = LedgerDriver(Rules(default_queues=3))
    driver.send({"topic": "a"}, {"topic": "b"}, {"topic": "a"})
    assert driver.ledger.topics.queue_ids("a") == [0, 1, 2]
    assert driver.ledger.topics.queue_ids("b") == [3, 4, 5]


def test_one_topic_too_many():
    driver = LedgerDriver(Rules(max_topics=2))
    codes = [a["code"] for a in driver.send({"topic": "a"}, {"topic": "b"}, {"topic": "c"}, {"topic": "a"})]
    assert codes == [Code.OK, Code.OK, Code.TOO_MANY, Code.OK]


@pytest.mark.parametrize("row", [{"queue": 99}, {"body": b"x" * 11}])
def test_a_refused_message_makes_no_topic(row):
    driver = LedgerDriver(LIMITS)
    driver.send(row)
    assert not driver.ledger.topics.has("orders")


def test_a_group_with_no_room_makes_no_topic():
    driver = LedgerDriver(Rules(max_open_transactions=1))
    session = driver.session()
    driver.prepare(session, {"topic": "a"})
    assert driver.prepare(session, {"topic": "b"})[0]["code"] == Code.TOO_MANY_OPEN
    assert not driver.ledger.topics.has("b")


@pytest.mark.invariant("I35")
def test_open_transactions_are_bounded_per_group():
    driver = LedgerDriver(Rules(max_open_transactions=2))
    one, other = driver.session("g"), driver.session("h")
    answers = driver.prepare(one, {}, {}, {})
    assert [a["code"] for a in answers] == [Code.OK, Code.OK, Code.TOO_MANY_OPEN]
    assert driver.prepare(other, {})[0]["code"] == Code.OK
    driver.end(one, (answers[0]["transaction"], ROLLBACK))
    assert [a["code"] for a in driver.prepare(one, {}, {})] == [Code.OK, Code.TOO_MANY_OPEN]


def test_an_explicit_queue_is_taken_whatever_the_key(driver):
    answers = driver.send(*({"queue": 2, "key": str(n)} for n in range(20)))
    assert {a["queue"] for a in answers} == {2}
    assert [a["offset"] for a in answers] == list(range(20))


def test_a_keyless_batch_stays_whole_and_batches_take_turns(driver):
    queues = [{a["queue"] for a in driver.send(*[{}] * 5)} for _ in range(8)]
    assert queues == [{n % 4} for n in range(8)]


@pytest.mark.invariant("I19")
def test_equal_keys_share_a_queue_and_keys_spread(driver):
    keys = [f"customer-{n}" for n in range(200)]
    first = [a["queue"] for a in driver.send(*({"key": key} for key in keys))]
    again = [driver.send({"key": key, "topic": "orders"})[0]["queue"] for key in keys]
    assert first == again
    assert min(first.count(queue) for queue in range(4)) > 25


def test_half_messages_of_a_key_go_where_plain_ones_go(driver):
    session = driver.session()
    for key in ("a", "b", "c", "", "long " * 40):
        assert driver.prepare(session, {"key": key})[0]["queue"] == driver.send({"key": key})[0]["queue"]


def test_keyed_and_keyless_rows_of_one_batch(driver):
    answers = driver.send({"key": "k"}, {}, {"queue": 3}, {"key": "k"}, {})
    assert answers[0]["queue"] == answers[3]["queue"]
    assert answers[1]["queue"] == answers[4]["queue"] == 0
    assert answers[2]["queue"] == 3


def test_offsets_told_are_offsets_had(driver):
    for _ in range(3):
        for answer in driver.send(*({"key": str(n)} for n in range(9)), {}, {}):
            assert driver.queue(queue=answer["queue"])[answer["offset"]] == answer["position"]


@given(st.lists(st.integers(0, 70_000)))
def test_group_by_queue_is_a_stable_partition(ids):
    grouped = group_by_queue(np.array(ids, np.int32))
    rows = np.arange(len(ids))
    assert sorted(n for _, r in grouped for n in rows[r].tolist()) == rows.tolist()
    for queue_id, r in grouped:
        assert [ids[n] for n in rows[r]] == [queue_id] * len(rows[r])
        assert rows[r].tolist() == sorted(rows[r].tolist())


def test_slices_of_batches_are_read_where_they_are(driver):
    whole = outgoing([{"key": f"k{n}", "body": b"x" * n, "tag": f"t{n % 2}", "topic": "tp"} for n in range(10)])
    driver.do(Send(whole.slice(3, 4), np.zeros(4, np.int64)))
    assert driver.events[-1][1].column("body").to_pylist() == [b"x" * n for n in range(3, 7)]
