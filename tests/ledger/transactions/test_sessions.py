"""Producer sessions: epochs, fencing (I7), groups of one kind (1.10), refusals."""

import numpy as np
import pytest

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.commands import Configure, OpenSession, Prepare, Rules
from escrowmq.model import COMMIT
from escrowmq.testing.ledgers import LedgerDriver, outgoing


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


def test_i7_newer_session_of_the_same_instance_fences_the_older(driver):
    old = driver.session()
    [receipt] = driver.prepare(old, {})
    new = driver.session()
    assert driver.prepare(old, {})[0]["code"] == Code.FENCED
    assert driver.send({}, session=old)[0]["code"] == Code.FENCED
    assert driver.end(old, (receipt["transaction"], COMMIT)) == [Code.FENCED]
    assert driver.visible() == []
    assert driver.end(new, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]


def test_i7_a_fenced_session_stays_fenced_through_a_snapshot(driver):
    old, _ = driver.session(), driver.session()
    restored = type(driver.ledger).restore(driver.ledger.shard, driver.ledger.snapshot())
    assert restored.sessions.check(np.array([old]), transactional=True, rules=restored.rules).tolist() == [Code.FENCED]


def test_other_instances_and_groups_are_not_fenced(driver):
    sessions = [driver.session("g", "a"), driver.session("g", "b"), driver.session("h", "a")]
    assert [driver.prepare(s, {})[0]["code"] for s in sessions] == [Code.OK] * 3


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


def test_1_10_a_plain_group_that_becomes_transactional_sends_nothing_plain_any_more(driver):
    plain = driver.session("g", "a", transactional=False)
    assert driver.send({}, session=plain)[0]["code"] == Code.OK
    driver.session("g", "b")
    assert driver.send({}, session=plain)[0]["code"] == Code.GROUP_KIND


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
