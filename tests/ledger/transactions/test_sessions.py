"""Producer sessions: epochs, fencing (I7), groups of one kind (1.10), refusals."""

import numpy as np
import pytest

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import AlterProducers, Configure, Forget, OpenSession, Prepare, ProducerRules, Rules
from escrowmq.ledger.events import event_of_rows
from escrowmq.model import COMMIT
from escrowmq.schemas import Kind
from escrowmq.testing.ledgers import LedgerDriver, outgoing, tables_equal


def refusal(driver: LedgerDriver, group: str = "g", instance: str = "i", *, transactional: bool = True) -> Code:
    with pytest.raises(EscrowError) as caught:
        driver.do(OpenSession(group, instance, transactional))
    return caught.value.code


def test_epochs_count_up_over_the_whole_shard(driver):
    opened = [driver.session("g", "a"), driver.session("h", "a"), driver.session("g", "b"), driver.session("g", "a")]
    assert opened == [1, 2, 3, 4]


def test_epochs_go_on_after_replay(driver):
    driver.session()
    driver.session()
    assert driver.replay().sessions.next_epoch == 3


@pytest.mark.invariant("I7")
def test_i7_newer_session_of_the_same_instance_fences_the_older(driver):
    old = driver.session()
    [receipt] = driver.prepare(old, {})
    new = driver.session()
    assert driver.prepare(old, {})[0]["code"] == Code.FENCED
    assert driver.send({}, session=old)[0]["code"] == Code.FENCED
    assert driver.end(old, (receipt["transaction"], COMMIT)) == [Code.FENCED]
    assert driver.visible() == []
    assert driver.end(new, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]


@pytest.mark.invariant("I7")
def test_i7_a_fenced_session_stays_fenced_through_a_snapshot(driver):
    old, _ = driver.session(), driver.session()
    restored = type(driver.ledger).restore(driver.ledger.shard, driver.ledger.snapshot())
    assert restored.sessions.check(np.array([old]), transactional=True, rules=restored.rules).tolist() == [Code.FENCED]


def test_other_instances_and_groups_are_not_fenced(driver):
    sessions = [driver.session("g", "a"), driver.session("g", "b"), driver.session("h", "a")]
    assert [driver.prepare(s, {})[0]["code"] for s in sessions] == [Code.OK] * 3


@pytest.mark.invariant("I7")
def test_sessions_are_checked_row_by_row(driver):
    old, plain = driver.session("g", "a"), driver.session("p", "a", transactional=False)
    new = driver.session("g", "a")
    answer = driver.do(Prepare(outgoing([{}] * 5), np.array([new, old, plain, 99, 0])))
    expected = [Code.OK, Code.FENCED, Code.GROUP_KIND, Code.UNKNOWN_SESSION, Code.UNKNOWN_SESSION]
    assert answer.column("code").to_pylist() == expected
    assert driver.ledger.counters["half_messages_total"] == 1


def test_unknown_session_is_refused_everywhere(driver):
    assert driver.prepare(7, {})[0]["code"] == Code.UNKNOWN_SESSION
    assert driver.send({}, session=7)[0]["code"] == Code.UNKNOWN_SESSION
    assert driver.send({}, session=-1)[0]["code"] == Code.UNKNOWN_SESSION


def test_1_10_transactional_group_sends_nothing_plain(driver):
    transactional = driver.session()
    assert driver.send({}, session=transactional)[0]["code"] == Code.GROUP_KIND
    plain_in_it = driver.session("g", "other", transactional=False)
    assert driver.send({}, session=plain_in_it)[0]["code"] == Code.GROUP_KIND
    assert driver.prepare(plain_in_it, {})[0]["code"] == Code.GROUP_KIND


def test_1_10_a_mistaken_prepare_is_refused_and_spoils_no_plain_group(driver):
    plain = driver.session("g", "a", transactional=False)
    assert driver.send({}, session=plain)[0]["code"] == Code.OK
    for ledger in (driver.ledger, driver.replay(), type(driver.ledger).restore(1, driver.ledger.snapshot())):
        with pytest.raises(EscrowError, match="escrowmq groups alter-producers g --kind transactional") as refused:
            ledger.decide(OpenSession("g", "b", True), driver.now_us)
        assert refused.value.code is Code.GROUP_KIND
    assert driver.send({}, session=plain)[0]["code"] == Code.OK
    assert driver.ledger.sessions.kind(0, driver.ledger.rules) == "plain"


def spoilt(driver) -> int:
    """A group as 0.1.0 left it: it sends plain messages, and somebody prepared under it. Its plain session."""
    plain = driver.session("g", "a", transactional=False)
    driver.send({}, session=plain)
    event = event_of_rows(Kind.SESSION, [(2, "g", "mistake", True)])
    driver.events.append((event.kind, event.batch, driver.ledger.next_position, driver.now_us))
    driver.ledger.apply(event.kind, event.batch, driver.ledger.next_position, driver.now_us)
    return plain


def test_1_10_a_person_puts_a_spoilt_group_right(driver):
    plain = spoilt(driver)
    assert driver.send({}, session=plain)[0]["code"] == Code.GROUP_KIND
    [receipt] = driver.prepare(2, {})
    assert driver.do(AlterProducers("g", ProducerRules(kind="plain"))) == ProducerRules(kind="plain")
    assert driver.send({}, session=plain)[0]["code"] == Code.OK
    assert driver.prepare(2, {})[0]["code"] == Code.GROUP_KIND
    driver.advance(6)
    assert len(driver.ask().transactions) == 1, "what was prepared by mistake is asked about all the same"
    assert driver.end(2, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]
    restored = type(driver.ledger).restore(driver.ledger.shard, driver.ledger.snapshot())
    for ledger in (restored, driver.replay()):
        assert tables_equal(ledger.snapshot(), driver.ledger.snapshot())
        codes = ledger.sessions.check(np.array([plain, 2]), transactional=False, rules=ledger.rules)
        assert codes.tolist() == [Code.OK, Code.OK]


def test_a_kind_that_is_taken_back_is_said_anew_by_what_comes_next(driver):
    plain = spoilt(driver)
    driver.do(AlterProducers("g", ProducerRules(kind="plain")))
    driver.do(AlterProducers("g", ProducerRules(), ("kind",)))
    assert driver.ledger.sessions.kind(0, driver.ledger.rules) is None
    assert driver.send({}, session=plain)[0]["code"] == Code.OK
    assert driver.ledger.sessions.kind(0, driver.ledger.rules) == "plain"


@pytest.mark.parametrize("kind", ["plain", "transactional", "mixed"])
def test_a_kind_of_its_own_comes_before_everything_else(kind):
    driver = LedgerDriver(Rules(mixed_groups=kind != "mixed"))
    driver.do(AlterProducers("g", ProducerRules(kind=kind)))
    plain = driver.session("g", "p", transactional=False)
    assert driver.send({}, session=plain)[0]["code"] == (Code.GROUP_KIND if kind == "transactional" else Code.OK)
    if kind == "plain":
        with pytest.raises(EscrowError, match="GROUP_KIND"):
            driver.session("g", "t")
    else:
        assert driver.prepare(driver.session("g", "t"), {})[0]["code"] == Code.OK


def test_a_group_with_rules_of_its_own_outlives_its_sessions(driver):
    driver.do(AlterProducers("g", ProducerRules(kind="transactional")))
    first = driver.session()
    driver.advance(10)
    assert driver.do(Forget(driver.now_us, np.empty(0, np.int64))) == 1
    assert driver.ledger.sessions.groups == {0: "g"}
    again = driver.session()
    assert again > first
    assert driver.send({}, session=again)[0]["code"] == Code.GROUP_KIND
    driver.advance(10)
    driver.do(Forget(driver.now_us, np.empty(0, np.int64)))
    driver.do(AlterProducers("g", ProducerRules(), ("kind",)))
    assert driver.ledger.sessions.groups == {}, "nothing is left to remember"
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


def test_a_snapshot_of_before_takes_groups_that_are_not_transactional_for_plain(driver):
    driver.session("shop", "a")
    plain = driver.session("news", "a", transactional=False)
    driver.send({}, session=plain)
    tables = driver.ledger.snapshot()
    tables["producer_groups"] = tables["producer_groups"].drop_columns(["plain", "rules"])
    old = type(driver.ledger).restore(driver.ledger.shard, tables)
    assert [old.sessions.kind(n, old.rules) for n in (0, 1)] == ["transactional", "plain"]


@pytest.mark.parametrize(
    ("rules", "reset", "code"),
    [
        (ProducerRules(kind="both"), (), Code.BAD_REQUEST),
        (ProducerRules(check_max=0), (), Code.BAD_REQUEST),
        (ProducerRules(check_interval_us=0), (), Code.BAD_REQUEST),
        (ProducerRules(transaction_timeout_us=73 * 3600 * 1_000_000), (), Code.BAD_DELAY),
        (ProducerRules(), ("colour",), Code.BAD_REQUEST),
        (ProducerRules(kind="plain"), ("kind",), Code.BAD_REQUEST),
    ],
)
def test_rules_that_make_no_sense_are_refused(driver, rules, reset, code):
    with pytest.raises(EscrowError) as refused:
        driver.do(AlterProducers("g", rules, reset))
    assert refused.value.code is code
    assert driver.ledger.sessions.groups == {}


def test_a_group_is_made_with_rules_and_keeps_them(driver):
    wanted = ProducerRules(transaction_timeout_us=60_000_000, check_max=3)
    driver.do(OpenSession("g", "a", True, rules=wanted))
    driver.do(OpenSession("g", "b", True, rules=wanted))
    driver.do(OpenSession("g", "c", True))
    with pytest.raises(EscrowError, match="check_max 3, not 4") as refused:
        driver.do(OpenSession("g", "d", True, rules=ProducerRules(check_max=4)))
    assert refused.value.code is Code.GROUP_RULES
    assert driver.ledger.sessions.own == {0: wanted}


def test_mixed_groups_send_both():
    driver = LedgerDriver(Rules(mixed_groups=True))
    session = driver.session()
    assert driver.send({}, session=session)[0]["code"] == Code.OK
    assert driver.prepare(session, {})[0]["code"] == Code.OK


def test_messages_without_a_session_are_plain_only(driver):
    assert driver.send({})[0]["code"] == Code.OK
    assert driver.prepare(0, {})[0]["code"] == Code.UNKNOWN_SESSION


def test_1_10_a_broker_can_refuse_transactional_messages():
    driver = LedgerDriver(Rules(reject_transactional=True))
    assert refusal(driver) == Code.NO_PERMISSION
    session = driver.session(transactional=False)
    assert driver.prepare(session, {})[0]["code"] == Code.NO_PERMISSION
    assert driver.send({}, session=session)[0]["code"] == Code.OK


def test_reject_transactional_set_later_still_lets_open_transactions_end(driver):
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    driver.do(Configure(Rules(reject_transactional=True)))
    assert driver.prepare(session, {})[0]["code"] == Code.NO_PERMISSION
    assert driver.end(session, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]


@pytest.mark.parametrize("name", ["", "%g", ".g", "a b", "ä", "a/b", "x" * 128, "g\n", "../up"])
def test_bad_group_names(driver, name):
    assert refusal(driver, name) == Code.BAD_GROUP_NAME


def test_longest_names_are_fine(driver):
    assert driver.session("x" * 127, "i" * 255) == 1


@pytest.mark.parametrize("instance", ["i" * 256, "ä" * 128, "half \ud800 a character"])
def test_bad_instance_names(driver, instance):
    assert refusal(driver, "g", instance) == Code.BAD_GROUP_NAME


def test_one_group_too_many():
    driver = LedgerDriver(Rules(max_groups=2))
    driver.session("a")
    driver.session("b")
    assert refusal(driver, "c") == Code.TOO_MANY
    assert driver.session("a", "another instance of a group there is") == 3


@pytest.mark.invariant("I35")
def test_one_session_too_many():
    driver = LedgerDriver(Rules(max_sessions=3))
    for instance in ("i", "i", "j"):
        driver.session("a", instance)
    assert refusal(driver, "a", "k") == Code.TOO_MANY
    assert refusal(driver, "b") == Code.TOO_MANY


# Processes that say their number


def opened(driver, process: int | None, *, transactional: bool = True, resume: int | None = None) -> int:
    return driver.do(OpenSession("g", "i", transactional, resume=resume, process=process))


def everywhere(driver):
    """The ledger, the same from its events, and from its snapshot."""
    return driver.ledger, driver.replay(), type(driver.ledger).restore(driver.ledger.shard, driver.ledger.snapshot())


@pytest.mark.invariant("I7")
def test_i7_a_request_of_the_process_that_has_the_session_comes_late_and_fences_nobody(driver):
    session = opened(driver, 77)
    [receipt] = driver.prepare(session, {})
    for ledger in everywhere(driver):
        for transactional in (True, False):
            late = ledger.decide(OpenSession("g", "i", transactional, process=77), driver.now_us)
            assert (late.events, late.answer) == ((), session)
    assert driver.end(session, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]


@pytest.mark.invariant("I7")
def test_i7_a_late_request_of_a_process_that_was_fenced_is_refused(driver):
    old, new = opened(driver, 77), opened(driver, 78)
    for ledger in everywhere(driver):
        for resume in (None, old):
            with pytest.raises(EscrowError) as refused:
                ledger.decide(OpenSession("g", "i", True, resume=resume, process=77), driver.now_us)
            assert refused.value.code is Code.FENCED
    assert driver.prepare(old, {})[0]["code"] == Code.FENCED
    assert driver.prepare(new, {})[0]["code"] == Code.OK
    newest = opened(driver, 79)
    assert driver.prepare(new, {})[0]["code"] == Code.FENCED
    assert driver.prepare(newest, {})[0]["code"] == Code.OK


@pytest.mark.invariant("I7")
def test_i7_a_process_without_a_number_fences_and_is_fenced(driver):
    """Clients of before say none."""
    numbered = opened(driver, 77)
    old = opened(driver, None)
    assert driver.prepare(numbered, {})[0]["code"] == Code.FENCED
    assert opened(driver, None) > old, "and it fences itself, as ever"
    assert driver.prepare(old, {})[0]["code"] == Code.FENCED


def test_the_session_of_a_process_becomes_transactional_and_keeps_its_number(driver):
    driver.do(Configure(Rules(mixed_groups=True)))
    session = opened(driver, 77, transactional=False)
    assert driver.prepare(session, {})[0]["code"] == Code.GROUP_KIND
    assert opened(driver, 77) == session
    assert driver.prepare(session, {})[0]["code"] == Code.OK
    assert driver.send({}, session=session)[0]["code"] == Code.OK
    for ledger in everywhere(driver):
        assert tables_equal(ledger.snapshot(), driver.ledger.snapshot())
        assert ledger.sessions.check(np.array([session]), transactional=True, rules=ledger.rules).tolist() == [Code.OK]


def test_the_session_of_a_process_does_not_become_transactional_in_a_plain_group(driver):
    session = opened(driver, 77, transactional=False)
    driver.send({}, session=session)
    with pytest.raises(EscrowError) as refused:
        opened(driver, 77)
    assert refused.value.code is Code.GROUP_KIND
    driver.do(Configure(Rules(mixed_groups=True, reject_transactional=True)))
    with pytest.raises(EscrowError) as refused:
        opened(driver, 77)
    assert refused.value.code is Code.NO_PERMISSION
    assert driver.send({}, session=session)[0]["code"] == Code.OK


def test_numbers_of_processes_are_of_one_name(driver):
    """The same number under another name, or in another group, is another process."""
    first = opened(driver, 77)
    others = [driver.do(OpenSession(*names, True, process=77)) for names in (("g", "j"), ("h", "i"))]
    assert len({first, *others}) == 3
    assert [driver.prepare(session, {})[0]["code"] for session in (first, *others)] == [Code.OK] * 3


def test_a_process_whose_session_is_forgotten_has_no_number_any_more(driver):
    session = opened(driver, 77)
    driver.advance(40 * 86_400)
    driver.do(Forget(driver.now_us, np.array([], np.int64)))
    again = opened(driver, 77, resume=session)
    assert again > session
    assert opened(driver, 77, resume=session) == again, "its answer was lost: it resumes once more"
    for ledger in everywhere(driver):
        assert tables_equal(ledger.snapshot(), driver.ledger.snapshot())
