"""What children and tests do in the kill matrix: serve, produce, consume. Small, and the same for both.

The producer's database has ``produced`` (an id for every business change), the consumer's ``effects`` (an id an effect,
without a unique key: a second effect must be seen, not refused).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq.broker.serving import serve as serving
from escrowmq.errors import Code, EscrowError
from escrowmq.model import message_id
from escrowmq.outbox.migrations import migrate
from escrowmq.outbox.modes import (
    BothReachConsumer,
    BothReachProducer,
    Compensating,
    Driven,
    OffsetConsumer,
    Prepared,
    Slot,
    Taken,
    slots_of,
)
from escrowmq.outbox.modes.journal import Stage
from escrowmq.platform.failpoints import reach
from escrowmq.settings import BrokerSettings

GROUP = "shop"
COUNT = 5
DYING_LEASE, LEASE = 1.0, 600.0
"""Of a consumer that is killed: what it held must come back; and of one that lives: however slow the machine is, it
must not.
"""
PATIENT = 60.0
"""Seconds of a request that must succeed, also of one that comes while the broker is started again."""
IDLE = 0.1
"""After which a consumer looks whether anything is left."""
TAKEN_BACK = 2
"""The message whose business change fails."""


def identity(topic: str, number: int) -> bytes:
    """The message id of message ``number`` of a topic."""
    return message_id(f"{topic} {number}")


def readers(topic: str) -> str:
    """The consumer group of a topic: a group has one subscription for ever."""
    return f"cart-{topic}"


def prepare_database(url: str) -> None:
    """Our tables and theirs."""
    engine = sa.create_engine(url)
    migrate(engine)
    with engine.begin() as connection:
        kind = "BYTEA" if engine.dialect.name == "postgresql" else "VARBINARY(16)"
        for table in ("produced", "effects"):
            connection.exec_driver_sql(f"CREATE TABLE {table} (id {kind} NOT NULL)")
    engine.dispose()


def note(session: Session, table: str, ids: Iterable[bytes]) -> None:
    """Record ids in the session's transaction."""
    session.execute(sa.text(f"INSERT INTO {table} VALUES (:id)"), [{"id": i} for i in ids])


def noted(engine: sa.Engine, table: str) -> list[bytes]:
    """All recorded ids, repeats included."""
    with engine.begin() as connection:
        return [bytes(i) for (i,) in connection.exec_driver_sql(f"SELECT id FROM {table}")]


class Cancelled(Exception):
    """The business says no."""


def serve(folder: str, listen: str, ready: str, settings: dict[str, Any]) -> None:
    """A served broker; ``ready`` is a file that gets its address."""

    def announce(what: dict[str, Any]) -> None:
        part = Path(ready + ".part")
        part.write_text(json.dumps(what))
        part.rename(ready)

    serving.serve(Path(folder), listen=listen, settings=BrokerSettings.of(settings), announce=announce)


def sender(mode: str, bus: mq.Bus, engine: sa.Engine) -> Any:
    """The producer of a mode."""
    if mode in ("driven", "merged"):
        return Driven(bus, engine, GROUP, merged=mode == "merged", timeout=PATIENT)
    if mode in ("both-reach", "both-reach-merged"):
        return BothReachProducer(bus.producer("plain", timeout=PATIENT), engine, GROUP, merged=mode.endswith("merged"))
    return Compensating(bus.producer("plain", timeout=PATIENT), engine, GROUP)


def produce_into(way: Any, topic: str, count: int = COUNT) -> None:
    """Send ``count`` messages, each with a business change; one is cancelled; the last two go as a batch."""

    def business(*numbers: int) -> Any:
        def change(session: Session) -> None:
            note(session, "produced", [identity(topic, number) for number in numbers])
            if TAKEN_BACK in numbers:
                raise Cancelled

        return change

    for number in range(count - 2):
        try:
            way.send(message(topic, number), business(number))
        except Cancelled:
            assert number == TAKEN_BACK
    last = (count - 2, count - 1)
    many = getattr(way, "run_batch", way.send)
    many([message(topic, number) for number in last], business(*last))


def message(topic: str, number: int) -> mq.Message:
    """Message ``number``."""
    key = None if number % 2 else f"key-{number}"
    return mq.Message(
        topic, b"body %d" % number, key=key, properties={"n": str(number)}, message_id=identity(topic, number)
    )


def produce(mode: str, url: str, database: str, topic: str, planted: bool = False) -> None:
    """A producer process."""
    with mq.connect(url) as bus:
        engine = sa.create_engine(database)
        way = sender(mode, bus, engine) if not planted else DeletesFirst(bus, engine, GROUP)
        produce_into(way, topic)


class DeletesFirst(Driven):
    """A planted bug: P7 before P6."""

    def _finish(self, batch: Any, shards: Any, outcome: Any) -> Any:
        self._journal.settle(list(Stage), batch.column("message_id").to_pylist())
        reach("planted.deleted")
        return super()._finish(batch, shards, outcome)


class MovesApart(OffsetConsumer):
    """A planted bug: the offset moves in a transaction of its own."""

    def _apply(self, claim: Any, next_offset: int, messages: Taken, effect: Any) -> Any:
        with self._sessions() as session, session.begin():
            effect(session, messages)
        reach("planted.effect_done")
        return super()._apply(claim, next_offset, messages, lambda session, messages: None)


def reach_effect(session: Session, messages: Sequence[Prepared]) -> None:
    """The effect of both-reach."""
    note(session, "effects", [m.message_id for m in messages])


def offset_effect(session: Session, messages: Taken) -> None:
    """The effect of offsets."""
    note(session, "effects", messages.arrow.column("message_id").to_pylist())


def unsettled(bus: mq.Bus, topic: str) -> int:
    """What the topic's consumer group has not settled."""
    queues = [queue for group in bus.admin.groups() for queue in group["queues"] if queue["topic"] == topic]
    return sum(queue["end"] - queue["floor"] for queue in queues)


def consume_reach(url: str, database: str, topic: str, marks: bool, lease: float = LEASE) -> None:
    """A consumer process of both-reach; it ends when everything is settled."""
    with mq.connect(url) as bus:
        consumer = BothReachConsumer(sa.create_engine(database), readers(topic), reach_effect, marks=marks)
        while not settled(consumer, bus, topic, lease):
            pass


def settled(consumer: BothReachConsumer, bus: mq.Bus, topic: str, lease: float = LEASE) -> bool:
    """Consume what comes; False if something is left, because acknowledgements got lost on the way or came after the
    lease: it must go on."""
    try:
        consumer.consume(bus, topic, idle_timeout=IDLE, lease=lease)
    except EscrowError as problem:
        if problem.code not in (Code.LEASE_LOST, Code.DISCONNECTED, Code.TIMED_OUT):
            raise
        return False
    return not unsettled(bus, topic)


def consume_offsets(
    url: str, database: str, topic: str, stride: int = 1, part: int = 0, max_messages: int = 2, planted: bool = False
) -> None:
    """A consumer process with its offsets in its database."""
    with mq.connect(url) as bus:
        slots: list[Slot] = slots_of(bus, topic, stride=stride, part=part)
        kind = MovesApart if planted else OffsetConsumer
        consumer = kind(bus, sa.create_engine(database), readers(topic), topic, slots, owner=f"part-{part}")
        while consumer.poll(offset_effect, max_messages):
            pass
