"""Topics are altered and deleted by a person, under consumers, readers and producers; embedded and served."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq import outbox
from escrowmq.client.admin import Admin
from escrowmq.errors import Code
from escrowmq.outbox.modes import OffsetConsumer
from escrowmq.platform.failpoints import VARIABLE

Own = Callable[..., Any]
Eventually = Callable[..., Any]


def refusal(act: Callable[[], object]) -> Code:
    with pytest.raises(mq.EscrowError) as caught:
        act()
    return caught.value.code


def bodies(bus: mq.Bus, topic: str, queue: int = 0) -> list[bytes]:
    return list(bus.admin.read(topic, queue).read_all()["body"].to_pylist())


def test_a_topic_is_altered_and_deleted_and_both_are_acts(bus: mq.Bus, t: str, g: str) -> None:
    admin = bus.admin
    admin.create_topic(t, 1)
    producer = bus.producer(g)
    for number in range(5):
        producer.send(t, b"%d" % number, message_id=f"{t}-{number}")
    (altered,) = admin.alter_topic(t, queues=2, retention_size=1, why="the disk")
    assert (altered["queues"], altered["retention_size"], "retention" in altered) == (2, 1, False)
    (topic,) = [one for one in admin.topics() if one["name"] == t]
    assert (topic["queues"][0]["head"], topic["queues"][0]["end"]) == (4, 5)
    assert topic["queues"][0]["bytes"] == 101
    assert bodies(bus, t) == [b"4"]
    assert refusal(lambda: admin.read(t, 0, start=1).read_all()) is Code.RANGE_PURGED
    assert [found["offset"] for found in admin.lookup(message_id=f"{t}-4")] == [4]
    assert admin.lookup(message_id=f"{t}-3") == []
    assert bus.view_message(t, f"{t}-3") is None
    again = producer.send(t, b"3", message_id=f"{t}-3")
    assert (again.offset, bodies(bus, t)) == (None, [b"4"]), "a repeat still gets the receipt of its first time"
    (altered,) = admin.alter_topic(t, retention_size="broker", retention=3600.0)
    assert (altered["retention"], "retention_size" in altered) == (3600.0, False)
    (gone,) = admin.delete_topic(t, why="moved")
    assert (gone["deleted"], gone["messages"], gone["queues"]) == (True, 1, 2)
    assert refusal(lambda: admin.delete_topic(t)) is Code.UNKNOWN_TOPIC
    assert bus.view_message(t, f"{t}-4") is None
    acts = [one for one in admin.acts() if one["what"].get("name") == t]
    assert [(one["act"], one["why"]) for one in acts] == [
        ("topics.alter", "the disk"),
        ("topics.alter", None),
        ("topics.delete", "moved"),
    ]
    assert acts[2]["ended"]["messages"] == 1


def test_nonsense_is_refused(bus: mq.Bus, t: str) -> None:
    bus.admin.create_topic(t, 2)
    for wrong in ({"retention": 0.1}, {"retention": float(1 << 62)}, {"retention_size": 0}):
        assert refusal(lambda wrong=wrong: bus.admin.alter_topic(t, **wrong)) is Code.BAD_REQUEST
    assert refusal(lambda: bus.admin.alter_topic(t, queues=1)) is Code.BAD_QUEUE
    assert refusal(lambda: bus.admin.alter_topic(f"{t}-no", retention=5.0)) is Code.UNKNOWN_TOPIC
    for wrong in ({"retention": "7d"}, {"colour": 1}, {"retention_size": True}):
        assert refusal(lambda wrong=wrong: bus.admin.alter_topic(t, **wrong)) is Code.BAD_ARGUMENT


def test_deleting_is_refused_while_something_hangs_on_the_topic(bus: mq.Bus, t: str, g: str) -> None:
    admin = bus.admin
    producer = bus.producer(g, unasked=True)
    half = producer.prepare(t, b"half")
    with bus.consumer(f"{g}-c", t) as consumer:
        assert refusal(lambda: admin.delete_topic(t)) is Code.CONFLICT
        producer.commit(half.transaction_id)
        assert refusal(lambda: admin.delete_topic(t)) is Code.CONFLICT
        (message,) = consumer.receive(1, wait=60.0)
        late = producer.prepare(t, b"late")
        (would,) = admin.delete_topic(t, force=True, check=True)
        assert (would["deleted"], would["rolled_back"], would["groups"]) == (False, 1, [f"{g}-c"])
        (gone,) = admin.delete_topic(t, force=True)
        assert (gone["deleted"], gone["rolled_back"]) == (True, 1)
        assert refusal(lambda: producer.commit(late.transaction_id)) is Code.CONFLICT
        message.ack()
        consumer.flush()
        assert consumer.receive(1, wait=0.1) == []
        assert refusal(lambda: producer.prepare(t, b"again")) is Code.UNKNOWN_TOPIC
        assert refusal(lambda: bus.consumer(f"{g}-new", t)) is Code.UNKNOWN_TOPIC
    admin.create_topic(t, 1)
    bus.producer(f"{g}-p").send(t, b"new")
    with bus.consumer(f"{g}-c", t) as consumer:
        (message,) = consumer.receive(1, wait=60.0)
        assert (message.body, message.attempt) == (b"new", 1)
        message.ack()


def test_who_kept_an_offset_of_the_old_topic_never_reads_the_new_one(bus: mq.Bus, t: str, g: str) -> None:
    bus.admin.create_topic(t, 1)
    producer = bus.producer(g)
    producer.send(t, b"old")
    with bus.reader(t) as reader:
        assert [batch[0].body for batch in reader.batches(idle_timeout=0)] == [b"old"]
        places = reader.positions()
        bus.admin.delete_topic(t)
        assert list(reader.batches(idle_timeout=0)) == [], "it waits for a topic of that name"
        bus.admin.create_topic(t, 1)
        assert refusal(lambda: list(reader.batches(idle_timeout=0))) is Code.RANGE_PURGED
    receipt = producer.send(t, b"new")
    assert receipt.offset == 2
    with bus.reader(t, start=places) as reader:
        assert refusal(lambda: list(reader.batches(idle_timeout=0))) is Code.RANGE_PURGED
    with bus.reader(t) as reader:
        assert [batch[0].body for batch in reader.batches(idle_timeout=0)] == [b"new"]


@pytest.mark.parametrize("on_purged", ["raise", "skip"])
def test_an_offset_in_a_consumers_database(bus: mq.Bus, t: str, g: str, on_purged: str, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'db.sqlite'}")
    outbox.migrate(engine)
    seen: list[bytes] = []
    came = threading.Event()

    def effect(_session: Session, messages: Any) -> None:
        seen.extend(message.body for message in messages)
        came.set()

    bus.admin.create_topic(t, 1)
    producer = bus.producer(g)
    producer.send(t, b"old")
    with OffsetConsumer(bus, engine, g, t, owner="one") as consumer:
        assert consumer.run(effect, stop=came) == 1
    bus.admin.delete_topic(t)
    bus.admin.create_topic(t, 1)
    producer.send(t, b"new")
    with OffsetConsumer(bus, engine, g, t, owner="one", on_purged=on_purged) as consumer:
        if on_purged == "raise":
            assert refusal(lambda: consumer.run(effect)) is Code.RANGE_PURGED
        else:
            came.clear()
            consumer.run(effect, stop=came)
    assert seen == ([b"old"] if on_purged == "raise" else [b"old", b"new"])
    engine.dispose()


def _queue(admin: Admin, group: str) -> Any:
    """The only queue of a group; nothing if nobody has made the group yet."""
    return next((one["queues"][0] for one in admin.groups() if one["name"] == group), {"expired": 0})


def test_under_load_nothing_is_skipped_without_a_word(bus: mq.Bus, t: str, g: str, eventually: Eventually) -> None:
    """Every offset is received or counted as expired, while a topic is cut again and again under senders and
    consumers."""
    admin = bus.admin
    admin.create_topic(t, 1)
    stop, got = threading.Event(), list[int]()
    producer = bus.producer(g)

    def send() -> None:
        while not stop.is_set():
            producer.send_batch([mq.Message(t, bytes(100)) for _ in range(20)])

    def consume() -> None:
        with bus.consumer(g, t, prefetch=8) as consumer:
            while not stop.is_set():
                for message in consumer.receive(7, wait=0.05):
                    got.append(message.offset)
                    message.ack()

    threads = [threading.Thread(target=work) for work in (send, consume)]
    for thread in threads:
        thread.start()
    for size in range(1000, 40_000, 1500):
        admin.alter_topic(t, retention_size=size)
    eventually(lambda: admin.alter_topic(t, retention_size=1000) and _queue(admin, g)["expired"])
    stop.set()
    for thread in threads:
        thread.join()
    assert got == sorted(set(got)), "in order, and none twice"
    queue = _queue(admin, g)
    counted = queue["acked"] + queue["expired"] + queue["leased"] + queue["retrying"] + queue["waiting"]
    assert counted == queue["end"]
    assert queue["acked"] <= len(got)
    assert queue["expired"] > 0
    (deleted,) = admin.delete_topic(t, force=True)
    assert deleted["messages"] == queue["end"] - queue["head"]


@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_before_or_after_a_deletion(
    step: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker(served_kind)
    with broker.connect() as bus:
        bus.admin.create_topic("t", 1)
        bus.producer("g").send("t", b"x")
        half = bus.producer("h", unasked=True).prepare("t", b"half")
    broker.stop()
    monkeypatch.setenv(VARIABLE, step)
    broker.start()
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        broker.dies_of(lambda: Admin(bus.router, 2.0).delete_topic("t", force=True, why=step))
    broker.restart(kill=True)
    done = step == "acts.done"
    with broker.connect() as bus:
        (one,) = bus.admin.acts()
        found = {"deleted": True} if done else {"deleted": False, "undecided": 1}
        assert (one["why"], one["ended"]) == (step, {"interrupted": True, "found": found})
        assert [topic["name"] for topic in bus.admin.topics()] == ([] if done else ["t"])
        state = bus.admin.transaction(half.transaction_id)["state"]
        assert state == ("rolled_back" if done else "open")
        assert bus.admin.verify_acts()[0]["broken"] == []
    broker.stop()
    with mq.connect(f"file:{broker.folder}", read_only=True) as bus:
        assert len(bus.admin.topics()) == (not done)


def test_two_brokers_one_away(make_broker: Own, served_kind: str) -> None:
    one, two = make_broker(served_kind), make_broker(served_kind)
    url = f"{one.url},{two.url.removeprefix('escrow://')}"
    with mq.connect(url) as bus:
        bus.admin.create_topic("t", 1)
        assert len(bus.admin.alter_topic("t", retention=60.0)) == 2
    with two.connect() as bus:
        bus.producer("h", unasked=True).prepare("t", b"half")
    with mq.connect(url) as bus:
        assert refusal(lambda: bus.admin.delete_topic("t")) is Code.CONFLICT
        assert len(bus.admin.topics()) == 2, "what one refuses is done at none"
        two.stop(kill=True)
        gone = bus.admin.delete_topic("t")
        assert (len(gone), len(gone.missing)) == (1, 1)
    two.start()
    with mq.connect(url) as bus:
        assert [topic["broker"] for topic in bus.admin.topics()] == [two.url]
        (rest,) = bus.admin.delete_topic("t", force=True)
        assert rest["rolled_back"] == 1


def test_dead_letters_of_a_topic_that_is_deleted_meanwhile(bus: mq.Bus, t: str, g: str) -> None:
    """What was shown is named again after the deletion: those rows are gone, and the others are settled all the
    same."""
    admin = bus.admin
    for topic in (t, f"{t}-2"):
        admin.create_topic(topic, 1)
        bus.producer(f"{g}-p").send(topic, b"x")
    with bus.consumer(g, [t, f"{t}-2"], max_attempts=1) as consumer:
        for _ in range(2):
            for message in consumer.receive(1, wait=60.0):
                message.nack(0.0, "spoilt")
        consumer.flush()
    letters = sorted(admin.dead_letters(g), key=lambda letter: letter["topic"])
    assert len(letters) == 2
    (gone,) = admin.delete_topic(t, force=True)
    assert gone["dead_letters"] == 1
    assert [code.name for code in admin.settle_dead_letters(g, letters, "discard")] == ["NOT_FOUND", "OK"]
    assert list(admin.dead_letters(g)) == []
