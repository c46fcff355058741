"""Transactions of several messages and topics: one outcome (I4), one run within a queue, limits, and who may join."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.ledger.commands import Prepare, Rules
from escrowmq.model import COMMIT, ROLLBACK, TransactionId
from escrowmq.testing.ledgers import LedgerDriver, outgoing


def begin(driver: LedgerDriver, session: int, **row) -> bytes:
    return driver.prepare(session, row)[0]["transaction"]


def join(driver: LedgerDriver, session: int, raw: bytes, *rows) -> list[dict]:
    return driver.prepare(session, *({**row, "transaction": raw} for row in rows))


@pytest.mark.invariant("I4")
def test_messages_and_topics_share_one_outcome(driver):
    session = driver.session()
    raw = begin(driver, session, topic="orders", key="k")
    answers = join(driver, session, raw, {"topic": "points"}, {"topic": "orders", "key": "k"}, {"topic": "mail"})
    assert {a["transaction"] for a in answers} == {raw}
    assert driver.visible("orders") == driver.visible("points") == []
    assert driver.end(session, (raw, COMMIT)) == [Code.COMMITTED]
    assert [len(driver.visible(t)) for t in ("orders", "points", "mail")] == [2, 1, 1]
    assert driver.ledger.counters["committed_total"] == 1


@pytest.mark.invariant("I3")
def test_rollback_of_several(driver):
    session = driver.session()
    raw = begin(driver, session)
    join(driver, session, raw, {}, {"topic": "points"})
    driver.end(session, (raw, ROLLBACK))
    assert driver.visible("orders") == driver.visible("points") == []


def test_another_instance_of_the_group_may_join_and_the_id_stays(driver):
    raw = begin(driver, driver.session("g", "a"))
    [answer] = join(driver, driver.session("g", "b"), raw, {})
    assert answer["transaction"] == raw


def test_joining_what_one_may_not(driver):
    session, stranger = driver.session("g"), driver.session("h")
    committed, rolled_back, open_ = (begin(driver, session) for _ in range(3))
    driver.end(session, (committed, COMMIT), (rolled_back, ROLLBACK))
    identity = TransactionId.from_bytes(open_)
    wrong_epoch = bytes(TransactionId(identity.shard, identity.epoch + 1, identity.position))
    wrong_shard = bytes(TransactionId(identity.shard + 1, identity.epoch, identity.position))
    rows = [{"transaction": raw} for raw in (committed, rolled_back, wrong_epoch, wrong_shard, b"\0" * 16, open_)]
    answers = driver.do(Prepare(outgoing(rows), np.array([session] * 5 + [stranger]))).to_pylist()
    assert [a["code"] for a in answers] == [
        Code.TRANSACTION_DECIDED,
        Code.TRANSACTION_DECIDED,
        Code.UNKNOWN_TRANSACTION,
        Code.WRONG_SHARD,
        Code.WRONG_SHARD,
        Code.WRONG_GROUP,
    ]
    assert len(driver.visible()) == 1
    assert driver.ledger.counters["half_messages_total"] == 3


def test_nothing_joins_a_parked_transaction():
    driver = LedgerDriver(Rules(half_retention_us=1_000_000))
    session = driver.session()
    raw = begin(driver, session)
    driver.advance(1)
    driver.tick()
    assert join(driver, session, raw, {})[0]["code"] == Code.TRANSACTION_DECIDED


def test_at_most_so_many_messages():
    driver = LedgerDriver(Rules(max_transaction_messages=3))
    session = driver.session()
    raw, other = begin(driver, session), begin(driver, session)
    assert [a["code"] for a in join(driver, session, raw, {}, {})] == [Code.OK] * 2
    assert join(driver, session, raw, {})[0]["code"] == Code.TOO_MANY
    assert [a["code"] for a in join(driver, session, other, {}, {})] == [Code.OK] * 2


def test_beginners_and_joiners_of_two_transactions_in_one_batch(driver):
    session = driver.session()
    a, b = begin(driver, session, queue=0), begin(driver, session, queue=0)
    rows = [{"transaction": b}, {}, {"transaction": a}, {"transaction": b}, {}]
    answers = driver.prepare(session, *({**row, "queue": 0} for row in rows))
    assert [r["transaction"] for r in answers[0:4:3]] == [b, b]
    assert answers[2]["transaction"] == a
    assert len({r["transaction"] for r in answers}) == 4
    driver.end(session, (b, COMMIT), (a, COMMIT))
    first = TransactionId.from_bytes
    expected = [first(b).position, answers[0]["position"], answers[3]["position"]]
    assert driver.queue() == [*expected, first(a).position, answers[2]["position"]]


def test_a_transaction_is_not_asked_twice_for_two_messages(driver):
    session = driver.session()
    raw = begin(driver, session)
    join(driver, session, raw, {}, {})
    driver.advance(6)
    assert len(driver.ask().transactions) == 1
    assert driver.ledger.stats(driver.now_us)["open_half_messages"] == 1


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "join", "join", "commit", "rollback", "plain"]), st.integers(0, 9)), max_size=40
)


@pytest.mark.invariant("I4")
@given(steps, st.integers(1, 3))
def test_i4_all_or_none_in_one_run(steps, queues):
    driver = LedgerDriver(Rules(default_queues=queues), strict=False)
    session, plain = driver.session(), driver.session("plain", transactional=False)
    driver.send({}, session=plain)
    messages: dict[bytes, list[int]] = {}
    committed: list[bytes] = []
    decided: set[bytes] = set()
    for act, n in steps:
        raw = list(messages)[n % len(messages)] if messages else None
        if act == "begin":
            [answer] = driver.prepare(session, {"key": str(n)})
            messages[answer["transaction"]] = [answer["position"]]
        elif act == "plain":
            driver.send({"key": str(n)}, session=plain)
        elif raw is None:
            continue
        elif act == "join":
            [answer] = join(driver, session, raw, {"key": str(n)})
            assert (answer["code"] == Code.OK) == (raw not in decided)
            if answer["code"] == Code.OK:
                messages[raw].append(answer["position"])
        else:
            driver.end(session, (raw, COMMIT if act == "commit" else ROLLBACK))
            if act == "commit" and raw not in decided:
                committed.append(raw)
            decided.add(raw)
    visible = driver.visible()
    for raw, positions in messages.items():
        assert set(positions) <= set(visible) if raw in committed else not set(positions) & set(visible)
    for queue in range(queues):
        owners = [next((raw for raw, ps in messages.items() if p in ps), p) for p in driver.queue(queue=queue)]
        runs = [owner for n, owner in enumerate(owners) if n == 0 or owners[n - 1] != owner]
        assert len(runs) == len(set(runs)), "something stands between two messages of one transaction"
        assert [owner for owner in runs if owner in messages] == [raw for raw in committed if raw in runs]
