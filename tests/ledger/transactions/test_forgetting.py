"""What nobody uses is forgotten: sessions, groups and writers; what is needed stays, and answers stay what they
were."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.commands import CommitBatch, Forget, ForgetWriter, OpenSession, Recheck, Retain, Rules, Send
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions.table import TransactionTable
from escrowmq.model import COMMIT, ROLLBACK, DecidedBy, message_id
from escrowmq.schemas import ID, Kind
from escrowmq.testing.ledgers import LedgerDriver, outgoing, tables_equal

DAY = 86_400
NOBODY = np.empty(0, np.int64)


def forget(driver, days=30.0, connected=(), limit=10_000):
    """What the broker does by the clock; how many sessions went."""
    before = driver.now_us - int(days * DAY * 1e6)
    return driver.do(Forget(before, np.array(connected, np.int64), limit))


def commit(driver, session, writer, batch, *receipts):
    ids = pa.array([r["transaction"] for r in receipts], ID)
    return driver.do(CommitBatch(message_id(writer), batch, ids, session))


def refusal(driver, command):
    try:
        driver.do(command)
    except EscrowError as problem:
        return problem.code
    return None


def groups(driver):
    return [line["group"] for line in listings.producers_list(driver.ledger)]


# Sessions


def test_an_idle_session_goes_and_its_group_with_the_last(driver):
    one, other = driver.session("g", "a"), driver.session("g", "b")
    driver.advance(20 * DAY)
    driver.prepare(other, {})
    driver.end(other, (driver.prepare(other, {})[0]["transaction"], COMMIT))
    driver.advance(11 * DAY)
    assert forget(driver) == 1
    assert groups(driver) == ["g"]
    assert driver.prepare(one, {})[0]["code"] == Code.UNKNOWN_SESSION
    assert driver.prepare(other, {})[0]["code"] == Code.OK


@pytest.mark.parametrize("late", [0, 1])
def test_the_edge_of_the_time_is_inside(driver, late):
    driver.session()
    driver.now_us += 30 * DAY * 1_000_000 + late
    assert forget(driver) == late


def test_every_act_of_a_session_counts_as_a_use(driver):
    def plain():
        driver.send({}, session=sessions["p"])

    def prepares():
        driver.prepare(sessions["g"], {})

    def ends():
        [receipt] = driver.prepare(sessions["h"], {})
        driver.advance(10)
        driver.end(sessions["g2"], (receipt["transaction"], COMMIT))

    def decides_a_batch():
        commit(driver, sessions["w"], "query", driver.ledger.next_position)

    sessions = {"p": driver.session("p", transactional=False), "g": driver.session("g")}
    sessions |= {"h": driver.session("h", "1"), "g2": driver.session("h", "2"), "w": driver.session("w")}
    driver.session("idle")
    for _ in range(4):
        driver.advance(10 * DAY)
        for act in (plain, prepares, ends, decides_a_batch):
            act()
    assert forget(driver) == 1
    assert groups(driver) == ["p", "g", "h", "w"]


def test_a_merged_batch_of_several_sessions_is_a_use_of_each(driver):
    """And of none, for messages without a session."""
    epochs = [driver.session("p", name, transactional=False) for name in "abcd"]
    driver.advance(40 * DAY)
    driver.do(Send(outgoing([{}] * 5), np.array([epochs[0], 0, epochs[2], epochs[2], epochs[3]])))
    assert forget(driver) == 1
    assert driver.ledger.sessions.idle(1 << 62).tolist() == [epochs[0], epochs[2], epochs[3]]
    driver.advance(40 * DAY)  # now that there is a gap between them
    driver.do(Send(outgoing([{}] * 3), np.array([epochs[3], 0, epochs[0]])))
    assert forget(driver) == 1
    assert driver.ledger.sessions.idle(1 << 62).tolist() == [epochs[0], epochs[3]]


def test_an_operators_decision_is_no_use(driver):
    session = driver.session()
    [receipt] = driver.prepare(session, {})
    driver.advance(40 * DAY)
    driver.end(0, (receipt["transaction"], ROLLBACK), by=DecidedBy.OPERATOR)
    assert forget(driver) == 1


def test_who_is_connected_stays(driver):
    sessions = [driver.session("g", name) for name in "abc"]
    driver.advance(40 * DAY)
    assert forget(driver, connected=[sessions[1], 99]) == 2
    assert driver.prepare(sessions[1], {})[0]["code"] == Code.OK


@pytest.mark.parametrize("parked", [False, True])
def test_who_has_something_undecided_stays_until_it_is_decided(parked):
    driver = LedgerDriver(Rules(check_max=1))
    session, peer = driver.session("g", "a"), driver.session("g", "b")
    [receipt] = driver.prepare(session, {})
    driver.advance(40 * DAY)
    if parked:
        driver.ask()
        driver.advance(3600)
        driver.tick()
    assert forget(driver) == 1, "the peer"
    assert driver.prepare(peer, {})[0]["code"] == Code.UNKNOWN_SESSION
    driver.do(Recheck(pa.array([receipt["transaction"]], ID)))
    assert driver.ask("g").transactions.tolist() == [receipt["position"]], "its group is still asked"
    assert driver.end(session, (receipt["transaction"], COMMIT)) == [Code.COMMITTED]
    driver.advance(40 * DAY)
    assert forget(driver) == 1
    assert groups(driver) == []


def test_a_round_is_bounded_and_takes_the_oldest_first(driver):
    epochs = [driver.session("g", f"{n}") for n in range(10)]
    driver.advance(40 * DAY)
    assert forget(driver, limit=4) == 4
    assert driver.ledger.sessions.idle(1 << 62).tolist() == epochs[4:]
    assert [forget(driver, limit=4) for _ in range(3)] == [4, 2, 0]


def test_nothing_to_forget_writes_nothing(driver):
    driver.session()
    events = len(driver.events)
    assert forget(driver) == 0
    assert len(driver.events) == events


def test_epochs_and_groups_are_never_given_twice(driver):
    driver.session("g")
    driver.advance(40 * DAY)
    forget(driver)
    assert driver.session("h") == 2
    for again in (driver.replay(), Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())):
        assert again.sessions.next_epoch == 3
        assert again.sessions.ordinal("h") == driver.ledger.sessions.ordinal("h") == 1


def test_a_forgotten_group_is_of_no_kind(driver):
    driver.session("g")
    driver.advance(40 * DAY)
    forget(driver)
    plain = driver.session("g", transactional=False)
    assert driver.send({}, session=plain)[0]["code"] == Code.OK


# What stays as it was


@pytest.mark.invariant("I5")
@pytest.mark.parametrize("known", [True, False])
def test_i5_a_decided_transaction_answers_as_before_though_its_group_is_forgotten(driver, known):
    session = driver.session()
    yes, no = driver.prepare(session, {}, {})
    driver.end(session, (yes["transaction"], COMMIT), (no["transaction"], ROLLBACK))
    if not known:
        driver.advance(40 * DAY)
        assert forget(driver) == 1
    again = driver.session("g", "i")
    pairs = [(r["transaction"], outcome) for r in (yes, no) for outcome in (COMMIT, ROLLBACK)]
    expected = [Code.ALREADY_COMMITTED, Code.CONFLICT, Code.CONFLICT, Code.ALREADY_ROLLED_BACK]
    assert driver.end(again, *pairs) == expected
    assert driver.prepare(again, {"transaction": yes["transaction"]})[0]["code"] == Code.TRANSACTION_DECIDED
    assert len(driver.visible()) == 1
    shown = listings.transactions(driver.ledger)[0]
    assert (shown["group"], shown["instance"]) == (("g", "i") if known else (None, None))


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("half", [True, False])
def test_i9_message_ids_are_remembered_without_their_session(half):
    driver = LedgerDriver(Rules(dedup_window_us=50 * DAY * 1_000_000))
    row = {"message_id": "m", "topic": "orders"}
    session = driver.session(transactional=half)
    [first] = driver.prepare(session, row) if half else driver.send(row, session=session)
    if half:
        driver.end(session, (first["transaction"], COMMIT))
    driver.advance(40 * DAY)
    assert forget(driver) == 1
    session = driver.session(transactional=half)
    [again] = driver.prepare(session, row) if half else driver.send(row, session=session)
    assert again == first
    if half:
        assert driver.end(session, (again["transaction"], COMMIT)) == [Code.ALREADY_COMMITTED]
    assert len(driver.visible()) == 1


def test_other_groups_are_still_told_apart(driver):
    session, stranger = driver.session("g"), driver.session("h")
    [receipt] = driver.prepare(session, {})
    driver.advance(40 * DAY)
    forget(driver, connected=[stranger])
    assert driver.end(stranger, (receipt["transaction"], COMMIT)) == [Code.WRONG_GROUP]


# Fencing and coming back


@pytest.mark.invariant("I7")
def test_i7_a_fenced_process_stays_out_while_its_successor_is_known(driver):
    old = driver.session("g", "a")
    driver.advance(20 * DAY)
    new = driver.session("g", "a")
    driver.advance(15 * DAY)
    assert forget(driver) == 1
    assert driver.prepare(old, {})[0]["code"] == Code.UNKNOWN_SESSION
    assert refusal(driver, OpenSession("g", "a", True, resume=old)) == Code.FENCED
    assert driver.prepare(new, {})[0]["code"] == Code.OK


def test_a_process_that_comes_back_gets_a_new_session(driver):
    old = driver.session("g", "a")
    driver.advance(40 * DAY)
    forget(driver)
    new = driver.do(OpenSession("g", "a", True, resume=old))
    assert new > old
    assert driver.prepare(new, {})[0]["code"] == Code.OK
    assert driver.do(OpenSession("g", "a", True, resume=new)) > new, "an answer was lost: it resumes once more"


# Writers


def test_a_writer_goes_with_its_group(driver):
    driver_side, executor = driver.session("spark.q", "d"), driver.session("spark.q", "e")
    commit(driver, driver_side, "q", 5, *driver.prepare(executor, {}))
    driver.advance(29 * DAY)
    assert forget(driver) == 0
    assert driver.ledger.writers.last(message_id("q")) == 5
    driver.advance(2 * DAY)
    assert forget(driver) == 2
    assert driver.ledger.writers.last(message_id("q")) is None
    assert len(driver.ledger.writers) == 0
    assert groups(driver) == []
    back = driver.session("spark.q", "d")
    assert commit(driver, back, "q", 5, *driver.prepare(back, {}))["status"] == "COMMITTED", "as GUARANTEES.md warns"


def test_a_writer_that_writes_is_kept_though_its_processes_come_and_go(driver):
    for batch in range(8):
        session = driver.session("spark.q", f"driver-{batch}")
        assert commit(driver, session, "q", batch, *driver.prepare(session, {}))["status"] == "COMMITTED"
        driver.advance(10 * DAY)
        forget(driver)
    assert driver.ledger.writers.last(message_id("q")) == 7
    assert len(driver.ledger.sessions) == 3


def test_a_repeat_of_what_a_forgotten_writer_committed_names_nothing_that_can_be_committed(driver):
    session = driver.session("w")
    receipts = driver.prepare(session, {}, {})
    commit(driver, session, "q", 0, *receipts)
    driver.advance(40 * DAY)
    forget(driver)
    again = driver.session("w")
    ids = pa.array([r["transaction"] for r in receipts], ID)
    assert refusal(driver, CommitBatch(message_id("q"), 0, ids, again)) == Code.CONFLICT
    assert len(driver.visible()) == 2


@pytest.mark.invariant("I35")
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_number_of_writers_one_after_the_other_are_never_refused(count):
    """Six of them a day, each once; the rules have room for those of a month."""
    driver = LedgerDriver(Rules(max_writers=200, max_groups=200), strict=False)
    for n in range(count):
        session = driver.session(f"spark.{n}")
        if n % 500 == 0:
            driver.do(Retain(driver.now_us - 7 * DAY * 1_000_000, driver.ledger.next_position))
        receipts = driver.prepare(session, {}) if n % 10 == 0 else ()
        assert commit(driver, session, f"{n}", 0, *receipts)["status"] == "COMMITTED"
        driver.advance(DAY / 6)
        forget(driver)
    assert len(driver.ledger.writers) == len(driver.ledger.sessions) == 180
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


def test_by_hand(driver):
    session = driver.session("w", "a")
    driver.session("w", "b")
    [open_one] = driver.prepare(session, {})
    name = message_id("q")
    assert refusal(driver, ForgetWriter(name)) == Code.NOT_FOUND
    commit(driver, session, "q", 3)
    [open_one] = driver.prepare(session, {})
    assert refusal(driver, ForgetWriter(name)) == Code.CONFLICT
    driver.end(session, (open_one["transaction"], ROLLBACK))
    assert driver.do(ForgetWriter(name)) == {"group": "w", "sessions": 2}
    assert refusal(driver, ForgetWriter(name)) == Code.NOT_FOUND
    assert groups(driver) == []
    assert commit(driver, driver.session("w"), "q", 0)["status"] == "COMMITTED"


def test_the_listing_says_how_old_they_are(driver):
    for name in "ab":
        commit(driver, driver.session(f"spark.{name}", "d"), name, 4)
    decided_us = driver.now_us
    driver.advance(DAY)
    driver.prepare(driver.session("spark.a", "e"), {})
    listed = {line["group"]: line for line in listings.writers_list(driver.ledger, b"", 100)}
    assert listed["spark.a"] == {
        "writer": message_id("a").hex(),
        "group": "spark.a",
        "batch": 4,
        "decided_us": decided_us,
        "used_us": driver.now_us,
        "open": 1,
        "parked": 0,
    }
    assert listed["spark.b"]["used_us"] == decided_us
    first, second = sorted(listed.values(), key=lambda line: line["writer"])
    assert listings.writers_list(driver.ledger, b"", 1) == [first]
    assert listings.writers_list(driver.ledger, bytes.fromhex(first["writer"]), 9) == [second]


# Snapshots


def test_a_snapshot_of_format_1_is_read_and_counts_from_its_own_time(driver):
    """What it says of sessions is dense, and when they were used is not in it."""
    driver.session("g", "a")
    new = driver.session("g", "a")
    commit(driver, new, "q", 2, *driver.prepare(new, {}))
    driver.advance(5)
    driver.send({})
    tables = driver.ledger.snapshot()
    rows = tables["sessions"].select(["group", "fenced", "transactional", "instance"])
    tables["sessions"] = rows.replace_schema_metadata({"first": "1"})
    tables["producer_groups"] = tables["producer_groups"].select(["name", "transactional"])
    tables["writers"] = tables["writers"].select(["writer", "group", "batch"])
    state = tables["ledger"]["state"][0].as_py().replace('"format": 2', '"format": 1')
    tables["ledger"] = pa.table({"state": [state]})
    assert Ledger.can_restore(tables)
    old = Ledger.restore(driver.ledger.shard, tables)
    assert old.sessions.next_epoch == 3
    assert old.sessions.used_us() == {0: driver.now_us}
    assert old.writers.list_after(b"", 9) == [(message_id("q"), 0, 2, driver.now_us)]
    assert tables_equal(Ledger.restore(old.shard, old.snapshot()).snapshot(), old.snapshot())


# Whatever happens

steps = st.one_of(
    st.tuples(st.just("batch"), st.sampled_from("ab"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("silence"), st.sampled_from([1, 29, 31])),
    st.tuples(st.just("roll back"), st.sampled_from("ab")),
)


def by_the_rule(history):
    """Which attempts count, and which writers are known at the end, said in words: a writer is known until it was
    silent for 30 days with nothing undecided."""
    last, used, undecided, counted, now = {}, {}, {"a": 0, "b": 0}, [], 0
    for attempt, (act, *step) in enumerate(history):
        if act == "silence":
            now += step[0]
            for writer in [w for w in used if now - used[w] > 30 and not undecided[w]]:
                last.pop(writer, None)
                del used[writer]
        elif act == "roll back":
            if undecided[step[0]]:
                used[step[0]], undecided[step[0]] = now, 0
        else:
            writer, batch, told = step
            used[writer], undecided[writer] = now, undecided[writer] + 1
            if told:
                undecided[writer] = 0
                if batch > last.get(writer, -1):
                    last[writer] = batch
                    counted.append(attempt)
    return counted, last


def by_the_ledger(history):
    driver = LedgerDriver(strict=False)
    sessions, owner, undecided = {}, {}, {"a": [], "b": []}
    for attempt, (act, *step) in enumerate(history):
        if act == "silence":
            driver.advance(step[0] * DAY)
            forget(driver)
        elif act == "roll back":
            if undecided[step[0]]:
                codes = driver.end(sessions[step[0]], *((raw, ROLLBACK) for raw in undecided[step[0]]))
                assert codes == [Code.ROLLED_BACK] * len(codes)
                undecided[step[0]] = []
        else:
            writer, batch, told = step
            if driver.ledger.sessions.instance(sessions.get(writer, 0)) is None:
                sessions[writer] = driver.session(writer)
            [receipt] = driver.prepare(sessions[writer], {})
            owner[receipt["position"]] = attempt
            undecided[writer].append(receipt["transaction"])
            if told:
                commit(driver, sessions[writer], writer, batch, receipt)
                undecided[writer] = []
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())
    assert tables_equal(
        Ledger.restore(driver.ledger.shard, driver.ledger.snapshot()).snapshot(), driver.ledger.snapshot()
    )
    last = {name: driver.ledger.writers.last(message_id(name)) for name in "ab"}
    counted = sorted(owner[position] for position in driver.visible())
    return counted, {name: batch for name, batch in last.items() if batch is not None}


@pytest.mark.invariant("I42")
@given(st.lists(steps, max_size=14))
def test_a_writer_counts_each_batch_once_unless_it_was_silent_for_too_long(history):
    assert by_the_ledger(history) == by_the_rule(history)


def test_planted_a_writer_with_something_undecided_is_forgotten(monkeypatch):
    monkeypatch.setattr(TransactionTable, "undecided_epochs", lambda self: NOBODY)
    history = [("batch", "a", 0, True), ("batch", "a", 1, False), ("silence", 31), ("batch", "a", 0, True)]
    with pytest.raises((AssertionError, KeyError)):
        assert by_the_ledger(history) == by_the_rule(history)


def test_what_is_written_is_one_row_a_session(driver):
    epochs = [driver.session("g", "a"), driver.session("h", "a")]
    driver.advance(40 * DAY)
    forget(driver)
    kind, batch, _, _ = driver.events[-1]
    assert kind == Kind.FORGOTTEN
    assert batch.to_pydict() == {"epoch": epochs}
