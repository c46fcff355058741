"""Check-back: whom the broker asks, when, how often, and what it costs."""

import pytest
from broker_bench import Bench, asked, prepare

from escrowmq.errors import Code
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, DecidedBy


def checks_of(bench: Bench) -> list[int]:
    return [t["checks"] for t in bench.look(lambda: _transactions(bench))]


def _transactions(bench: Bench):
    from escrowmq.ledger.listings import transactions

    return transactions(bench.engine.shard.ledger)


def test_the_session_that_sent_is_asked():
    bench = Bench()
    one, other = bench.session(instance="1"), bench.session(instance="2")
    first, second = bench.engine.listeners.join("g", one), bench.engine.listeners.join("g", other)
    (row,) = bench.prepare(other, {"body": b"whose?", "key": "k", "properties": [("p", "v")]})
    bench.pass_time(5.9)
    assert first.waiting == second.waiting == 0
    bench.pass_time(0.1)
    assert first.waiting == 0
    (check,) = asked(second)
    assert check["transaction"] == row["transaction"]
    assert (check["attempt"], check["body"], check["key"], check["properties"]) == (1, b"whose?", "k", [("p", "v")])


def test_the_sender_is_gone_so_another_of_its_group_is_asked():
    bench = Bench()
    one, other = bench.session(instance="1"), bench.session(instance="2")
    sender, second = bench.engine.listeners.join("g", one), bench.engine.listeners.join("g", other)
    stranger = bench.engine.listeners.join("h", bench.session("h"))
    (row,) = bench.prepare(one, {"body": b"x"})
    bench.engine.listeners.leave(sender)
    bench.pass_time(6)
    assert [c["transaction"] for c in asked(second)] == [row["transaction"]]
    assert stranger.waiting == 0
    assert bench.end(other, COMMIT, row["transaction"], by=DecidedBy.CHECK) == [Code.COMMITTED]


def test_nobody_there_costs_no_attempt():
    """I11"""
    bench = Bench()
    session = bench.session()
    bench.prepare(session, {})
    for _ in range(50):
        bench.pass_time(60)
    assert checks_of(bench) == [0]
    member = bench.engine.listeners.join("g", session)
    bench.engine.step()
    assert [c["attempt"] for c in asked(member)] == [1]


@pytest.mark.parametrize("immunity", [8 * 60, 3600])
def test_immunity_is_waited_for_and_spends_no_check(immunity):
    """RocketMQ: immunity longer than 7.5 min spent all 15 checks without one being sent."""
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, {"immunity_us": immunity * 1_000_000})
    for _ in range(immunity // 30 - 1):
        bench.pass_time(30)
    bench.pass_time(29.999)
    assert member.waiting == 0
    assert checks_of(bench) == [0]
    bench.pass_time(0.001)
    assert [c["attempt"] for c in asked(member)] == [1]


@pytest.mark.invariant("I12")
@pytest.mark.parametrize(("then", "state"), [("park", "parked"), ("rollback", "rolled_back")])
def test_after_the_last_check_it_is_parked_or_rolled_back(then, state):
    """I12"""
    bench = Bench(check_max=3, checks_exhausted=then)
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    (row,) = bench.prepare(session, {})
    attempts = []
    for _ in range(20):
        bench.pass_time(30)
        for check in asked(member):
            attempts.append(check["attempt"])
            assert bench.end(session, UNKNOWN, check["transaction"], by=DecidedBy.CHECK) == [Code.NOTED]
    assert attempts == [1, 2, 3]
    (transaction,) = bench.look(lambda: _transactions(bench))
    assert transaction["state"] == state
    late = Code.COMMITTED if then == "park" else Code.CONFLICT
    assert bench.end(session, COMMIT, row["transaction"]) == [late]


@pytest.mark.invariant("I10")
def test_a_decided_transaction_is_never_asked():
    """I10"""
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    rows = bench.prepare(session, {}, {}, {})
    bench.end(session, COMMIT, rows[0]["transaction"])
    bench.end(session, ROLLBACK, rows[1]["transaction"])
    bench.pass_time(6)
    assert [c["transaction"] for c in asked(member)] == [rows[2]["transaction"]]


@pytest.mark.invariant("I10")
def test_a_question_that_is_overtaken_by_its_decision_is_not_put():
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    rows = bench.prepare(session, {}, {})
    bench.pass_time(6)
    assert member.waiting == 2
    bench.end(session, COMMIT, rows[0]["transaction"])
    assert [c["transaction"] for c in asked(member)] == [rows[1]["transaction"]]


@pytest.mark.invariant("I11")
def test_check_counts_survive_a_crash():
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, {})
    bench.pass_time(6)
    bench.pass_time(30)
    assert [c["attempt"] for c in asked(member)] == [1, 2]
    bench.restart(clean=False)
    assert checks_of(bench) == [2]
    member = bench.engine.listeners.join("g", session)
    bench.pass_time(30)
    assert [c["attempt"] for c in asked(member)] == [3]


@pytest.mark.invariant("I11")
def test_the_count_is_durable_before_the_question_leaves():
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, {})
    bench.disk.fail_next_sync = True
    bench.pass_time(6)
    assert bench.engine.status == "stopped"
    assert member.waiting == 0


def test_a_window_bounds_the_open_questions_and_answers_free_it():
    bench = Bench(checks_in_flight=3)
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, *[{} for _ in range(8)])
    bench.pass_time(6)
    first = asked(member)
    assert len(first) == 3
    bench.pass_time(1)
    assert member.waiting == 0
    bench.end(session, COMMIT, *[c["transaction"] for c in first[:2]], by=DecidedBy.CHECK)
    assert len(asked(member)) == 2
    assert sorted(checks_of(bench)) == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.invariant("I13")
def test_an_unanswered_question_gives_its_place_back_after_the_interval():
    bench = Bench(checks_in_flight=2)
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, {}, {}, {})
    bench.pass_time(6)
    silent = {c["transaction"] for c in asked(member)}
    assert bench.engine.wake_us <= bench.clock.now_us() + 30_000_000
    bench.pass_time(30)
    again = [c["transaction"] for c in asked(member)]
    assert len(silent) == 2
    assert len(again) == 2
    assert set(again) - silent, "the one that was never asked comes first or among them"


@pytest.mark.invariant("I13")
def test_a_slow_member_delays_nobody():
    """I13"""
    bench = Bench(checks_in_flight=2)
    slow, quick = bench.session(instance="slow"), bench.session(instance="quick")
    bench.engine.listeners.join("g", slow)  # takes questions, never answers
    member = bench.engine.listeners.join("g", quick)
    bench.prepare(slow, *[{} for _ in range(6)])
    answered = 0
    bench.pass_time(6)
    for _ in range(10):
        for check in asked(member):
            answered += 1
            bench.end(quick, COMMIT, check["transaction"], by=DecidedBy.CHECK)
        bench.pass_time(0.01)
    assert answered == 4, "all but the two that wait at the slow one"


@pytest.mark.invariant("I13")
def test_one_bad_record_never_stops_the_round(monkeypatch):
    """RocketMQ: one exception in a check round left its offsets in place."""
    from escrowmq.errors import error

    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    rows = bench.prepare(session, *[{"body": bytes([n])} for n in range(5)])
    bad, read = rows[2]["position"], bench.engine.log.read

    def reading(positions):
        if bad in positions:
            raise error(Code.DAMAGED)
        return read(positions)

    monkeypatch.setattr(member, "_read", reading)
    bench.pass_time(6)
    assert [c["body"][0] for c in asked(member)] == [0, 1, 3, 4]


def test_all_messages_of_a_transaction_come_with_its_question_side_by_side():
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    one, other = bench.prepare(session, {"body": b"a1"}, {"body": b"b1"})
    bench.prepare(session, {"body": b"a2", "topic": "points", "transaction": one["transaction"]})
    bench.pass_time(6)
    assert [(c["body"], c["transaction"]) for c in asked(member)] == [
        (b"a1", one["transaction"]),
        (b"a2", one["transaction"]),
        (b"b1", other["transaction"]),
    ]


@pytest.mark.invariant("I13")
def test_a_question_writes_few_bytes():
    """I13, design section 11: at most 64 bytes a check of a waiting half message."""
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, *[{"body": bytes(1000)} for _ in range(500)])
    before = bench.engine.log.bytes_written
    bench.pass_time(6)
    assert len(asked(member)) == 500
    assert (bench.engine.log.bytes_written - before) / 500 <= 64


@pytest.mark.invariant("I36")
def test_the_clock_of_the_producer_has_no_say():
    """RocketMQ: age = broker clock - producer clock: skew made checks early or never."""
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    bench.prepare(session, {"born_us": 0}, {"born_us": 1 << 60})
    bench.pass_time(5.9)
    assert member.waiting == 0
    bench.pass_time(0.1)
    assert len(asked(member)) == 2


@pytest.mark.invariant("I15")
def test_an_answer_of_another_group_decides_nothing():
    """I15"""
    bench = Bench()
    session, foreign = bench.session(), bench.session("h")
    (row,) = bench.prepare(session, {})
    assert bench.end(foreign, COMMIT, row["transaction"], by=DecidedBy.CHECK) == [Code.WRONG_GROUP]
    assert bench.end(session, ROLLBACK, row["transaction"]) == [Code.ROLLED_BACK]


def test_requests_of_many_callers_are_asked_together():
    bench = Bench()
    session = bench.session()
    member = bench.engine.listeners.join("g", session)
    for _ in range(20):
        bench.engine.submit(prepare(session, {}))
    bench.engine.step()
    bench.pass_time(6)
    assert member.waiting == 20
    assert len(asked(member)) == 20
