"""What a scheduler does in each case: conflicts, what is found nowhere, handlers that fail, brokers and stores that are
away, two schedulers at once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from compensation_world import MemorySets, Sometimes, World, handle
from sqlalchemy.orm import sessionmaker

import escrowmq as mq
from escrowmq.client.bus import Bus
from escrowmq.client.links.router import broker_of
from escrowmq.compensation import (
    CaseState,
    GivenKeys,
    HalfSet,
    Journal,
    Scheduler,
    SqlSets,
    consume,
    list_cases,
    purge_cases,
    retry_cases,
    settle_cases,
)
from escrowmq.compensation.effects import is_in
from escrowmq.compensation.feeds import TopicKeys, id_of_key
from escrowmq.compensation.remedies import State, judge
from escrowmq.compensation.statistics import METRICS, collector
from escrowmq.outbox import migrate
from escrowmq.outbox.acts import list_acts
from escrowmq.outbox.tables import trans_compensation_case

Make = Callable[..., World]


@pytest.mark.invariant("I48")
def test_what_was_rolled_back_although_announced_waits_for_a_person(world: Make) -> None:
    w = world()
    identity = w.prepare()
    w.producer.rollback(w.sent[identity])
    w.announce(identity)
    w.consume_keys()
    report = w.schedule()
    assert (report.taken, report.waiting, report.settled, report.effects) == (1, 1, 1, 0)
    [case] = list_cases(w.database, w.name)
    assert (case.message_id, case.state, case.attempts) == (identity, CaseState.CONFLICT, 1)
    assert "rolled back" in case.reason
    assert str(w.sent[identity]) in case.reason
    assert w.faults([]) == []
    # tried again it is the same, until the person settles it
    assert [done.code for done in retry_cases(w.database, w.name, [identity], by="ann")] == [mq.Code.OK]
    assert w.schedule().retried == 1
    assert w.cases() == {identity: CaseState.CONFLICT}
    [done] = settle_cases(w.database, w.name, [identity.hex()], by="ann", why="refunded by hand")
    assert (done.code, done.state) == (mq.Code.OK, CaseState.SETTLED)
    [case] = list_cases(w.database, w.name, states=None)
    assert case.notes is None
    retried, settled = list_acts(w.database)
    assert (retried["act"], retried["by"], retried["why"]) == ("compensation.retry", "ann", None)
    assert (settled["act"], settled["why"]) == ("compensation.settle", "refunded by hand")
    assert settled["what"] == {"name": w.name, "messages": [identity.hex()]}
    assert settled["ended"] == {"results": {"OK": 1}}
    assert w.waiting() == 0
    # and it stays settled, though it be announced once more
    w.sets.add_halves([identity], [1])
    report = w.schedule()
    assert (report.taken, report.settled, report.waiting) == (1, 1, 0)
    assert w.cases() == {identity: CaseState.SETTLED}
    assert purge_cases(w.database, 0.0, w.name) == 1


def test_acts_that_do_not_fit(world: Make) -> None:
    w = world()
    missing = uuid.uuid4().bytes
    assert [done.code for done in retry_cases(w.database, w.name, [missing])] == [mq.Code.NOT_FOUND]
    identity = w.prepare()
    w.producer.rollback(w.sent[identity])
    w.sets.add_halves([identity], [1])
    w.schedule()
    settle_cases(w.database, w.name, [identity])
    [done] = settle_cases(w.database, w.name, [identity])
    assert (done.code, done.state) == (mq.Code.CONFLICT, CaseState.SETTLED)
    with pytest.raises(mq.Misuse, match="one id"):
        settle_cases(w.database, w.name, identity)


def test_what_is_found_nowhere_is_tried_some_times_and_then_waits(world: Make) -> None:
    w = world(max_attempts=3)
    identity = uuid.uuid4().bytes
    w.sets.add_halves([identity], [1])
    states = []
    for _ in range(4):
        w.sets.end_leases()
        w.schedule()
        states.append(w.cases()[identity])
    assert states == [CaseState.TRYING, CaseState.TRYING, CaseState.STUCK, CaseState.STUCK]
    assert w.sets.sizes().taken == 0
    assert list_cases(w.database, w.name)[0].reason == "no broker has it"
    # the application sends it after all, under its id, and a person has it tried again
    w.prepare(identity)
    retry_cases(w.database, w.name, [identity])
    report = w.schedule()
    assert (report.retried, report.effects, report.committed) == (1, 1, 1)
    assert w.cases() == {identity: CaseState.DONE}
    w.drain()
    assert (w.faults([identity]), w.open()) == ([], [])


def test_a_handler_that_always_raises_is_stuck_and_done_when_a_person_retries(world: Make) -> None:
    w = world(max_attempts=2)
    bad, good = w.prepare(), w.prepare()
    for identity in (bad, good):
        w.announce(identity)
    w.consume_keys()
    calls = []

    def fails(session: Any, message: Any) -> None:
        calls.append(message.message_id)
        handle(session, message)
        if message.message_id == bad:
            raise ZeroDivisionError("no stock")

    report = w.schedule(handler=fails)
    assert (report.taken, report.effects, report.failed, report.waiting, report.settled) == (2, 1, 1, 0, 1)
    assert w.effects() == {good: 1}
    assert w.open() == [str(w.sent[bad])]
    w.sets.end_leases()
    report = w.schedule(handler=fails)
    assert (report.adopted, report.failed, report.waiting, report.settled) == (1, 0, 1, 1)
    [case] = list_cases(w.database, w.name)
    assert (case.state, case.attempts, case.reason) == (CaseState.STUCK, 2, "ZeroDivisionError: no stock")
    # still failing when it is retried: it stays what the person wants, until its tries are used up again
    retry_cases(w.database, w.name, [bad])
    w.schedule(handler=fails)
    assert w.cases() == {bad: CaseState.RETRY}
    w.schedule(handler=fails)
    assert w.cases() == {bad: CaseState.STUCK}
    retry_cases(w.database, w.name, [bad])
    w.schedule()
    assert w.cases() == {bad: CaseState.DONE}
    w.drain()
    assert (w.faults([bad, good]), w.open()) == ([], [])


def test_a_try_that_failed_and_then_worked_leaves_no_case(world: Make) -> None:
    w = world(max_attempts=5)
    identity = w.prepare()
    w.announce(identity)
    w.consume_keys()

    def fails(session: Any, message: Any) -> None:
        raise ZeroDivisionError

    w.schedule(handler=fails)
    assert w.cases() == {identity: CaseState.TRYING}
    w.drain()
    assert (w.faults([identity]), w.open(), w.cases()) == ([], [], {})


def test_parked_and_delayed_half_messages(world: Make) -> None:
    """What is parked is still open; what has a delay is committed, and its effect is the consumer's, in its time."""
    w = world()
    delayed, parked = uuid.uuid4().bytes, uuid.uuid4().bytes
    policy = mq.CheckPolicy(transaction_timeout=0.01, check_interval=0.01, check_max=1)
    other = w.bus.producer(f"{w.name}-parked", checker=lambda check: mq.UNKNOWN, check_policy=policy)
    w.sent[parked] = other.prepare(w.topic, b"parked", message_id=parked).transaction_id
    w.sent[delayed] = w.producer.prepare(w.topic, b"delayed", message_id=delayed, delay=3600.0).transaction_id
    while w.bus.admin.transaction(w.sent[parked])["state"] != "parked":
        threading.Event().wait(0.01)
    for identity in (parked, delayed):
        w.announce(identity)
    w.consume_keys()
    report = w.schedule()
    assert (report.committed, report.effects) == (2, 1)
    assert w.effects() == {parked: 1}
    assert {w.bus.admin.transaction(one)["state"] for one in w.sent.values()} == {"committed"}


def test_sent_again_under_the_same_id(world: Make) -> None:
    """The remedy ``resend``: of an open message it is the same transaction; one that no broker has is made."""
    w = world(max_attempts=2)
    known, gone, refused = w.prepare(), uuid.uuid4().bytes, uuid.uuid4().bytes
    w.sent[gone] = None
    w.announce(known)
    w.consume_keys()
    w.sets.add_halves([gone, refused], [1, 1])
    told = {}

    def again(identity: bytes, message: Any) -> None:
        told[identity] = None if message is None else (message.body, message.transaction_id)
        if identity != refused:
            body = b"body " + identity
            w.producer.commit(w.producer.prepare(w.topic, body, message_id=identity).transaction_id)

    report = w.schedule(remedy="resend", resend=again)
    assert told == {known: (b"body " + known, w.sent[known]), gone: None, refused: None}
    assert (report.taken, report.resent, report.failed, report.settled) == (3, 3, 1, 2)
    w.drain(remedy="resend", resend=again)
    assert w.cases() == {refused: CaseState.STUCK}
    assert (w.faults([known, gone]), w.open()) == ([], [])


@pytest.mark.invariant("I48")
def test_two_schedulers_at_once_and_a_consumer(world: Make) -> None:
    """The difference is shared out, and what both look up has one effect."""
    w = world(limit=7, max_attempts=1_000)
    ids = [w.prepare() for _ in range(60)]
    for number, identity in enumerate(ids):
        w.announce(identity)
        if number % 3:
            w.confirm(identity)
    w.consume_keys()
    w.sets.add_halves(ids, [1] * len(ids))
    reports, start = [], threading.Barrier(3)

    def run() -> None:
        with w.scheduler() as scheduler:
            start.wait()
            reports.append(scheduler.run_once())

    def consume_some() -> None:
        start.wait()
        w.consume_messages()

    threads = [threading.Thread(target=run), threading.Thread(target=run), threading.Thread(target=consume_some)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2
    w.drain()
    assert (w.faults(ids), w.open(), w.cases()) == ([], [], {})


@pytest.mark.invariant("I48")
def test_a_lease_that_is_lost_in_the_middle(world: Make) -> None:
    """Another scheduler adopts the run while the first is in its handler; both come to their end."""
    w = world()
    ids = [w.prepare() for _ in range(3)]
    for identity in ids:
        w.announce(identity)
    w.consume_keys()
    others = []

    def slow(session: Any, message: Any) -> None:
        if not others:
            others.append(None)
            w.sets.end_leases()
            # the file's one lock is let go meanwhile, so the first of the two to commit is the other
            session.rollback()
            others.append(w.schedule())
            raise ConnectionError("it was away for longer than its lease")
        handle(session, message)

    report = w.schedule(handler=slow)
    assert (others[1].adopted, others[1].effects, others[1].settled) == (3, 3, 3)
    assert (report.taken, report.effects, report.settled) == (3, 0, 3)
    w.drain()
    assert (w.faults(ids), w.open(), w.cases()) == ([], [], {})


# The set store


@pytest.mark.invariant("I48")
def test_a_store_that_is_away_suspends_and_effects_go_on(world: Make) -> None:
    w = world(keep_commits=3600.0)
    before, meanwhile = w.prepare(), w.prepare()
    w.announce(before)
    assert w.consume_keys() == 1
    w.sets.away = True
    w.confirm(meanwhile)
    assert w.consume_messages() == 1
    standing = Journal(w.database, w.name).read()
    assert standing.suspended
    assert "away" in standing.reason
    w.announce(meanwhile)
    assert w.consume_keys() == 0
    report = w.schedule()
    assert "away" in report.suspended
    assert (report.taken, report.recovered) == (0, 0)
    w.sets.away = False
    report = w.schedule()
    assert (report.suspended, report.recovered, report.effects) == (None, 1, 1)
    assert meanwhile in w.sets.commits  # its mark was read
    assert w.consume_keys() == 1
    w.drain(keep_commits=0.0)
    assert (w.faults([before, meanwhile]), w.open()) == ([], [])
    assert not Journal(w.database, w.name).read().suspended


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("who", ["scheduler", "keys"])
def test_an_emptied_store_is_made_whole_from_the_marks_and_the_key_topic(world: Make, who: str) -> None:
    """Either of the two recovers it; a key from before ``settled_us`` is not read again."""
    w = world()
    settled = w.prepare()
    w.announce(settled)
    w.drain()
    feed, journal = TopicKeys(w.bus, w.keys, f"{w.name}.keys"), Journal(w.database, w.name)
    later_us = feed.now_us() + 2_000
    while journal.read().settled_us < later_us:
        w.schedule()
    lost, handled = w.prepare(), w.prepare()
    for identity in (lost, handled):
        w.announce(identity)
    w.consume_keys()
    w.confirm(handled)
    w.consume_messages()
    w.sets.lose()
    if who == "scheduler":
        report = w.schedule(grace=3600.0)
        assert (report.recovered, report.taken) == (1, 0)
    else:
        assert w.consume_keys() == 0
    assert set(w.sets.half) == {lost, handled}
    assert handled in w.sets.commits
    report = w.schedule()
    assert (report.taken, report.effects) == (1, 1)
    w.drain()
    assert (w.faults([settled, lost, handled]), w.open(), w.cases()) == ([], [], {})


@pytest.mark.invariant("I48")
def test_settled_us_stays_behind_what_is_not_settled(world: Make) -> None:
    w = world()
    journal = Journal(w.database, w.name)
    feed = TopicKeys(w.bus, w.keys, f"{w.name}.keys")
    w.schedule()
    at_first = journal.read().settled_us
    assert at_first > 0
    unread = w.prepare()
    w.announce(unread)
    stored = w.bus.admin.lookup(message_id=unread, topic=w.keys)[0]["stored_us"]
    w.schedule()
    assert feed.acknowledged_us() == journal.read().settled_us == stored
    w.consume_keys()
    assert feed.acknowledged_us() > stored

    def fails(session: Any, message: Any) -> None:
        raise ZeroDivisionError

    w.schedule(handler=fails)  # it is in a run now
    assert journal.read().settled_us == stored
    w.drain()
    assert journal.read().settled_us > stored


def test_what_did_not_see_a_change_writes_nothing(world: Make) -> None:
    """Compare and set: a scheduler that slept through a suspension neither raises settled_us nor ends the
    suspension."""
    w = world()
    journal = Journal(w.database, w.name)
    seen = journal.begin(w.sets.epoch())
    assert journal.begin("another") == seen
    assert journal.suspend("down")
    assert not journal.suspend("down again")
    assert not journal.raise_settled(seen, 5)
    assert not journal.resume(seen, "other")
    suspended = journal.read()
    assert (suspended.suspended, suspended.reason, suspended.epoch) == (True, "down", w.sets.epoch())
    assert not journal.raise_settled(suspended, 5)
    assert journal.resume(suspended, "other")
    again = journal.read()
    assert (again.suspended, again.epoch, again.settled_us) == (False, "other", 0)
    assert journal.raise_settled(again, 5)
    assert not journal.raise_settled(again, 6)
    assert not journal.raise_settled(journal.read(), 4)


def test_keys_of_another_broker(world: Make) -> None:
    """Ids and times are given; an emptied store is read again by the function, and stays suspended without one."""
    w = world()
    ids = [w.prepare() for _ in range(3)]
    half = HalfSet(w.database, w.sets, GivenKeys())
    assert half.ready()
    half.add(ids, [1, 2, 3])
    w.sets.lose()
    blind = Scheduler(w.bus, w.database, w.sets, topics=w.topic, keys=GivenKeys(), **w.options)
    with blind as scheduler:
        for _ in range(2):
            report = scheduler.run_once()
            assert "no function was given that reads the keys again" in report.suspended
    assert not half.ready()
    assert half.problem.code is mq.Code.BAD_SETTING
    with pytest.raises(mq.Overloaded, match="suspended"):
        half.add(ids, [1, 2, 3])
    asked = []

    def again(since_us: int) -> Iterator[Any]:
        asked.append(since_us)
        yield ids[:2], [1, 2]
        yield ids[2:], [3]

    feed = GivenKeys(read_again=again, acknowledged_us=lambda: 1_000)
    with Scheduler(w.bus, w.database, w.sets, topics=w.topic, keys=feed, **w.options) as scheduler:
        report = scheduler.run_once()
    assert (report.recovered, report.effects, asked) == (1, 3, [0])
    assert Journal(w.database, w.name).read().settled_us == 1_000
    w.consume_messages()
    assert w.effects() == dict.fromkeys(ids, 1)


def test_entries_in_the_transaction_of_the_effect_where_the_store_is_in_the_business_database(
    world: Make, compensation_database: sa.Engine
) -> None:
    """A handler that fails leaves neither effect, mark nor entry; one that works leaves all three."""
    w = world(lambda name: SqlSets(compensation_database, name))
    assert is_in(w.database, w.sets)
    assert not is_in(w.database, MemorySets("other"))
    ids = [w.prepare() for _ in range(4)]
    for identity in ids:
        w.announce(identity)
        w.confirm(identity)
    w.consume_keys()

    def fails(session: Any, message: Any) -> None:
        handle(session, message)
        if message.message_id == ids[0]:
            raise ZeroDivisionError

    with w.bus.consumer(w.name, w.topic, retry_backoff=3600.0) as consumer:
        effects = 0
        while effects < 3:
            effects += consume(consumer, w.database, w.sets, fails, idle_timeout=0.1)
    assert w.effects() == dict.fromkeys(ids[1:], 1)
    sizes = w.sets.sizes()
    assert (sizes.half, sizes.commits) == (4, 3)
    report = w.schedule()
    assert (report.taken, report.effects, report.committed, report.early) == (1, 1, 0, 1)
    assert w.faults(ids) == []


# Brokers


def for_both_brokers(count: int) -> list[bytes]:
    """Message ids of which each of two brokers takes half, by the hash of the id."""
    ids: dict[int, list[bytes]] = {0: [], 1: []}
    while min(map(len, ids.values())) < count // 2:
        identity = uuid.uuid4().bytes
        ids[broker_of(identity.hex(), 2)].append(identity)
    return [*ids[0][: count // 2], *ids[1][: count // 2]]


@pytest.mark.invariant("I48")
def test_with_one_of_two_brokers_away_nothing_is_judged(tmp_path: Path, compensation_database: sa.Engine) -> None:
    """What the other may have is left for later without counting a try, and settled_us stays; when it is back all is
    repaired."""
    pair = [Sometimes(tmp_path / name) for name in "ab"]
    with Bus(pair) as bus:
        w = World(bus, compensation_database, max_attempts=1)
        ids = [w.prepare(identity) for identity in for_both_brokers(8)]
        homes = {i: [row["broker"] for row in bus.admin.lookup(message_id=i, topic=w.topic)] for i in ids}
        there = [i for i in ids if homes[i] == [pair[0].address]]
        assert 0 < len(there) < len(ids)
        nowhere = uuid.uuid4().bytes
        w.sets.add_halves([*ids, nowhere], [1] * 9)
        w.schedule(grace=2e9)  # takes nothing
        settled_us = Journal(w.database, w.name).read().settled_us
        pair[1].away = True
        reports = []
        while w.effects() != dict.fromkeys(there, 1):
            w.sets.end_leases()
            reports.append(w.schedule())
        assert reports[-1].away >= 9 - len(there)
        assert {(report.waiting, report.failed) for report in reports} == {(0, 0)}
        assert (w.cases(), w.sets.sizes().taken) == ({}, 9 - len(there))
        assert Journal(w.database, w.name).read().settled_us == settled_us
        pair[1].away = False
        while w.cases() != {nowhere: CaseState.STUCK} or len(w.effects()) < len(ids):
            w.sets.end_leases()
            w.schedule()
        assert (w.effects(), w.open()) == (dict.fromkeys(ids, 1), [])


@pytest.mark.invariant("I48")
def test_a_broker_that_goes_away_between_the_list_of_its_keys_and_their_reading_is_waited_for(
    tmp_path: Path, compensation_database: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [Sometimes(tmp_path / name) for name in "ab"]
    with Bus(pair) as bus:
        w = World(bus, compensation_database)
        ids = {w.prepare(identity) for identity in for_both_brokers(8)}
        for identity in ids:
            w.announce(identity)
        make = bus.reader

        def reader(*given: Any, **more: Any) -> Any:
            pair[1].away = True
            try:
                return make(*given, **more)
            finally:
                pair[1].away = False

        monkeypatch.setattr(bus, "reader", reader)
        read = [identity for some, _ in TopicKeys(bus, w.keys, "again").read_again(0) for identity in some]
        assert (set(read), len(read)) == (ids, len(ids))


@pytest.mark.invariant("I48")
@pytest.mark.parametrize(
    ("states", "away", "found"),
    [
        ("", "", State.NOWHERE),
        ("", "b", State.AWAY),
        ("open", "b", State.OPEN),
        ("parked", "", State.OPEN),
        ("committed", "b", State.VISIBLE),
        ("plain", "", State.VISIBLE),
        ("rolled_back", "", State.REFUSED),
        ("rolled_back", "b", State.AWAY),
        ("expired", "", State.REFUSED),
        ("expired open", "", State.OPEN),
        ("rolled_back committed", "", State.VISIBLE),
        ("committed open", "", State.OPEN),
    ],
)
def test_what_a_look_up_says(states: str, away: str, found: State) -> None:
    """Only what everybody was asked about is refused, or nowhere."""
    rows = [{"state": state, "transaction": "t-1"} for state in states.split()]
    finding = judge(b"x" * 16, rows, away)
    assert finding.state is found
    assert (
        all(row["state"] in ("open", "parked", "committed", "plain") for row in finding.rows) or found is State.REFUSED
    )
    assert found is not State.REFUSED or states.replace("_", " ") in finding.text


def test_stray_messages_in_the_key_topic_stand_for_themselves() -> None:
    own, other = uuid.uuid4().bytes, uuid.uuid4().bytes
    assert id_of_key(other.hex(), own) == other
    for key in (None, "", "x" * 32, other.hex() + "0", other.hex()[:-1]):
        assert id_of_key(key, own) == own


# The outside


def test_what_does_not_fit_together_is_refused(world: Make) -> None:
    w = world()
    for wrong in ({"remedy": "resend"}, {"handler": None}, {"limit": 0}, {"limit": 20_000}, {"grace": -1.0}):
        with pytest.raises(mq.Misuse, match="BAD_ARGUMENT"):
            w.scheduler(**wrong)
    with pytest.raises(mq.EscrowError, match="BAD_GROUP_NAME"):
        Journal(w.database, "%bad")


def test_running_until_it_is_stopped_and_what_is_counted(world: Make) -> None:
    w = world()
    identity = w.prepare()
    w.announce(identity)
    w.consume_keys()
    stop, done = threading.Event(), threading.Event()

    def handler(session: Any, message: Any) -> None:
        handle(session, message)
        done.set()

    with w.scheduler(handler=handler) as scheduler:
        thread = threading.Thread(target=scheduler.run, args=(0.01, stop))
        thread.start()
        assert done.wait(60)
        stop.set()
        thread.join()
        numbers = scheduler.statistics
        families = {family.name: family for family in collector(w.name, lambda: scheduler.statistics).collect()}
    assert (numbers.effects, numbers.committed, numbers.settled, numbers.suspended) == (1, 1, 1, 0)
    assert numbers.runs >= 1
    assert len(families) == len(METRICS)
    [sample] = families["escrowmq_compensation_effects"].samples
    assert (sample.labels, sample.value) == ({"compensation": w.name}, 1)
    assert families["escrowmq_compensation_idle_seconds"].type == "gauge"


def test_acts_on_cases_take_whatever_has_begin(tmp_path: Path) -> None:
    """A sessionmaker, too: the record is where the cases are."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    migrate(engine)
    row = {
        "name": "cart",
        "message_id": b"1" * 16,
        "state": CaseState.STUCK,
        "attempts": 1,
        "reason": "",
        "notes": "old",
    }
    with engine.begin() as connection:
        connection.execute(sa.insert(trans_compensation_case).values(first_us=1, changed_us=1, **row))
    [done] = retry_cases(sessionmaker(engine), "cart", [b"1" * 16, b"1" * 16], why="mended")
    assert (done.code, done.state) == (mq.Code.OK, CaseState.RETRY)
    [case] = list_cases(engine, "cart", states=None)
    assert (case.attempts, case.notes) == (0, "old"), "what was noted before there was the record stays"
    assert [act["why"] for act in list_acts(engine)] == ["mended"]
    engine.dispose()
