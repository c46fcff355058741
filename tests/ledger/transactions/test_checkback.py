"""Check-back by broker time: who is asked, when, how often, and what follows the last question (1.6 to 1.8, I10 to
I15).
"""

import pyarrow as pa
import pytest

from escrowmq.errors import Code
from escrowmq.ledger import listings
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import (
    AlterProducers,
    Configure,
    OpenSession,
    ProducerRules,
    Recheck,
    Retain,
    Rules,
)
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, DecidedBy, TransactionId
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import LedgerDriver, ask_us, tables_equal, wake_us

SECOND = 1_000_000
HOUR = 3600.0


def asked(driver: LedgerDriver, group: str = "g", limit: int = 1000) -> list[tuple[int, int]]:
    """(position, attempt) of what is asked now."""
    answer = driver.ask(group, limit)
    return list(zip(answer.transactions.tolist(), answer.attempts.tolist(), strict=True))


def position(receipt: dict) -> int:
    return TransactionId.from_bytes(receipt["transaction"]).position


def state(driver: LedgerDriver, receipt: dict) -> str:
    return listings.transaction(driver.ledger, TransactionId.from_bytes(receipt["transaction"]))["state"]


@pytest.mark.invariant("I10")
def test_first_question_after_six_seconds_not_before(driver):
    [r] = driver.prepare(driver.session(), {})
    driver.now_us += 6 * SECOND - 1
    assert asked(driver) == []
    assert ask_us(driver.ledger, driver.now_us) == driver.now_us + 1
    driver.now_us += 1
    assert asked(driver) == [(position(r), 1)]


def test_then_every_thirty_seconds(driver):
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    for attempt in range(1, 6):
        assert asked(driver) == [(position(r), attempt)]
        assert asked(driver) == []
        driver.now_us += 30 * SECOND - 1
        assert asked(driver) == []
        driver.now_us += 1


def test_the_question_names_the_session_that_prepared(driver):
    driver.session("g", "a")
    second = driver.session("g", "b")
    driver.prepare(second, {})
    driver.advance(6)
    assert driver.ask().epochs.tolist() == [second]


@pytest.mark.invariant("I11")
def test_i11_check_max_questions_then_an_interval_then_parked(driver):
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    for _ in range(15):
        assert len(asked(driver)) == 1
        driver.advance(30)
    driver.now_us -= 1
    driver.tick()
    assert (asked(driver), state(driver, r)) == ([], "open")
    assert wake_us(driver.ledger, driver.now_us) == driver.now_us + 1
    driver.now_us += 1
    assert asked(driver) == []
    driver.tick()
    assert state(driver, r) == "parked"
    assert driver.ledger.counters["checks_asked_total"] == 15
    driver.advance(HOUR)
    driver.tick()
    assert asked(driver) == []
    assert wake_us(driver.ledger, driver.now_us) == NEVER_US


@pytest.mark.invariant("I12")
def test_i12_parked_is_listed_kept_and_open_to_a_late_decision():
    driver = LedgerDriver(Rules(check_max=1))
    session = driver.session()
    receipts = driver.prepare(session, {}, {}, {})
    driver.advance(6)
    assert len(asked(driver)) == 3
    driver.advance(30)
    driver.tick()
    listed = listings.transactions(driver.ledger, state="parked")
    assert [row["position"] for row in listed] == [position(r) for r in receipts]
    assert driver.visible() == []
    assert driver.end(session, (receipts[0]["transaction"], COMMIT)) == [Code.COMMITTED]
    assert driver.end(session, (receipts[1]["transaction"], ROLLBACK), by=DecidedBy.CHECK) == [Code.ROLLED_BACK]
    assert driver.end(0, (receipts[2]["transaction"], COMMIT), by=DecidedBy.OPERATOR) == [Code.COMMITTED]
    assert listings.transactions(driver.ledger, state="parked") == []
    assert driver.visible() == [position(receipts[0]), position(receipts[2])]
    assert (
        listings.producers_list(driver.ledger)[0] | {"open": 0, "parked": 0}
        == listings.producers_list(driver.ledger)[0]
    )


@pytest.mark.invariant("I12")
def test_exhausted_means_rollback_when_the_rules_say_so():
    driver = LedgerDriver(Rules(check_max=1, exhausted_rollback=True))
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(6)
    driver.ask()
    driver.advance(30)
    driver.tick()
    assert state(driver, r) == "rolled_back"
    assert driver.end(session, (r["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.visible() == []


def test_an_answer_before_the_end_of_the_last_interval_counts():
    driver = LedgerDriver(Rules(check_max=1))
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(6)
    driver.ask()
    driver.advance(29)
    assert driver.end(session, (r["transaction"], COMMIT), by=DecidedBy.CHECK) == [Code.COMMITTED]
    driver.advance(1)
    driver.tick()
    assert state(driver, r) == "committed"


def test_an_unknown_answer_decides_nothing_and_is_asked_again(driver):
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(6)
    driver.ask()
    events = len(driver.events)
    assert driver.end(session, (r["transaction"], UNKNOWN), by=DecidedBy.CHECK) == [Code.NOTED]
    assert len(driver.events) == events
    driver.advance(30)
    assert asked(driver) == [(position(r), 2)]


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_i10_a_decided_transaction_is_never_asked(driver, outcome):
    session = driver.session()
    one, two = driver.prepare(session, {}, {})
    driver.advance(6)
    driver.end(session, (one["transaction"], outcome))
    assert asked(driver) == [(position(two), 1)]
    driver.end(session, (two["transaction"], outcome))
    driver.advance(HOUR)
    assert asked(driver) == []
    assert ask_us(driver.ledger, driver.now_us) == NEVER_US
    assert driver.ledger.transactions.open == {0: 0}


@pytest.mark.parametrize("immunity", [8 * 60.0, HOUR])
def test_1_7_long_immunity_costs_no_attempt(driver, immunity):
    """RocketMQ spent all 15 checks during an immunity of more than 7.5 minutes."""
    session = driver.session()
    [r] = driver.prepare(session, {"immunity_us": int(immunity * 1e6)})
    for _ in range(int(immunity) // 30):
        driver.advance(30)
        driver.now_us -= 1
        driver.tick()
        assert asked(driver) == []
    assert listings.transactions(driver.ledger)[0]["checks"] == 0
    driver.now_us += int(immunity) // 30
    assert asked(driver) == [(position(r), 1)]
    driver.advance(30)
    assert asked(driver) == [(position(r), 2)]


def test_a_message_not_yet_due_holds_up_nobody(driver):
    session = driver.session()
    slow, quick = driver.prepare(session, {"immunity_us": 60 * SECOND}, {})
    driver.advance(6)
    assert asked(driver) == [(position(quick), 1)]
    driver.advance(54)
    assert sorted(asked(driver)) == [(position(slow), 1), (position(quick), 2)]


@pytest.mark.invariant("I11")
def test_i11_an_absent_producer_costs_nothing(driver):
    [r] = driver.prepare(driver.session(), {})
    for _ in range(100):
        driver.advance(30)
        driver.tick()  # nobody there: the shell asks nobody, so no AskChecks
    assert state(driver, r) == "open"
    assert asked(driver) == [(position(r), 1)]


@pytest.mark.invariant("I13")
def test_i13_groups_are_asked_apart(driver):
    mine, theirs = driver.session("g"), driver.session("h")
    [r1], [r2] = driver.prepare(mine, {}), driver.prepare(theirs, {})
    driver.advance(6)
    assert asked(driver, "h") == [(position(r2), 1)]
    assert asked(driver, "g") == [(position(r1), 1)]
    assert asked(driver, "no such group") == []


@pytest.mark.invariant("I13")
def test_i13_a_question_writes_eight_bytes(driver):
    driver.prepare(driver.session(), *[{"body": b"x" * 10_000}] * 3)
    driver.advance(6)
    driver.ask()
    kind, batch, _, _ = driver.events[-1]
    assert (kind, batch.nbytes) == (Kind.CHECKED, 24)


def test_a_limit_takes_the_longest_overdue_first(driver):
    session = driver.session()
    receipts = []
    for _ in range(6):
        receipts += driver.prepare(session, {})
        driver.advance(1)
    driver.advance(6)
    assert [p for p, _ in asked(driver, limit=4)] == [position(r) for r in receipts[:4]]
    assert [p for p, _ in asked(driver, limit=4)] == [position(r) for r in receipts[4:]]
    assert asked(driver, limit=4) == []
    assert asked(driver, limit=0) == []


@pytest.mark.invariant("I11")
def test_1_12_counts_survive_replay_and_snapshots(driver):
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    for _ in range(7):
        driver.ask()
        driver.advance(30)
    for ledger in (driver.replay(), Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())):
        driver.ledger = ledger
        assert listings.transactions(ledger)[0]["checks"] == 7
        assert ask_us(ledger, driver.now_us) == driver.now_us
    assert asked(driver) == [(position(r), 8)]


@pytest.mark.invariant("I14")
@pytest.mark.parametrize("exhausted_rollback", [False, True])
def test_1_8_half_retention_ends_the_waiting_asked_or_not(exhausted_rollback):
    rules = Rules(half_retention_us=60 * SECOND, exhausted_rollback=exhausted_rollback)
    driver = LedgerDriver(rules)
    session = driver.session()
    [r] = driver.prepare(session, {})
    driver.advance(30)
    [young] = driver.prepare(session, {})
    driver.now_us += 30 * SECOND - 1
    driver.tick()
    assert state(driver, r) == "open"
    assert wake_us(driver.ledger, driver.now_us) == driver.now_us + 1
    driver.now_us += 1
    driver.tick()
    assert state(driver, r) == ("rolled_back" if exhausted_rollback else "parked")
    assert state(driver, young) == "open"


def test_recheck_opens_a_parked_transaction_anew_and_gives_all_questions():
    driver = LedgerDriver(Rules(check_max=2))
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    for _ in range(2):
        driver.ask()
        driver.advance(30)
    driver.tick()
    assert state(driver, r) == "parked"
    driver.advance(HOUR)
    assert driver.do(Recheck(pa.array([r["transaction"]], pa.binary(16)))).tolist() == [Code.OK]
    for attempt in (1, 2):
        assert asked(driver) == [(position(r), attempt)]
        driver.advance(30)
        driver.tick()
    assert state(driver, r) == "parked"


def test_recheck_past_half_retention_asks_before_it_parks_again():
    driver = LedgerDriver(Rules(check_max=2, half_retention_us=60 * SECOND))
    [r] = driver.prepare(driver.session(), {})
    driver.advance(60)
    driver.tick()
    assert state(driver, r) == "parked"
    driver.do(Recheck(pa.array([r["transaction"]], pa.binary(16))))
    driver.tick()
    assert state(driver, r) == "open"
    assert wake_us(driver.ledger, driver.now_us) == NEVER_US, "nothing for a tick to do: waiting for a member to ask"
    assert asked(driver) == [(position(r), 1)]
    driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    driver.tick()
    assert state(driver, r) == "open"
    driver.advance(30)
    assert asked(driver) == [(position(r), 2)]
    driver.advance(30)
    driver.tick()
    assert state(driver, r) == "parked"


def test_recheck_at_the_very_moment_the_last_interval_ends_is_not_parked():
    driver = LedgerDriver(Rules(check_max=1))
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    driver.ask()
    driver.advance(30)
    driver.do(Recheck(pa.array([r["transaction"]], pa.binary(16))))
    driver.tick()
    assert state(driver, r) == "open"
    assert asked(driver) == [(position(r), 1)]


def test_recheck_of_wrong_ids_and_twice(driver):
    session = driver.session()
    one, two = driver.prepare(session, {}, {})
    driver.end(session, (two["transaction"], COMMIT))
    ids = pa.array([one["transaction"], one["transaction"], two["transaction"], b"\0" * 16], pa.binary(16))
    codes = driver.do(Recheck(ids)).tolist()
    assert codes == [Code.OK, Code.OK, Code.TRANSACTION_DECIDED, Code.WRONG_SHARD]
    assert asked(driver) == [(position(one), 1)]


@pytest.mark.parametrize("restart", [False, True])
def test_more_questions_allowed_meanwhile(restart):
    driver = LedgerDriver(Rules(check_max=1))
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    driver.ask()
    driver.do(Configure(Rules(check_max=3)))
    if restart:
        driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    driver.advance(30)
    driver.tick()
    assert state(driver, r) == "open"
    assert asked(driver) == [(position(r), 2)]


@pytest.mark.parametrize("restart", [False, True])
def test_fewer_questions_allowed_meanwhile(restart):
    driver = LedgerDriver(Rules(check_max=5))
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    driver.ask()
    driver.advance(30)
    driver.ask()
    driver.do(Configure(Rules(check_max=2)))
    if restart:
        driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    driver.advance(30)
    assert asked(driver) == []
    driver.tick()
    assert state(driver, r) == "parked"


@pytest.mark.invariant("I14")
def test_i14_everything_ends_within_its_time():
    """Whatever a producer answers: after timeout + check_max × interval nothing is undecided but what is parked."""
    driver = LedgerDriver(Rules(check_max=3))
    session = driver.session()
    receipts = driver.prepare(session, *[{}] * 20)
    answers = {0: COMMIT, 1: ROLLBACK, 2: UNKNOWN}
    for _ in range(6 + 3 * 30 + 1):
        driver.advance(1)
        for n, (first, attempt) in enumerate(asked(driver)):
            raw = next(r["transaction"] for r in receipts if position(r) == first)
            if (n + attempt) % 4 < 3:
                driver.end(session, (raw, answers[(n + attempt) % 4]), by=DecidedBy.CHECK)
        driver.tick()
    assert {state(driver, r) for r in receipts} <= {"committed", "rolled_back", "parked"}


@pytest.mark.invariant("I36")
def test_i36_ages_do_not_look_at_the_clients_clock(driver):
    session = driver.session()
    receipts = driver.prepare(session, {"born_us": 0}, {"born_us": 4_000_000_000_000_000}, {"born_us": -5})
    driver.advance(6)
    assert asked(driver) == [(position(r), 1) for r in receipts]


def test_an_expired_transaction_is_not_asked(driver):
    driver.prepare(driver.session(), {})
    driver.advance(6)
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    assert asked(driver) == []
    driver.tick()


# Rules of a group's own (1.14)

MINUTE = 60 * SECOND
OWN = ProducerRules(transaction_timeout_us=MINUTE, check_interval_us=2 * MINUTE, check_max=2, exhausted_rollback=True)


@pytest.mark.invariant("I11")
def test_1_14_a_group_has_its_own_first_question_interval_count_and_end(driver):
    driver.do(AlterProducers("slow", OWN))
    slow, quick = driver.session("slow"), driver.session("quick")
    [r], [q] = driver.prepare(slow, {}), driver.prepare(quick, {})
    begun = driver.now_us
    driver.now_us = begun + 6 * SECOND
    assert (asked(driver, "slow"), asked(driver, "quick")) == ([], [(position(q), 1)])
    driver.now_us = begun + MINUTE
    assert asked(driver, "slow") == [(position(r), 1)]
    assert asked(driver, "quick") == [(position(q), 2)]
    driver.now_us += 2 * MINUTE - 1
    assert asked(driver, "slow") == []
    driver.now_us += 1
    assert asked(driver, "slow") == [(position(r), 2)]
    assert wake_us(driver.ledger, driver.now_us) == driver.now_us + 2 * MINUTE
    driver.now_us += 2 * MINUTE - 1
    driver.tick()
    assert state(driver, r) == "open"
    driver.now_us += 1
    driver.tick()
    assert (state(driver, r), state(driver, q)) == ("rolled_back", "open")
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


@pytest.mark.invariant("I12")
def test_1_14_what_follows_the_last_question_is_said_by_each_group():
    driver = LedgerDriver(Rules(check_max=1, exhausted_rollback=True))
    driver.do(AlterProducers("keep", ProducerRules(exhausted_rollback=False)))
    [k], [d] = driver.prepare(driver.session("keep"), {}), driver.prepare(driver.session("drop"), {})
    driver.advance(6)
    asked(driver, "keep"), asked(driver, "drop")
    driver.advance(30)
    driver.tick()
    assert (state(driver, k), state(driver, d)) == ("parked", "rolled_back")


def test_a_group_in_which_something_is_undecided_is_altered(driver):
    """Fewer questions than were asked already: the end of waiting is the next thing to come. More again: a question
    is."""
    [r] = driver.prepare(driver.session(), {})
    driver.advance(6)
    asked(driver)
    driver.advance(30)
    asked(driver)
    driver.do(AlterProducers("g", ProducerRules(check_max=2)))
    driver.advance(30)
    assert asked(driver) == []
    driver.do(AlterProducers("g", ProducerRules(), ("check_max",)))
    assert asked(driver) == [(position(r), 3)]
    driver.do(AlterProducers("g", ProducerRules(check_max=3)))
    driver.advance(30)
    driver.tick()
    assert state(driver, r) == "parked"


def test_a_group_made_with_rules_survives_a_snapshot(driver):
    driver.do(OpenSession("g", "i", True, rules=OWN))
    [r] = driver.prepare(1, {})
    restored = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    driver.ledger = restored
    driver.advance(59)
    assert asked(driver) == []
    driver.advance(1)
    assert asked(driver) == [(position(r), 1)]
    [listed] = listings.producers_list(driver.ledger)
    assert (listed["transaction_timeout"], listed["check_interval"], listed["check_max"]) == (60, 120, 2)
    assert (listed["checks_exhausted"], listed["kind"]) == ("rollback", "transactional")
    assert listed["own"] == ["transaction_timeout", "check_interval", "check_max", "checks_exhausted"]


def test_check_immunity_of_a_message_comes_before_that_of_its_group(driver):
    driver.do(AlterProducers("g", OWN))
    [r] = driver.prepare(driver.session(), {"immunity_us": SECOND})
    driver.advance(1)
    assert asked(driver) == [(position(r), 1)]
