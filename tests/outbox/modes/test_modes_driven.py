"""Producer-driven transactions: the steps, what a failure at each leaves, what redrive makes of it, and what the table
answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from modes_roles import identity, note, noted
from sqlalchemy.orm import Session, sessionmaker

import escrowmq as mq
from escrowmq.errors import Code, Fenced, Misuse, Rejected, Unknown
from escrowmq.outbox.modes import Driven, DrivenResult, Redriven, TableChecker
from escrowmq.outbox.modes.driven import HalfMessages
from escrowmq.outbox.modes.journal import _CODEC, Stage, ids_of, to_batch
from escrowmq.outbox.tables import trans_driven


def rows(engine: sa.Engine) -> list[Stage]:
    """The states that the table holds."""
    with engine.begin() as connection:
        return [Stage(state) for (state,) in connection.execute(sa.select(trans_driven.c.state))]


def bodies(bus: mq.Bus, topic: str) -> list[bytes]:
    """What is visible."""
    if topic not in [each["name"] for each in bus.admin.topics()]:
        return []
    return sorted(bus.admin.read(topic).read_all().column("body").to_pylist())


def undecided(bus: mq.Bus) -> int:
    return len(bus.admin.transactions("open"))


@pytest.fixture(params=["stored", "merged"])
def merged(request: pytest.FixtureRequest) -> bool:
    return request.param == "merged"


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


def test_a_message_and_its_business_change_both_happen(bus: mq.Bus, database: sa.Engine, merged: bool, t: str) -> None:
    with Driven(bus, database, "shop", merged=merged) as driven:
        message = mq.Message(t, b"book", key="o-1", tag="paid", properties={"k": "v"}, message_id=identity(t, 1))
        result = driven.send(message, lambda session: note(session, "produced", [identity(t, 1)]))
        assert isinstance(result, DrivenResult)
        assert result.done
        assert result.code is Code.COMMITTED
        assert result.message_id == identity(t, 1)
    (row,) = bus.admin.read(t).read_all().to_pylist()
    assert (row["body"], row["key"], row["tag"], dict(row["properties"])) == (b"book", "o-1", "paid", {"k": "v"})
    assert row["message_id"] == identity(t, 1)
    assert noted(database, "produced") == [identity(t, 1)]
    assert rows(database) == []


def test_a_failed_business_change_takes_the_message_back(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    driven = Driven(bus, local, "shop", merged=merged)

    def business(session: Session) -> None:
        note(session, "produced", [b"x" * 16])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driven.send(mq.Message(t, b"book"), business)
    assert noted(local, "produced") == []
    assert rows(local) == []
    assert undecided(bus) == 0
    assert bodies(bus, t) == []


def test_a_batch_is_all_or_nothing_under_one_local_transaction(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    driven = Driven(bus, database, "shop")
    batch = pa.RecordBatch.from_pydict(
        {"topic": [t] * 2500, "body": [b"%d" % n for n in range(2500)], "key": [f"k{n % 7}" for n in range(2500)]}
    )
    results = driven.run_batch(batch, lambda session: note(session, "produced", [b"y" * 16]))
    assert results.done
    assert len({result.transaction_id for result in results}) == 2500
    assert len(bodies(bus, t)) == 2500
    assert rows(database) == []


def test_the_block_gives_the_session_of_the_business_transaction(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    with driven.transaction([mq.Message(t, b"one"), mq.Message(t, b"two")]) as session:
        note(session, "produced", [b"z" * 16])
        assert bodies(bus, t) == []
    assert bodies(bus, t) == [b"one", b"two"]
    with pytest.raises(KeyError), driven.transaction(mq.Message(t, b"three"), sessions=sessionmaker(local)) as session:
        raise KeyError
    assert bodies(bus, t) == [b"one", b"two"]


def test_a_commit_that_arrived_although_its_answer_was_lost_is_found_in_the_table(
    bus: mq.Bus, database: sa.Engine, merged: bool, t: str
) -> None:
    """The connection to the database breaks in COMMIT: the row knows whether it came through."""

    class Deaf(Session):
        def __exit__(self, *raised: Any) -> None:
            super().__exit__(*raised)
            raise ConnectionResetError("the answer to COMMIT was lost")

    driven = Driven(bus, database, "shop", merged=merged, sessions=sessionmaker(database, class_=Deaf))
    result = driven.send(mq.Message(t, b"book"), lambda session: note(session, "produced", [b"a" * 16]))
    assert result.done
    assert bodies(bus, t) == [b"book"]
    assert rows(database) == []


def test_a_commit_that_did_not_arrive_is_rolled_back(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    class Cut(Session):
        def flush(self, *given: Any) -> None:
            raise ConnectionResetError("cut off before COMMIT")

    driven = Driven(bus, local, "shop", merged=merged, sessions=sessionmaker(local, class_=Cut))
    with pytest.raises(ConnectionResetError):
        driven.send(mq.Message(t, b"book"), lambda session: None)
    assert (bodies(bus, t), rows(local), undecided(bus)) == ([], [], 0)


def leave(driven: Driven, topic: str, stage: Stage) -> None:
    """One message that stands at ``stage``, as a producer that died would leave it."""
    carrier: Any = driven._carrier
    if stage is Stage.COMMITTING:
        carrier.end = lambda batch, shards, outcome: _away(batch)
        driven.send(mq.Message(topic, b"left"), lambda session: None)
        del carrier.end
    else:
        driven._journal.decide = _die  # type: ignore[method-assign]
        with pytest.raises(SystemExit):
            driven.send(mq.Message(topic, b"left"), lambda session: None)
        del driven._journal.decide


def _away(batch: pa.RecordBatch) -> Any:
    return np.full(batch.num_rows, Code.DISCONNECTED, np.uint8)


def _die(*_: Any) -> None:
    raise SystemExit


def test_redrive_commits_what_was_decided_and_gives_up_what_was_not(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    driven = Driven(bus, database, "shop")
    leave(driven, t, Stage.COMMITTING)
    leave(driven, t, Stage.STORED)
    assert sorted(rows(database)) == [Stage.STORED, Stage.COMMITTING]
    assert undecided(bus) == 2
    assert driven.redrive(older_than=3600.0) == Redriven()
    assert driven.redrive() == Redriven(committed=1, rolled_back=1)
    assert (bodies(bus, t), rows(database), undecided(bus)) == ([b"left"], [], 0)


def test_redrive_does_the_business_again_if_told_how(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    leave(driven, t, Stage.STORED)
    seen: list[mq.Message] = []

    def redo(session: Session, messages: Any) -> None:
        seen.extend(messages)
        note(session, "produced", [m.message_id for m in messages])

    assert driven.redrive(redo) == Redriven(committed=1)
    assert [m.body for m in seen] == [b"left"] == bodies(bus, t)
    assert noted(local, "produced") == [seen[0].message_id]


def test_a_business_transaction_whose_messages_were_given_up_is_fenced(
    bus: mq.Bus, database: sa.Engine, t: str
) -> None:
    """A second process redrives in the middle: the first one's business change does not happen."""
    driven, another = Driven(bus, database, "shop"), Driven(bus, database, "shop")
    prepared = driven._prepare

    def overtaken(*given: Any) -> Any:
        done = prepared(*given)
        another.redrive()
        return done

    driven._prepare = overtaken  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        driven.send(mq.Message(t, b"late"), lambda session: note(session, "produced", [b"b" * 16]))
    assert noted(database, "produced") == []
    assert (bodies(bus, t), rows(database), undecided(bus)) == ([], [], 0)


def test_redrive_waits_for_a_business_transaction_that_is_about_to_commit(
    bus: mq.Bus, database: sa.Engine, t: str
) -> None:
    """Not before it is decided: P4 holds the row's lock."""
    driven, another = Driven(bus, database, "shop"), Driven(bus, database, "shop")
    reports: list[Redriven] = []
    redriving = threading.Thread(target=lambda: reports.append(another.redrive()))

    def business(session: Session) -> None:
        redriving.start()
        redriving.join(0.2)
        note(session, "produced", [b"c" * 16])

    result = driven.send(mq.Message(t, b"first"), business)
    redriving.join()
    assert result.done
    assert reports[0].rolled_back == 0
    assert bodies(bus, t) == [b"first"]
    assert driven.redrive() == Redriven()


def test_a_broker_that_is_away_leaves_the_row_and_the_result_says_so(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    driven._carrier.end = lambda batch, shards, outcome: _away(batch)  # type: ignore[method-assign]
    result = driven.send(mq.Message(t, b"book"), lambda session: None)
    assert not result.done
    assert result.code is Code.DISCONNECTED
    assert driven.redrive() == Redriven(left=1)
    with local.begin() as connection:
        assert connection.execute(sa.select(trans_driven.c.attempts)).scalar() == 2
    del driven._carrier.end
    assert driven.redrive() == Redriven(committed=1)


@pytest.mark.invariant("I5")
def test_the_opposite_decision_at_the_broker_is_left_to_a_person(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    leave(driven, t, Stage.COMMITTING)
    bus.admin.rollback(bus.admin.transactions("open")[0]["id"])
    assert driven.redrive() == Redriven(stuck=1)
    assert rows(local) == [Stage.STUCK]
    assert driven.redrive() == Redriven()


def answering(code: Code) -> Any:
    """A prepare and an end of a carrier whose every row is answered with a code."""

    def prepare(batch: pa.RecordBatch, shards: Any) -> Any:
        return np.full(batch.num_rows, code, np.uint8), pa.nulls(batch.num_rows, pa.binary(16))

    return prepare, lambda batch, shards, outcome: np.full(batch.num_rows, code, np.uint8)


def test_a_commit_for_a_broker_that_is_none_of_those_given_is_left_to_a_person(
    bus: mq.Bus, local: sa.Engine, t: str
) -> None:
    """WRONG_SHARD is surely refused, whatever its number: the row is not driven for ever."""
    driven = Driven(bus, local, "shop")
    leave(driven, t, Stage.COMMITTING)
    _, driven._carrier.end = answering(Code.WRONG_SHARD)  # type: ignore[method-assign]
    assert driven.redrive() == Redriven(stuck=1)
    assert rows(local) == [Stage.STUCK]
    assert driven.redrive() == Redriven()


def test_an_abandoned_message_of_a_broker_that_is_none_of_those_given_is_let_go(
    bus: mq.Bus, local: sa.Engine, t: str
) -> None:
    driven = Driven(bus, local, "shop")
    leave(driven, t, Stage.STORED)
    driven._carrier.prepare, _ = answering(Code.WRONG_SHARD)  # type: ignore[method-assign]
    assert driven.redrive() == Redriven(rolled_back=1)
    assert rows(local) == []


def test_a_denial_is_no_refusal_of_the_message(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    """As in the relay: what is denied now may have been taken before, and is ended once the rights are back."""
    driven = Driven(bus, local, "shop")
    prepare = driven._carrier.prepare
    leave(driven, t, Stage.STORED)
    driven._carrier.prepare, driven._carrier.end = answering(Code.DENIED)  # type: ignore[method-assign]
    assert driven.redrive() == Redriven(left=1)
    assert rows(local) == [Stage.ABANDONED]
    driven._carrier.prepare = prepare  # type: ignore[method-assign]
    assert driven.redrive() == Redriven(left=1)
    assert rows(local) == [Stage.ABANDONED]
    del driven._carrier.end
    assert driven.redrive() == Redriven(rolled_back=1)
    assert (rows(local), undecided(bus)) == ([], 0)


def test_a_refused_message_leaves_nothing(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    driven = Driven(bus, local, "shop", merged=merged)
    bus.producer("other").send(t, b"plain", message_id=identity(t, 7))
    batch = [mq.Message(t, b"fine"), mq.Message(t, b"taken", message_id=identity(t, 7))]
    with pytest.raises(Rejected) as raised:
        driven.run_batch(batch, lambda session: note(session, "produced", [b"d" * 16]))
    assert raised.value.code is Code.MESSAGE_ID_TAKEN
    assert noted(local, "produced") == []
    assert (bodies(bus, t), rows(local), undecided(bus)) == ([b"plain"], [], 0)


def test_a_prepare_without_an_answer_is_given_up_and_redriven(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    driven = Driven(bus, local, "shop")
    prepare = driven._carrier.prepare

    def deaf(batch: pa.RecordBatch, shards: Any) -> Any:
        _, transactions = prepare(batch, shards)
        return _away(batch), pa.nulls(batch.num_rows, transactions.type)

    driven._carrier.prepare = deaf  # type: ignore[method-assign]
    with pytest.raises(Unknown):
        driven.send(mq.Message(t, b"book"), lambda session: note(session, "produced", [b"e" * 16]))
    assert rows(local) == [Stage.ABANDONED]
    assert driven.redrive() == Redriven(left=1)
    del driven._carrier.prepare
    assert driven.redrive() == Redriven(rolled_back=1)
    assert (bodies(bus, t), rows(local), undecided(bus)) == ([], [], 0)
    assert noted(local, "produced") == []


@pytest.mark.parametrize(
    "message",
    [
        mq.Message("t", b"x", queue=1),
        pa.RecordBatch.from_pydict(
            {"topic": ["t"], "body": [b"x"], "transaction": pa.array([b"1" * 16], pa.binary(16))}
        ),
        [mq.Message("t", b"x", message_id="same"), mq.Message("t", b"y", message_id="same")],
    ],
    ids=["queue", "join", "twice"],
)
def test_what_a_row_cannot_keep_is_refused_at_the_door(bus: mq.Bus, local: sa.Engine, message: Any) -> None:
    with pytest.raises(Misuse):
        Driven(bus, local, "shop").run_batch(message, lambda session: None)
    assert rows(local) == []


def test_an_id_that_is_under_way_is_refused(bus: mq.Bus, local: sa.Engine, merged: bool, t: str) -> None:
    """Its own row must not be taken for the new message's."""
    driven = Driven(bus, local, "shop", merged=merged)
    driven._carrier.end = lambda batch, shards, outcome: _away(batch)  # type: ignore[method-assign]
    message = mq.Message(t, b"book", message_id=identity(t, 1))
    driven.send(message, lambda session: note(session, "produced", [identity(t, 1)]))
    with pytest.raises(Rejected) as raised:
        driven.send(message, lambda session: note(session, "produced", [identity(t, 1)]))
    assert raised.value.code is Code.MESSAGE_ID_TAKEN
    assert noted(local, "produced") == [identity(t, 1)]
    assert rows(local) == [Stage.COMMITTING]
    del driven._carrier.end
    assert driven.redrive() == Redriven(committed=1)


def test_delay_and_content_survive_in_the_table(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    driven = Driven(bus, database, "shop")
    driven._journal.decide = _die  # type: ignore[method-assign]
    given = mq.Message(t, bytes(range(256)), "ключ", "tag", {"a": "1", "ü": "\u2603"}, delay=1.5, message_id="own")
    with pytest.raises(SystemExit):
        driven.send(given, lambda session: None)
    del driven._journal.decide
    ((batch, shards),) = driven._journal.pages(Stage.STORED)
    (row,) = batch.to_pylist()
    assert (row["topic"], row["body"], row["key"], row["tag"]) == (given.topic, given.body, given.key, given.tag)
    assert dict(row["properties"]) == given.properties
    assert row["delay_us"] == 1_500_000
    assert shards.tolist() == [bus.router.shard_of(0, 5.0)]


# The table as the checker


def check_of(topic: str, transaction: mq.TransactionId, message_id: bytes) -> mq.Check:
    message = mq.CheckedMessage(topic, b"", None, None, {}, message_id, datetime.now(UTC))
    return mq.Check(transaction, 1, (message,))


OURS, OTHER = mq.TransactionId(1, 1, 1), mq.TransactionId(1, 1, 2)
ANSWERS = {
    Stage.STORED: (mq.UNKNOWN, mq.UNKNOWN),
    Stage.ABANDONED: (mq.ROLLBACK, mq.ROLLBACK),
    Stage.COMMITTING: (mq.COMMIT, mq.ROLLBACK),
    Stage.ROLLING_BACK: (mq.ROLLBACK, mq.ROLLBACK),
    Stage.STUCK: (mq.UNKNOWN, mq.UNKNOWN),
}


def test_what_the_table_answers(database: sa.Engine) -> None:
    """In each state: a question about the transaction that the row names, and about another one of the same message
    id."""
    more = {"producer_group": "shop", "topic": "t", "body": b"", "delay_us": 0, "attempts": 0, "created_us": 0}
    ids = {stage: bytes([stage]) * 16 for stage in ANSWERS}
    rows = [{"id": i, "state": int(stage), "transaction_id": bytes(OURS), **more} for stage, i in ids.items()]
    with database.begin() as connection:
        connection.execute(sa.insert(trans_driven), rows)
    checker = TableChecker(database, "shop")
    asked = [check_of("t", which, i) for i in ids.values() for which in (OURS, OTHER)]
    told = checker.decide_batch(asked)
    assert {stage: tuple(told[2 * n : 2 * n + 2]) for n, stage in enumerate(ids)} == ANSWERS


def test_a_row_that_is_not_there(local: sa.Engine) -> None:
    """It came before its prepare and goes after its end; merged, nobody knows."""
    asked = [check_of("t", OURS, b"j" * 16)]
    assert TableChecker(local, "shop").decide_batch(asked) == [mq.ROLLBACK]
    assert TableChecker(local, "shop", merged=True).decide_batch(asked) == [mq.UNKNOWN]


def test_the_two_modes_never_answer_for_each_other(bus: mq.Bus, local: sa.Engine) -> None:
    stored, merged = Driven(bus, local, "shop"), Driven(bus, local, "shop", merged=True)
    assert stored.producer.group != merged.producer.group


def test_any_process_of_the_group_ends_what_another_left(make_served: Any, local: sa.Engine, t: str) -> None:
    """No redrive: the broker asks, the table answers; the row is found ended later."""
    served = make_served(transaction_timeout=0.1, check_interval=0.1, check_max=1_000_000)
    with mq.connect(served.url) as bus:
        dying = Driven(bus, local, "shop")
        leave(dying, t, Stage.COMMITTING)
        dying.close()
        other = Driven(bus, local, "shop")
        deadline = time.monotonic() + 60.0
        while bodies(bus, t) != [b"left"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert other.redrive() == Redriven(committed=1)


def test_merged_a_half_message_without_a_row_stays_undecided_and_invisible(
    make_served: Any, local: sa.Engine, t: str
) -> None:
    """However often the broker asks: UNKNOWN, then parked. It leaves with the log."""
    served = make_served(transaction_timeout=0.05, check_interval=0.05, check_max=2)
    with mq.connect(served.url) as bus:
        driven = Driven(bus, local, "shop", merged=True)
        carrier = driven._carrier
        assert isinstance(carrier, HalfMessages)
        batch = to_batch(mq.Message(t, b"abandoned"))
        carrier.prepare(batch, carrier.place(batch))
        deadline = time.monotonic() + 60.0
        while not bus.admin.transactions("parked"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert bodies(bus, t) == []


def test_a_forked_child_names_its_messages_otherwise() -> None:
    """A way that was made before a fork (a server that forks its workers) gives no id twice."""
    read, write = os.pipe()
    with _CODEC.ids._lock:
        child = os.fork()
        if not child:  # pragma: no cover
            os.write(write, ids_of(to_batch(mq.Message("orders", b"child")))[0])
            os._exit(0)
        os.waitpid(child, 0)
    (ours,) = ids_of(to_batch(mq.Message("orders", b"parent")))
    theirs = os.read(read, 16)
    os.close(read)
    os.close(write)
    assert len(theirs) == 16
    assert ours != theirs
