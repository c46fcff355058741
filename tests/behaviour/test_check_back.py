"""systems.md 1.6 to 1.8, 1.12, 4.11: who is asked, when, how often, and what follows."""

from __future__ import annotations

import itertools
import threading

import pytest

import escrowmq as mq


class Asked:
    """A checker that remembers what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.checks = []
        self.one = threading.Semaphore(0)

    def __call__(self, check):
        self.checks.append(check)
        self.one.release()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def about(self, identity):
        """The attempts of the questions about a transaction: each once, and later ones later. An answer that takes
        longer than the interval is asked for again."""
        attempts = [check.attempt for check in self.checks if check.transaction_id == identity]
        assert sorted(set(attempts)) == sorted(attempts)
        return attempts


def leave(producer, topic, body=b"x", **given):
    with producer.transaction() as txn:
        txn.send(topic, body, **given)
        txn.leave_undecided()
    return txn.id


def state(bus, identity):
    return bus.admin.transaction(identity)["state"]


@pytest.mark.parametrize(("answer", "becomes"), [(mq.COMMIT, "committed"), (mq.ROLLBACK, "rolled_back")])
def test_an_undecided_transaction_is_asked_about_and_the_answer_decides(bus, t, g, answer, becomes, eventually, drain):
    asked = Asked(mq.UNKNOWN)
    producer = bus.producer(g, checker=asked)
    with producer.transaction() as txn:
        txn.send(t, b"1", key="k", tag="tag", properties={"a": "b"})
        txn.send(t, b"2")
        txn.leave_undecided()
    asked.answers[:] = [answer]  # not before: a slow machine may be asked between the two
    eventually(lambda: state(bus, txn.id) == becomes)
    assert len(asked.about(txn.id)) == len(asked.checks)
    told = [[(m.topic, m.body, m.key, m.tag, m.properties) for m in check.messages] for check in asked.checks]
    assert [(t, b"1", "k", "tag", {"a": "b"}), (t, b"2", None, None, {})] in told
    drain(bus.consumer(g, [t]), 2 if answer is mq.COMMIT else 0)


def test_unknown_and_exceptions_are_asked_again(bus, t, g, eventually):
    asked = Asked(mq.UNKNOWN, ValueError("not yet"), None, mq.COMMIT)
    identity = leave(bus.producer(g, checker=asked), t)
    eventually(lambda: state(bus, identity) == "committed")
    assert len(asked.about(identity)) >= 4


def test_a_decided_transaction_is_never_asked_about(bus, t, g, eventually):
    asked = Asked(mq.COMMIT)
    producer = bus.producer(g, checker=asked)
    with producer.transaction() as decided:
        decided.send(t, b"x")
    identity = leave(producer, t)
    eventually(lambda: state(bus, identity) == "committed")
    assert asked.about(identity)
    told = bus.admin.transaction(decided.id)  # a machine that stood still before the commit was in time to ask
    assert told["timeline"][-1]["event"] == "committed", "no question after it"
    assert len(asked.about(decided.id)) <= told["checks"]
    assert {check.transaction_id for check in asked.checks} <= {identity, decided.id}


@pytest.mark.parametrize("how", ["prepare", "message", "batch", "transaction"])
def test_1_13_the_property_of_rocketmq_is_immunity(bus, t, g, how):
    producer = bus.producer(g, unasked=True)
    properties = {"a": "b", "CheckImmunityTimeInSeconds": "60"}
    if how == "prepare":
        producer.prepare(t, b"x", properties=properties)
    elif how == "message":
        producer.prepare(mq.Message(t, b"x", properties=properties, check_immunity=60))
    elif how == "batch":
        producer.prepare_batch([mq.Message(t, b"x", properties=properties)])
    else:
        with producer.transaction() as txn:
            txn.send(t, b"x", properties=properties)
    producer.prepare(t, b"y")
    rows = [row for row in bus.admin.read("%half").read_all().to_pylist() if row["topic"] == t]
    assert [row["due_us"] - row["stored_us"] for row in rows] == [60_000_000, 200_000]


@pytest.mark.parametrize("value", ["", "soon", "1.5", "-1", " 60", "60\n", "9999999999", str(72 * 3600 + 1)])
def test_a_property_that_is_no_immunity_is_refused(bus, t, g, value):
    producer = bus.producer(g, unasked=True)
    with pytest.raises(mq.Rejected, match=r"BAD_IMMUNITY.*CheckImmunityTimeInSeconds"):
        producer.prepare(t, b"x", properties={"CheckImmunityTimeInSeconds": value})
    (code,) = producer.prepare_batch([mq.Message(t, b"x", properties={"CheckImmunityTimeInSeconds": value})]).codes
    assert code == mq.Code.BAD_IMMUNITY
    bus.producer(f"{g}-plain").send(t, b"x", properties={"CheckImmunityTimeInSeconds": value})


def test_a_property_that_contradicts_check_immunity_is_refused(bus, t, g):
    producer = bus.producer(g, unasked=True)
    with pytest.raises(mq.Rejected, match=r"BAD_IMMUNITY.*must agree"):
        producer.prepare(t, b"x", properties={"CheckImmunityTimeInSeconds": "60"}, check_immunity=30)


def test_immunity_puts_the_first_check_off(bus, t, g, eventually):
    asked = Asked(mq.COMMIT)
    producer = bus.producer(g, checker=asked)
    immune = leave(producer, t, check_immunity=3600.0)
    identity = leave(producer, t)
    eventually(lambda: state(bus, identity) == "committed")
    assert {check.transaction_id for check in asked.checks} == {identity}
    assert state(bus, immune) == "open"
    producer.rollback(immune)


def test_the_sender_gone_another_of_its_group_is_asked(broker, bus, t, g, eventually):
    with broker.connect() as gone:
        producer = gone.producer(g, checker=Asked(mq.UNKNOWN))
        identity = leave(producer, t, check_immunity=0.5)
    asked = Asked(mq.COMMIT)
    bus.producer(g, checker=asked)
    eventually(lambda: state(bus, identity) == "committed")
    assert {check.transaction_id for check in asked.checks} == {identity}


@pytest.mark.invariant("I11")
def test_nobody_there_costs_no_attempt(own, t, g, eventually):
    broker = own(check_max=100)
    with broker.connect() as other:
        with broker.connect() as bus:
            identity = leave(bus.producer(g, checker=Asked(mq.UNKNOWN)), t)
        eventually(lambda: not [one for one in other.admin.producers() if one["group"] == g and one["members"]])
        before = other.admin.transaction(identity)["checks"]
        bystander = other.producer(f"{g}-other", checker=Asked(mq.UNKNOWN, mq.UNKNOWN, mq.ROLLBACK))
        clock = leave(bystander, t)
        eventually(lambda: state(other, clock) == "rolled_back")  # three questions later
        assert other.admin.transaction(identity)["checks"] == before
        asked = Asked(mq.COMMIT)
        other.producer(g, checker=asked)
        eventually(lambda: state(other, identity) == "committed")
        assert asked.checks[0].attempt > before


def test_after_the_last_ask_it_is_parked_and_open_to_a_late_decision(own, t, g, eventually, drain):
    broker = own(check_max=2, transaction_timeout=0.05, check_interval=0.05)
    with broker.connect() as bus:
        asked = Asked(mq.UNKNOWN)
        producer = bus.producer(g, checker=asked)
        first, second, third = (leave(producer, t, body) for body in (b"1", b"2", b"3"))
        eventually(lambda: len(bus.admin.transactions(state="parked", group=g)) == 3)
        assert [bus.admin.transaction(identity)["checks"] for identity in (first, second, third)] == [2, 2, 2]
        assert {check.attempt for check in asked.checks} <= {1, 2}
        assert bus.admin.stats()[0]["parked"] == 3
        assert producer.commit(first) is mq.Code.COMMITTED
        assert bus.admin.rollback(second) is mq.Code.ROLLED_BACK
        assert bus.admin.commit(third) is mq.Code.COMMITTED
        with pytest.raises(mq.Rejected, match="CONFLICT"):
            bus.admin.rollback(third)
        assert {message.body for message in drain(bus.consumer(g, [t]), 2)} == {b"1", b"3"}
        assert bus.admin.transaction(third)["decided_by"] == "operator"


def test_an_operator_can_have_it_asked_again(own, t, g, eventually):
    broker = own(check_max=1, transaction_timeout=0.05, check_interval=0.05)
    with broker.connect() as bus:
        asked = Asked(mq.UNKNOWN)
        identity = leave(bus.producer(g, checker=asked), t)
        eventually(lambda: state(bus, identity) == "parked")  # it is asked too often, answered or not
        asked.one.acquire(timeout=5)
        asked.answers[:] = [mq.COMMIT]
        assert bus.admin.recheck(identity) is mq.Code.OK

        def committed() -> bool:
            found = state(bus, identity)
            if (
                found == "parked"
            ):  # on a busy machine the question may be lost: a producer that is late leaves for a while
                bus.admin.recheck(identity)
            return found == "committed"

        eventually(committed)
        assert {check.attempt for check in asked.checks} == {1}


def test_exhausted_checks_can_roll_back(own, t, g, eventually):
    broker = own(check_max=1, checks_exhausted="rollback", transaction_timeout=0.05, check_interval=0.05)
    with broker.connect() as bus:
        identity = leave(bus.producer(g, checker=Asked(mq.UNKNOWN)), t)
        eventually(lambda: state(bus, identity) == "rolled_back")
        assert bus.admin.transaction(identity)["decided_by"] == "exhausted"


def test_abandoned_prepares_are_parked_after_half_retention(own, t, g, eventually):
    broker = own(half_retention=1.0, check_interval=3600)
    with broker.connect() as bus:
        producer = bus.producer(g, checker=Asked(mq.UNKNOWN))
        identity = leave(producer, t, check_immunity=0.9)
        eventually(lambda: state(bus, identity) == "parked")
        with pytest.raises(mq.Rejected, match="BAD_DELAY"):
            leave(producer, t, check_immunity=1.1)
        assert producer.commit(identity) is mq.Code.COMMITTED


def test_check_counts_survive_a_restart(own, t, g, eventually):
    broker = own(check_max=1000)
    asked = Asked(mq.UNKNOWN)
    with broker.connect() as bus:
        producer = bus.producer(g, checker=asked)
        identity = leave(producer, t)
        assert asked.one.acquire(timeout=60)
        assert asked.one.acquire(timeout=60)
        producer.close()
        eventually(lambda: not [one for one in bus.admin.producers() if one["group"] == g and one["members"]])
        before = bus.admin.transaction(identity)["checks"]
        assert before >= asked.checks[-1].attempt
    broker.restart(kill=True)
    again = Asked(mq.COMMIT)
    with broker.connect() as bus:
        assert bus.admin.transaction(identity)["checks"] == before
        bus.producer(g, checker=again)
        eventually(lambda: state(bus, identity) == "committed")
        assert again.checks[0].attempt > before


def test_a_served_brokers_restart_is_noticed_by_its_producers(make_broker, served_kind, t, g, eventually):
    broker = make_broker(served_kind)
    asked = Asked(mq.COMMIT)
    with broker.connect() as bus:
        producer = bus.producer(g, checker=asked)
        identity = leave(producer, t, check_immunity=1.0)
        broker.restart(kill=True)
        eventually(lambda: state(bus, identity) == "committed")
        with producer.transaction() as txn:
            txn.send(t, b"after")
        assert state(bus, txn.id) == "committed"


async def test_coroutine_checkers(broker, t, g):
    async with await broker.aconnect() as bus:
        import asyncio

        done = asyncio.Event()

        async def decide(check):
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.05, done.set)
            return mq.COMMIT

        producer = bus.producer(g, checker=decide)
        async with producer.transaction() as txn:
            await txn.send(t, b"x")
            txn.leave_undecided()
        await asyncio.wait_for(done.wait(), 60)
        consumer = await bus.consumer(g, [t])
        (message,) = await consumer.receive(1, wait=60)
        assert message.transaction_id == txn.id


@pytest.mark.parametrize("given", ["COMMIT", None])
def test_an_answer_that_is_none_is_counted_and_asked_about_again(bus, t, g, eventually, given):
    asked, numbers = [], itertools.count()

    def decide(check):
        asked.append(check.attempt)
        return given if next(numbers) < 2 else mq.COMMIT

    before = bus.admin.stats()[0]["checks_answered_unknown_total"]
    producer = bus.producer(g, checker=decide)
    assert producer.wait_until_listening(60)
    transaction = producer.prepare(t, b"x").transaction_id
    eventually(lambda: bus.admin.transaction(transaction)["state"] == "committed")
    assert sorted(set(asked)) == sorted(asked), "each attempt once"
    assert len(asked) >= 3  # an answer that takes longer than the interval is asked for once more
    eventually(lambda: producer.unanswered == 2)
    eventually(lambda: bus.admin.stats()[0]["checks_answered_unknown_total"] >= before + 2)
