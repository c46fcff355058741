"""The kill matrix: producer, broker and consumer killed between every two steps of every mode; then a restart, and the
check by id.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from modes_roles import (
    COUNT,
    DYING_LEASE,
    IDLE,
    TAKEN_BACK,
    identity,
    noted,
    offset_effect,
    prepare_database,
    produce_into,
    reach_effect,
    readers,
    sender,
    settled,
)

import escrowmq as mq
from escrowmq.outbox.modes import BothReachConsumer, OffsetConsumer, compare, slots_of
from escrowmq.platform import failpoints
from zygote import Zygote

KILLED = -9
STEPS = {
    "driven": [
        "driven.stored",
        "driven.prepared",
        "driven.deciding",
        "driven.decided",
        "driven.ended",
        "driven.deleted",
    ],
    "merged": ["driven.prepared", "driven.deciding", "driven.decided", "driven.ended", "driven.deleted"],
    "both-reach": [
        "driven.stored",
        "driven.prepared",
        "driven.deciding",
        "driven.decided",
        "driven.ended",
        "driven.deleted",
    ],
    "both-reach-merged": ["driven.prepared", "driven.decided", "driven.ended"],
    "compensating": ["compensating.stored", "compensating.sent", "compensating.deleted"],
}
CELLS = [(mode, step) for mode, steps in STEPS.items() for step in steps]


def finish(mode: str, bus: mq.Bus, engine: sa.Engine) -> None:
    """What a producer does when it starts again."""
    way = sender(mode, bus, engine)
    if mode == "compensating":
        assert way.resend() == 0
        return
    report = way.redrive()
    assert not report.left
    assert not report.stuck


def consume(mode: str, bus: mq.Bus, engine: sa.Engine, topic: str) -> None:
    """Everything that is there, into the consumer's database."""
    if topic not in [each["name"] for each in bus.admin.topics()]:
        return
    if mode.startswith("both-reach"):
        reaching = BothReachConsumer(engine, readers(topic), reach_effect)
        while not settled(reaching, bus, topic):
            pass
    else:
        consumer = OffsetConsumer(bus, engine, readers(topic), topic, owner="c-1")
        while consumer.poll(offset_effect):
            pass


def check(mode: str, producer: sa.Engine, consumer: sa.Engine, topic: str, *, complete: bool = False) -> None:
    """I24 and 4.14: by id, each once, nothing of what was rolled back; nothing is under way any more."""
    confirmed, effects = noted(producer, "produced"), noted(consumer, "effects")
    assert len(set(confirmed)) == len(confirmed)
    assert identity(topic, TAKEN_BACK) not in confirmed
    verdict = compare(confirmed, effects if mode != "compensating" else set(effects))
    assert verdict.ok, str(verdict)
    if complete:
        assert set(confirmed) == {identity(topic, number) for number in range(COUNT) if number != TAKEN_BACK}
    with producer.begin() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM trans_driven").scalar() == 0


@pytest.fixture
def databases(make_database: Callable[[str], str]) -> tuple[str, str]:
    return make_database("producer"), make_database("consumer")


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("mode", "step"), CELLS)
def test_the_producer_is_killed(
    mode: str, step: str, served: Any, zygote: Zygote, databases: tuple[str, str], t: str
) -> None:
    failpoint = f"{step}:{len(step) % 2 * 2 + 1}"  # the first time here, the third time there
    assert zygote.run("produce", failpoint, mode=mode, url=served.url, database=databases[0], topic=t) == KILLED
    cell(mode, served.url, databases, t)


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("mode", "step"), [cell for cell in CELLS if not cell[0].startswith("both-reach")])
def test_producer_and_broker_are_killed_together(
    mode: str, step: str, zygote: Zygote, databases: tuple[str, str], t: str, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'embedded'}"
    assert zygote.run("produce", f"{step}:2", mode=mode, url=url, database=databases[0], topic=t) == KILLED
    cell(mode, url, databases, t)


def cell(mode: str, url: str, databases: tuple[str, str], topic: str) -> None:
    """Start again, consume, check."""
    producer, consumer = map(sa.create_engine, databases)
    with mq.connect(url) as bus:
        finish(mode, bus, producer)
        consume(mode, bus, consumer, topic)
        check(mode, producer, consumer, topic)
    producer.dispose()
    consumer.dispose()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("mode", "step"), CELLS)
def test_the_broker_is_killed(mode: str, step: str, served: Any, databases: tuple[str, str], t: str) -> None:
    """It comes back; the producer lives and goes on by itself: everything is produced."""
    producer, consumer = map(sa.create_engine, databases)
    with mq.connect(served.url) as bus:
        way = sender(mode, bus, producer)
        failpoints.arm(failpoints.Failpoint(step, 2, served.restart))
        try:
            produce_into(way, t)
        finally:
            failpoints.arm()
        finish(mode, bus, producer)
        consume(mode, bus, consumer, t)
        check(mode, producer, consumer, t, complete=True)
    producer.dispose()
    consumer.dispose()


# The consumer's side


REACH_STEPS = {
    True: ["both_reach.applying", "both_reach.applied", "both_reach.done"],
    False: ["both_reach.applying", "both_reach.applied", "both_reach.acknowledged", "both_reach.done"],
}
REACH_CELLS = [(marks, step) for marks, steps in REACH_STEPS.items() for step in steps]
OFFSET_STEPS = ["offsets.read", "offsets.applying", "offsets.applied"]


def produced(mode: str, bus: mq.Bus, database: str, topic: str) -> sa.Engine:
    """A topic with everything of one producer, and its database."""
    engine = sa.create_engine(database)
    produce_into(sender(mode, bus, engine), topic)
    return engine


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("marks", "step"), REACH_CELLS)
def test_a_consumer_of_both_is_killed(
    marks: bool, step: str, served: Any, zygote: Zygote, databases: tuple[str, str], t: str
) -> None:
    consumer = sa.create_engine(databases[1])
    with mq.connect(served.url) as bus:
        producer = produced("both-reach", bus, databases[0], t)
        given = {"url": served.url, "database": databases[1], "topic": t, "marks": marks}
        assert zygote.run("consume_reach", step, lease=DYING_LEASE, **given) == KILLED
        assert zygote.run("consume_reach", **given) == 0
        check("both-reach", producer, consumer, t, complete=True)
    producer.dispose()
    consumer.dispose()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("marks", "step"), REACH_CELLS)
def test_the_broker_of_a_consumer_of_both_is_killed(
    marks: bool, step: str, served: Any, databases: tuple[str, str], t: str
) -> None:
    engine = sa.create_engine(databases[1])
    with mq.connect(served.url) as bus:
        producer = produced("both-reach", bus, databases[0], t)
        consumer = BothReachConsumer(engine, readers(t), reach_effect, marks=marks)
        failpoints.arm(failpoints.Failpoint(step, 1, served.restart))
        try:
            while not settled(consumer, bus, t, DYING_LEASE):
                pass
        finally:
            failpoints.arm()
        check("both-reach", producer, engine, t, complete=True)
    producer.dispose()
    engine.dispose()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("step", OFFSET_STEPS)
def test_a_consumer_with_its_own_offsets_is_killed(
    step: str, stride: int, served: Any, zygote: Zygote, databases: tuple[str, str], t: str
) -> None:
    """With a stride of 2: one of two consumers of one queue is killed, and started again."""
    consumer = sa.create_engine(databases[1])
    with mq.connect(served.url) as bus:
        producer = produced("driven", bus, databases[0], t)
        given = {"url": served.url, "database": databases[1], "topic": t, "stride": stride, "max_messages": 1}
        assert zygote.run("consume_offsets", f"{step}:2", **given) == KILLED
        for part in range(stride):
            assert zygote.run("consume_offsets", part=part, **given) == 0
        check("driven", producer, consumer, t, complete=True)
    producer.dispose()
    consumer.dispose()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize("step", OFFSET_STEPS)
def test_the_broker_of_a_consumer_with_its_own_offsets_is_killed(
    step: str, served: Any, databases: tuple[str, str], t: str
) -> None:
    engine = sa.create_engine(databases[1])
    with mq.connect(served.url) as bus:
        producer = produced("driven", bus, databases[0], t)
        consumer = OffsetConsumer(bus, engine, readers(t), t, slots_of(bus, t), owner="c-1")
        failpoints.arm(failpoints.Failpoint(step, 2, served.restart))
        try:
            deadline = time.monotonic() + 180.0
            while len(noted(engine, "effects")) < COUNT - 1:
                assert time.monotonic() < deadline
                consumer.run(offset_effect, max_messages=2, idle_timeout=IDLE)
        finally:
            failpoints.arm()
        check("driven", producer, engine, t, complete=True)
    producer.dispose()
    engine.dispose()


# The other databases: a cell each here, the whole grid at length


@contextlib.contextmanager
def databases_of(url: str) -> Iterator[tuple[str, str]]:
    """A producer's and a consumer's database on the server of ``url``."""
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    names = [f"modes_{uuid.uuid4().hex[:12]}" for _ in range(2)]
    urls = [sa.make_url(url).set(database=name).render_as_string(hide_password=False) for name in names]
    with server.connect() as connection:
        for name, made in zip(names, urls, strict=True):
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
            prepare_database(made)
    try:
        yield urls[0], urls[1]
    finally:
        with server.connect() as connection:
            for name in names:
                force = " WITH (FORCE)" if server.dialect.name == "postgresql" else ""
                connection.exec_driver_sql(f"DROP DATABASE {name}{force}")


def one_cell(mode: str, step: str, server: str, served: Any, zygote: Zygote, topic: str) -> None:
    """A producer killed, then a consumer killed, then everything checked."""
    with databases_of(server) as (produced_in, consumed_in):
        given = {"mode": mode, "url": served.url, "database": produced_in, "topic": topic}
        assert zygote.run("produce", f"{step}:2", **given) == KILLED
        producer, consumer = sa.create_engine(produced_in), sa.create_engine(consumed_in)
        with mq.connect(served.url) as bus:
            finish(mode, bus, producer)
            if mode in ("driven", "merged"):
                reading = {"url": served.url, "database": consumed_in, "topic": topic, "max_messages": 1}
                assert zygote.run("consume_offsets", "offsets.applying", **reading) == KILLED
                assert zygote.run("consume_offsets", **reading) == 0
            else:
                consume(mode, bus, consumer, topic)
            check(mode, producer, consumer, topic)
        producer.dispose()
        consumer.dispose()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize("server", ["postgres_url", "mariadb_url"])
def test_killed_on_a_real_server(
    server: str, request: pytest.FixtureRequest, served: Any, zygote: Zygote, t: str
) -> None:
    one_cell("driven", "driven.deciding", request.getfixturevalue(server), served, zygote, t)


@pytest.mark.invariant("I24")
@pytest.mark.long
@pytest.mark.parametrize("server", ["postgres_url", "mariadb_url"])
@pytest.mark.parametrize(("mode", "step"), CELLS)
def test_killed_everywhere_on_a_real_server(
    mode: str, step: str, server: str, request: pytest.FixtureRequest, served: Any, zygote: Zygote, t: str
) -> None:
    one_cell(mode, step, request.getfixturevalue(server), served, zygote, t)


# Planted bugs: the matrix must be able to fail


@pytest.mark.invariant("I24")
def test_an_offset_moved_in_a_transaction_of_its_own_is_caught(
    served: Any, zygote: Zygote, databases: tuple[str, str], t: str
) -> None:
    consumer = sa.create_engine(databases[1])
    with mq.connect(served.url) as bus:
        producer = produced("driven", bus, databases[0], t)
        given = {"url": served.url, "database": databases[1], "topic": t, "planted": True}
        assert zygote.run("consume_offsets", "planted.effect_done", **given) == KILLED
        assert zygote.run("consume_offsets", **given) == 0
        verdict = compare(noted(producer, "produced"), noted(consumer, "effects"))
        assert verdict.repeated
        assert not verdict.lost
    producer.dispose()
    consumer.dispose()


@pytest.mark.invariant("I24")
def test_a_row_deleted_before_the_broker_has_answered_is_caught(
    served: Any, zygote: Zygote, databases: tuple[str, str], t: str
) -> None:
    given = {"mode": "driven", "url": served.url, "database": databases[0], "topic": t, "planted": True}
    assert zygote.run("produce", "planted.deleted:2", **given) == KILLED
    with pytest.raises(AssertionError, match="1 lost"):
        cell("driven", served.url, databases, t)
