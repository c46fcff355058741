"""One damaged record among good ones: the good ones go on, the bad one is a dead letter with its place, and is shown as
such.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import islice

import pyarrow as pa
import pytest

import escrowmq as mq
from damaging import FILLER, flip
from escrowmq.errors import Code, Corrupt
from escrowmq.model import message_id

COUNT = 400
BAD = 123
SETTINGS = {"segment_bytes": 1 << 16, "default_queues": 1, "checks_exhausted": "park"}


def body(n: int) -> bytes:
    return b"body-%06d." % n + bytes(90)


@pytest.fixture
def damaged(own: Callable[..., object]) -> Iterator[object]:
    """A broker with 400 messages sent at once, of which one has a flipped bit, in a segment that is sealed and covered
    by a snapshot."""
    broker = own(**SETTINGS)
    with broker.connect() as bus:
        producer = bus.producer("p")
        producer.send_batch(
            [
                mq.Message("t", body(n), key=f"k{n}", tag="odd" if n % 2 else "even", message_id=f"m{n}")
                for n in range(COUNT)
            ]
        ).check()
        bus.admin.create_topic("filler", may_exist=True)
        for _ in range(3):
            producer.send_batch([mq.Message("filler", FILLER) for _ in range(60)]).check()
    broker.stop()
    broker.place = flip(broker.folder, body(BAD)[:11], byte=3)
    broker.start()
    return broker


@pytest.mark.invariant("I2", "I25")
def test_a_default_consumer_gets_all_but_the_damaged_one(damaged):
    segment, _ = damaged.place
    with damaged.connect() as bus:
        with bus.consumer("g", "t") as consumer:
            seen = []
            for message in islice(consumer, COUNT - 1):
                seen.append((message.offset, message.body, message.attempt))
                message.ack()
            assert not list(consumer.messages(idle_timeout=0.5))
        assert seen == [(n, body(n), 1) for n in range(COUNT) if n != BAD]

        (letter,) = bus.admin.dead_letters("g")
        assert (letter["offset"], letter["attempts"], letter["key"]) == (BAD, 0, f"k{BAD}")
        assert letter["cause"].startswith(f"DAMAGED: {segment}, byte ")
        assert letter["cause"].endswith(f"; position {letter['position']}")
        assert letter["damaged"] in letter["cause"]
        (queue,) = bus.admin.groups()[0]["queues"]
        assert (queue["acked"], queue["dead"], queue["leased"], queue["retrying"]) == (COUNT - 1, 1, 0, 0)

        (health,) = bus.admin.health()
        assert (health["status"], health["reason"].split(",")[0]) == ("damaged", segment)
        assert bus.admin.stats()[0]["log_damaged_frames"] == 1

        assert bus.admin.retry_dead_letters("g") == 0
        link = bus.router.links[0]
        item = {"topic": "t", "queue": 0, "offset": BAD}
        answer = link.action("dead_letters.settle", {"group": "g", "act": "retry", "items": [item]}, 60.0)
        assert answer == {"codes": ["DAMAGED"]}
        assert len(bus.admin.dead_letters("g")) == 1
    damaged.restart()
    with damaged.connect() as bus:
        assert bus.admin.health()[0]["status"] == "damaged"  # nobody has read it since
        assert len(bus.admin.dead_letters("g")) == 1
        assert bus.admin.discard_dead_letters("g") == 1
        assert bus.producer("p").send("t", b"after").offset == COUNT


@pytest.mark.invariant("I17")
def test_what_can_be_shown_is_shown_and_the_damaged_one_is_marked(damaged):
    with damaged.connect() as bus:
        columns = ["offset", "key", "body", "damaged"]
        rows = bus.admin.read("t", columns=columns).read_all().to_pylist()
        assert [row["offset"] for row in rows] == list(range(COUNT))
        assert [row for row in rows if row["damaged"]] == [rows[BAD]]
        assert (rows[BAD]["key"], rows[BAD]["body"]) == (f"k{BAD}", None)
        assert rows[BAD - 1]["body"] == body(BAD - 1)
        assert bus.admin.read("t", columns=["key"]).read_all().num_rows == COUNT, "keys are whole"
        tagged = bus.admin.read("t", columns=columns, tags=["odd"]).read_all()
        assert tagged.num_rows == COUNT // 2
        (found,) = bus.admin.read("t", columns=columns, key=f"k{BAD}").read_all().to_pylist()
        assert found["damaged"]
        with pytest.raises((Corrupt, pa.ArrowException), match="DAMAGED"):
            bus.admin.read("t").read_all()  # who does not ask for the marks gets no row without content
        assert bus.admin.read("t", 0, start=BAD + 1).read_all().num_rows == COUNT - 1 - BAD

        (found,) = bus.admin.lookup(key=f"k{BAD}")
        assert (found["message_id"], found["body"], found["offset"]) == (message_id(f"m{BAD}").hex(), None, BAD)
        assert found["damaged"]
        (found,) = bus.admin.lookup(message_id=f"m{BAD - 1}")
        assert (found["body"], found["damaged"]) == (body(BAD - 1), None)


def test_a_reader_hands_it_out_marked(damaged):
    def check(messages):
        assert [message.offset for message in messages] == list(range(COUNT))
        marked = [message for message in messages if message.damaged]
        assert [message.offset for message in marked] == [BAD]
        assert marked[0].key == f"k{BAD}"
        with pytest.raises(Corrupt) as caught:
            _ = marked[0].body
        assert caught.value.code is Code.DAMAGED
        assert messages[BAD + 1].body == body(BAD + 1)

    with damaged.connect() as bus, bus.reader("t") as reader:
        check([message for batch in reader.batches(idle_timeout=0) for message in batch])

    async def awaited():
        async with await damaged.aconnect() as bus, await bus.reader("t") as reader:
            return [message async for batch in reader.batches(idle_timeout=0) for message in batch]

    check(asyncio.run(awaited()))


def test_ordered_groups_and_named_members_pass_over_it(damaged):
    with damaged.connect() as bus:
        for options in ({"ordered": True}, {"in_doubt": "hold", "instance": "one"}, {"tags": "odd"}):
            group = next(iter(options))
            with bus.consumer(group, "t", **options) as consumer:
                seen = []
                for message in islice(consumer, COUNT - 1 if group != "tags" else COUNT // 2 - BAD % 2):
                    seen.append(message.offset)
                    message.ack()
                assert not list(consumer.messages(idle_timeout=0.5))
            assert seen == [n for n in range(COUNT) if n != BAD and (group != "tags" or n % 2)]
            assert [letter["attempts"] for letter in bus.admin.dead_letters(group)] == [0]


@pytest.mark.invariant("I13")
def test_a_damaged_half_message_is_parked_and_its_neighbours_are_asked_about(own, eventually):
    broker = own(**SETTINGS)
    with broker.connect() as bus:
        orders = bus.producer("shop", unasked=True)
        receipts = orders.prepare_batch([mq.Message("t", body(n), key=f"k{n}") for n in range(20)])
        ids = [receipts[n].transaction_id for n in range(20)]
        committed = orders.prepare_batch([mq.Message("t", body(n), key=f"k{n}") for n in range(20, 24)])
        for _ in range(3):
            bus.producer("p").send_batch([mq.Message("filler", FILLER) for _ in range(60)]).check()
    broker.stop()
    flip(broker.folder, body(7)[:11], byte=3)
    flip(broker.folder, body(21)[:11], byte=3)
    broker.start()
    asked: dict[bytes, mq.TransactionId] = {}
    every = threading.Event()

    def checker(check: mq.Check) -> mq.Outcome:
        asked[check.messages[0].body] = check.transaction_id
        if len(asked) == 22:
            every.set()
        return mq.COMMIT

    with broker.connect() as bus, bus.producer("shop", checker=checker):
        assert every.wait(60)
        with bus.consumer("g", "t") as consumer:
            seen = set()
            for message in islice(consumer, 22):
                seen.add(message.body)
                message.ack()
            assert not list(consumer.messages(idle_timeout=0.5))
        assert seen == set(asked) == {body(n) for n in range(24) if n not in (7, 21)}
        damaged = {str(ids[7]), str(committed[1].transaction_id)}
        eventually(lambda: {row["id"] for row in bus.admin.transactions("parked")} == damaged)
        shown = bus.admin.transaction(ids[7])
        assert (shown["state"], shown["messages"][0]["body"], shown["messages"][0]["key"]) == ("parked", None, "k7")
        assert shown["messages"][0]["damaged"]
        assert [event["event"] for event in shown["timeline"]][-1] == "parked"
        half = bus.admin.read("%half", columns=["key", "body", "state", "damaged"]).read_all().to_pylist()
        assert [row["key"] for row in half if row["damaged"]] == ["k7", "k21"]
        assert {row["state"] for row in half if row["damaged"]} == {mq.TransactionState.PARKED}

        bus.admin.commit(ids[7])  # a person may: then it is in its queue, and a dead letter of every group
        with bus.consumer("g", "t") as consumer:
            letters = []
            while not letters:
                assert not list(consumer.messages(idle_timeout=0.5))
                letters = bus.admin.dead_letters("g")
        assert [letter["key"] for letter in letters] == ["k7"]


@pytest.mark.invariant("I9")
def test_a_repeat_of_the_damaged_one_is_no_success(damaged):
    """Nobody can say whether it is the same message; its neighbours are the same, or are not."""
    with damaged.connect() as bus:
        batch = [
            mq.Message("t", body(n), key=f"k{n}", tag="odd" if n % 2 else "even", message_id=f"m{n}")
            for n in range(COUNT)
        ]
        batch[7] = mq.Message("t", b"another", key="k7", tag="odd", message_id="m7")
        codes = bus.producer("p").send_batch(batch).codes.tolist()
        assert {n: Code(code) for n, code in enumerate(codes) if code} == {7: Code.MESSAGE_ID_TAKEN, BAD: Code.DAMAGED}


def test_damage_outside_the_bodies_takes_its_frame_and_no_other(own, eventually):
    """The first message of a queue, and a key: of the one the body is lost, of the other everything of its frame."""
    broker = own(**SETTINGS)
    with broker.connect() as bus:
        producer = bus.producer("p")
        for topic, first in (("first", 0), ("lost", 100), ("lost", 200)):
            numbers = range(first, first + 50)
            producer.send_batch([mq.Message(topic, body(n), key=f"key-{n:06d}", message_id=f"m{n}") for n in numbers])
        for _ in range(3):
            producer.send_batch([mq.Message("filler", FILLER) for _ in range(60)]).check()
    broker.stop()
    flip(broker.folder, body(0)[:11], byte=3)
    flip(broker.folder, b"key-000120", byte=9)
    broker.start()
    columns = ["topic", "queue", "offset", "key", "body", "message_id", "transaction", "damaged"]
    with broker.connect() as bus:
        rows = bus.admin.read("first", columns=columns).read_all().to_pylist()
        assert [row["offset"] for row in rows if row["damaged"]] == [0]
        rows = bus.admin.read("lost", columns=columns).read_all().to_pylist()
        assert [row["offset"] for row in rows] == list(range(100))
        assert [row["offset"] for row in rows if row["damaged"]] == list(range(50))
        assert {(row["topic"], row["queue"]) for row in rows} == {("lost", 0)}
        assert {(row["key"], row["body"], row["message_id"]) for row in rows[:50]} == {(None, None, None)}
        with bus.reader("lost") as reader:
            messages = [message for batch in reader.batches(idle_timeout=0) for message in batch]
        with pytest.raises(Corrupt):
            _ = messages[0].key
        assert (messages[0].topic, messages[0].offset, messages[50].key) == ("lost", 0, "key-000200")
        with bus.consumer("g", ["first", "lost"]) as consumer:
            seen = set()
            for message in islice(consumer, 99):
                seen.add(message.body)
                message.ack()
            letters = eventually(lambda: len(found := bus.admin.dead_letters("g")) == 51 and found)
            assert not list(consumer.messages(idle_timeout=0.5))
        assert seen == {body(n) for n in (*range(1, 50), *range(200, 250))}
        assert {(letter["attempts"], letter["cause"][:8]) for letter in letters} == {(0, "DAMAGED:")}
        shown = bus.admin.read("%dead-letters.g", columns=columns).read_all().to_pylist()
        assert {row["topic"] for row in shown if row["damaged"]} == {"first", "lost"}
        (found,) = bus.admin.lookup(message_id="m110")
        assert (found["topic"], found["offset"], found["body"], bool(found["damaged"])) == ("lost", 10, None, True)
        assert bus.admin.lookup(key="key-000230")[0]["body"] == body(230)
        assert bus.admin.stats()[0]["log_damaged_frames"] == 2
