"""``escrow://a,b`` with one of the two killed, or silent: whatever can go on goes on, and says who is missing."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from load import QUICK, Broker, eventually
from ticks import within

import escrowmq as mq
import forked
from escrowmq import outbox
from escrowmq.client.links.router import broker_of
from escrowmq.errors import Code, Misuse, Overloaded
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import trans_driven
from escrowmq.outbox.targets.opening import open_target

TIMEOUT = 120.0
"""Seconds of a call."""
LEASE = 300.0
"""Seconds, where nothing is to come twice: a test that stands still does not lose what it has received."""
SOON = 60.0
"""Seconds that nothing takes that does not wait for the broker that is away, until its time is over."""
KEYS = [next(key for key in map(str, range(99)) if broker_of(key, 2) == number) for number in (0, 1)]
"""A key of each broker."""


class Pair:
    """Two brokers, of which the second comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = (Broker(folder / name, **QUICK).start() for name in "ab")
        self.url = f"{self.a.url},{self.b.url.removeprefix('escrow://')}"
        self.state = "there"

    def be(self, state: str) -> None:
        """``there``, ``killed`` or ``silent``."""
        if state == self.state:
            return
        if self.state == "killed":
            self.b.start()
        elif self.state == "silent":
            self.b.send_signal(SIGCONT)
        if state == "killed":
            self.b.kill()
        elif state == "silent":
            self.b.pause()
        self.state = state

    def close(self) -> None:
        self.be("there")
        for broker in (self.a, self.b):
            broker.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


@pytest.fixture(params=["killed", "silent"])
def away(request: pytest.FixtureRequest, pair: Pair) -> str:
    """The way in which the second broker is not there."""
    pair.be("there")
    return str(request.param)


def mostly(way: str) -> pytest.MarkDecorator:
    """Away in this way; in the other one only in the long form."""
    other = {"killed": "silent", "silent": "killed"}[way]
    ways = [way, pytest.param(other, marks=pytest.mark.long)]
    return pytest.mark.parametrize("away", ways, indirect=True)


@pytest.fixture
def killed(pair: Pair) -> Pair:
    pair.be("killed")
    return pair


def missing_of(bus: mq.Bus) -> list[str]:
    return [one["broker"] for one in bus.missing()]


def stored(bus: mq.Bus, topic: str) -> list[bytes]:
    return sorted(bus.admin.read(topic).read_all()["message_id"].to_pylist())


def refused(problem: pytest.ExceptionInfo[Overloaded], pair: Pair) -> None:
    assert problem.value.code is Code.BROKER_AWAY
    assert pair.b.url in problem.value.message


# Producers


@pytest.mark.invariant("I9")
def test_blocking_sends_and_transactions_without_a_key_go_on_and_by_id_nothing_is_lost_or_doubled(
    pair: Pair, away: str
) -> None:
    topic, done, stop = f"free-{away}", list[bytes](), threading.Event()
    slowest = [0.0]
    with mq.connect(pair.url) as bus:
        producer = bus.producer("shop", timeout=TIMEOUT, checker=lambda check: mq.UNKNOWN)
        plain = bus.producer("bulletin", timeout=TIMEOUT)
        lock = threading.Lock()

        def work() -> None:
            while not stop.is_set():
                began = time.monotonic()
                ids = [plain.send(topic, b"x").message_id]
                with producer.transaction() as txn:
                    ids += [txn.send(topic, b"y").message_id, txn.send(topic, b"z", key=KEYS[1]).message_id]
                with lock:
                    done.extend(ids)
                    slowest[0] = max(slowest[0], time.monotonic() - began)

        threads = [threading.Thread(target=quietly(work), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually("load", lambda: len(done) > 60)
        pair.be(away)
        eventually("it is noticed", lambda: missing_of(bus) == [pair.b.url])
        before = len(done)
        for _ in range(20):  # while the others may wait for what the second broker perhaps has
            with within(SOON):
                done.append(plain.send(topic, b"x").message_id)
                with producer.transaction() as txn:
                    done.append(txn.send(topic, b"y").message_id)
        assert len(done) >= before + 40
        pair.be("there")
        eventually("it is noticed", lambda: not bus.missing())
        before = len(done)
        eventually("load", lambda: len(done) > before + 60)
        stop.set()
        for thread in threads:
            thread.join()
        found = stored(bus, topic)
        assert len(found) == len(set(found))
        assert set(done) <= set(found)


def quietly(work: Any) -> Any:
    """Ends where a transaction's own broker went away: its program would begin anew."""

    def run() -> None:
        while True:
            try:
                return work()
            except mq.EscrowError as problem:
                if problem.code not in (Code.BROKER_AWAY, Code.TIMED_OUT, Code.DISCONNECTED):
                    raise

    return run


def test_a_broker_that_falls_silent_holds_nobody_longer_than_the_timeout(pair: Pair) -> None:
    pair.be("there")
    with mq.connect(pair.url) as bus:
        for number, met in enumerate((True, False)):
            producer = bus.producer(f"short-{number}", timeout=1.0)
            send = lambda key=None: code_of(lambda: producer.send("short", b"x", key=key))  # noqa: E731
            if met:
                for key in KEYS:
                    eventually("it is met", lambda: send(key) is Code.OK)
            pair.be("silent")
            codes = []
            while len(codes) < 8 or codes.count(Code.OK) < 4:  # the other one may be slow, too
                with within(5.0):
                    codes.append(send())
                assert codes[-1] in (Code.OK, Code.TIMED_OUT, Code.BROKER_AWAY)
            eventually("it is noticed", lambda: noticed(bus, pair))
            eventually("all go to the other", lambda: {send() for _ in range(4)} == {Code.OK})
            pair.be("there")
            eventually("it is back", lambda: not bus.missing())


def code_of(act: Any) -> Code:
    try:
        act()
    except mq.EscrowError as problem:
        return problem.code
    return Code.OK


@pytest.mark.invariant("I19")
@mostly("silent")
def test_a_keyed_send_fails_at_once_or_waits_by_choice(pair: Pair, away: str) -> None:
    topic = f"keyed-{away}"
    with mq.connect(pair.url) as bus:
        producer = bus.producer("keyed", timeout=TIMEOUT)
        patient = bus.producer("patient", timeout=TIMEOUT, absent="wait")
        for one in (producer, patient):
            for key in KEYS:
                one.send(topic, b"before", key=key)
        pair.be(away)
        bus.missing()
        eventually("it is noticed", lambda: noticed(bus, pair))
        for _ in range(3):
            with within(SOON), pytest.raises(Overloaded) as problem:
                producer.send(topic, b"lost", key=KEYS[1])
            refused(problem, pair)
            with within(SOON), pytest.raises(Overloaded):
                producer.send(topic, b"lost", message_id=own_id())
        assert producer.send(topic, b"there", key=KEYS[0]).offset is not None
        receipts: list[mq.Receipt] = []
        waits = threading.Thread(target=lambda: receipts.append(patient.send(topic, b"later", key=KEYS[1])))
        waits.start()
        patient.send(topic, b"free")  # is not held up by it
        pair.be("there")
        waits.join()
        assert len(receipts) == 1
        bodies = bus.admin.read(topic).read_all()["body"].to_pylist()
        assert sorted(bodies) == sorted([b"before"] * 4 + [b"there", b"later", b"free"])


def own_id() -> str:
    """An id of the caller's that belongs to the second broker."""
    from escrowmq.model import message_id

    return next(one for one in map(str, range(99)) if broker_of(message_id(one).hex(), 2) == 1)


def noticed(bus: mq.Bus, pair: Pair) -> bool:
    bus.router.presence.suspect(1)
    return missing_of(bus) == [pair.b.url]


@pytest.mark.invariant("I4")
def test_a_transaction_stays_where_it_began(pair: Pair) -> None:
    pair.be("there")
    with mq.connect(pair.url) as bus:
        producer = bus.producer("stays", timeout=TIMEOUT, checker=lambda check: mq.UNKNOWN)
        ours, theirs = (producer.prepare("stays", b"1", key=key).transaction_id for key in KEYS)
        assert ours is not None
        assert theirs is not None
        pair.be("killed")
        eventually("it is noticed", lambda: noticed(bus, pair))
        with within(SOON), pytest.raises(Overloaded) as problem:
            producer.commit(theirs)
        refused(problem, pair)
        with within(SOON), pytest.raises(Overloaded) as problem:
            producer.prepare("stays", b"2", transaction_id=theirs)
        refused(problem, pair)
        with within(SOON), pytest.raises(Overloaded) as problem:
            bus.admin.commit(theirs)
        refused(problem, pair)
        results = producer.end_batch([ours, theirs], mq.COMMIT)
        assert results.codes.tolist() == [Code.COMMITTED, Code.BROKER_AWAY]
        pair.be("there")
        eventually("it is back", lambda: not bus.missing())
        assert producer.commit(theirs) is Code.COMMITTED
        assert sorted(bus.admin.read("stays").read_all()["body"].to_pylist()) == [b"1", b"1"]


async def test_async_sends_transactions_and_consumers_go_on(pair: Pair) -> None:
    pair.be("killed")
    async with await mq.aconnect(pair.url) as bus:
        producer = bus.producer("async", timeout=TIMEOUT, checker=lambda check: mq.UNKNOWN)
        plain = bus.producer("async-plain", timeout=TIMEOUT)
        async with asyncio.timeout(SOON):
            receipts = await asyncio.gather(*(plain.send("async", b"%d" % n) for n in range(50)))
        assert len({receipt.message_id for receipt in receipts}) == 50
        async with producer.transaction() as txn:
            await txn.send("async", b"50")
        eventually("it is noticed", lambda: noticed(bus, pair))  # type: ignore[arg-type]
        with pytest.raises(Overloaded) as problem:
            await plain.send("async", b"", key=KEYS[1])
        refused(problem, pair)
        consumer = await bus.consumer("async", "async", timeout=TIMEOUT, lease=LEASE)
        assert [one["broker"] for one in consumer.missing] == [pair.b.url]
        received = 0
        while received < 51:
            received += len(await consumer.receive(100, wait=1.0))
        assert received == 51
        await consumer.close()
        consumer = await bus.consumer("async-2", "async", timeout=TIMEOUT, lease=LEASE)
        came: list[bytes] = []

        async def consume() -> None:
            async for message in consumer:
                came.append(message.body)
                await message.ack()
                if len(came) == 52:
                    return

        async with asyncio.timeout(TIMEOUT), asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            await asyncio.to_thread(pair.be, "there")
            await asyncio.to_thread(eventually, "it joins", lambda: not consumer.missing)
            await plain.send("async", b"late", key=KEYS[1])
        assert sorted(came) == sorted([*(b"%d" % n for n in range(51)), b"late"])


async def test_async_under_load_loses_and_doubles_nothing_by_id(pair: Pair) -> None:
    pair.be("there")
    done: list[bytes] = []
    came: set[bytes] = set()
    stop = asyncio.Event()
    async with await mq.aconnect(pair.url) as bus:
        producer = bus.producer("async-load", timeout=TIMEOUT, checker=lambda check: mq.UNKNOWN)
        plain = bus.producer("async-load-plain", timeout=TIMEOUT)
        await plain.send("async-load", b"")  # the topic is there
        consumer = await bus.consumer("async-load", "async-load")

        async def send() -> None:
            while not stop.is_set():
                try:
                    done.append((await plain.send("async-load", b"x")).message_id)
                    async with producer.transaction() as txn:
                        first = await txn.send("async-load", b"y")
                    done.append(first.message_id)
                except mq.EscrowError as problem:  # a transaction's own broker went away
                    if problem.code not in (Code.BROKER_AWAY, Code.TIMED_OUT, Code.DISCONNECTED):
                        raise

        async def consume() -> None:
            async for message in consumer:
                came.add(message.message_id)
                await message.ack()

        async def until(what: str, count: int) -> None:
            await asyncio.to_thread(eventually, what, lambda: len(done) > count)

        async with asyncio.timeout(2 * TIMEOUT), asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(consume())
            sending = [tasks.create_task(send()) for _ in range(8)]
            await until("load", 60)
            await asyncio.to_thread(pair.be, "killed")
            await until("it goes on", len(done) + 60)
            await asyncio.to_thread(eventually, "it is named", lambda: consumer.missing)
            await until("it goes on", len(done) + 60)
            await asyncio.to_thread(pair.be, "there")
            await asyncio.to_thread(eventually, "it is back", lambda: not consumer.missing)
            await until("load", len(done) + 60)
            stop.set()
            await asyncio.gather(*sending)
            await asyncio.to_thread(eventually, "all is consumed", lambda: came >= set(done))
            consuming.cancel()
        table = await bus.admin.read("async-load")
        found = (await asyncio.to_thread(table.read_all))["message_id"].to_pylist()
        assert len(found) == len(set(found))
        assert set(done) <= set(found)


@mostly("killed")
def test_batches_give_each_row_its_result(pair: Pair, away: str) -> None:
    topic = f"batches-{away}"
    with mq.connect(pair.url) as bus:
        producer = bus.producer("batches", timeout=TIMEOUT)
        patient = bus.producer("patient", timeout=TIMEOUT, absent="wait")
        half = bus.producer("halves", timeout=TIMEOUT, unasked=True)
        keys = [KEYS[n % 2] if n % 3 else None for n in range(30)]
        whole = pa.table({"topic": [topic] * 30, "body": [b"x"] * 30, "key": pa.array(keys, pa.utf8())})
        assert producer.send_batch(whole).ok
        pair.be(away)
        eventually("it is noticed", lambda: noticed(bus, pair))
        with within(SOON):
            receipts = producer.send_batch(whole)
        expected = [Code.BROKER_AWAY if key == KEYS[1] else Code.OK for key in keys]
        assert receipts.codes.tolist() == expected
        with pytest.raises(Overloaded):
            producer.send_batch([mq.Message(topic, b"", key=KEYS[1])])
        prepared = half.prepare_batch(whole)
        assert prepared.codes.tolist() == expected
        assert half.end_batch(prepared.transactions.filter(pa.array(prepared.codes == 0)), mq.COMMIT).ok
        waits: list[Any] = []
        thread = threading.Thread(target=lambda: waits.append(patient.send_batch(whole)))
        thread.start()
        pair.be("there")
        thread.join()
        assert waits[0].ok
        found = stored(bus, topic)
        assert len(found) == len(set(found)) == 30 + 2 * expected.count(Code.OK) + 30


@pytest.mark.invariant("I9")
def test_an_id_of_the_callers_in_a_batch_goes_to_one_broker_for_ever(pair: Pair) -> None:
    """Sent again in another batch, or alone, it finds its first copy."""
    pair.be("there")
    with mq.connect(pair.url) as bus:
        producer = bus.producer("own", timeout=TIMEOUT)
        messages = [mq.Message("own", b"x", message_id=f"own {n}") for n in range(20)]
        for _ in range(2):
            assert producer.send_batch(messages).ok
            producer.send("own", b"another")  # the rotation moves on
        for message in messages:
            producer.send(message)
        assert len(stored(bus, "own")) == 20 + 2


# Consumers and readers


def next_of(consumer: mq.Consumer) -> list[bytes]:
    """What comes next. One call waits for every broker that is there, so it does not wait for long."""
    while not (found := consumer.receive(10, wait=0.5)):
        pass
    return [message.body for message in found]


@pytest.mark.invariant("I23")
@mostly("silent")
def test_a_consumer_made_while_one_is_away_joins_it_when_it_comes(pair: Pair, away: str) -> None:
    topic = f"consumed-{away}"
    with mq.connect(pair.url) as bus:
        for key in KEYS:
            bus.producer("filler").send(topic, key.encode(), key=key)
    pair.be(away)
    with mq.connect(pair.url) as bus:
        with within(SOON):
            consumer = bus.consumer(f"cart-{away}", topic, timeout=TIMEOUT, lease=LEASE)
            held = bus.consumer(f"held-{away}", topic, timeout=TIMEOUT, instance="one", in_doubt="hold")
        assert [one["broker"] for one in consumer.missing] == [pair.b.url]
        with within(SOON):
            assert next_of(held) == [KEYS[0].encode()]
        messages = consumer.messages()
        with within(SOON):
            first = next(messages)
        assert first.body == KEYS[0].encode()
        first.ack()
        pair.be("there")
        second = next(messages)
        assert second.body == KEYS[1].encode()
        second.ack()
        assert consumer.flush() == 0
        assert not consumer.missing
        eventually("it joins, too", lambda: not held.missing)
        assert next_of(held) == [KEYS[1].encode()]


@pytest.mark.invariant("I23")
@mostly("killed")
def test_a_consumer_whose_broker_dies_receives_from_the_other(pair: Pair, away: str) -> None:
    topic = f"goes-on-{away}"
    pair.be("there")
    with mq.connect(pair.url) as bus:
        producer = bus.producer("goes-on", timeout=TIMEOUT)
        consumer = bus.consumer(f"goes-on-{away}", topic, timeout=TIMEOUT, lease=LEASE)
        for key in KEYS:
            producer.send(topic, b"1", key=key)
        came = consumer.messages()
        for _ in KEYS:
            next(came).ack()
        consumer.flush()
        pair.be(away)
        producer.send(topic, b"2", key=KEYS[0])
        with within(SOON):
            second = next(came)
        assert second.body == b"2"
        second.ack()
        with within(SOON):
            assert consumer.receive(10, wait=0.1) == []
        eventually("it is named", lambda: [one["broker"] for one in consumer.missing] == [pair.b.url])
        pair.be("there")
        eventually("it is back", lambda: not consumer.missing)
        producer.send(topic, b"3", key=KEYS[1])
        assert next(came).body == b"3"


@mostly("silent")
def test_a_reader_reads_the_living_and_then_the_other(pair: Pair, away: str) -> None:
    topic = f"read-{away}"
    with mq.connect(pair.url) as bus:
        for key in KEYS:
            bus.producer("filler").send(topic, key.encode(), key=key)
    pair.be(away)
    with mq.connect(pair.url) as bus:
        with within(SOON):
            reader = bus.reader(topic, timeout=TIMEOUT)
            bodies: list[bytes] = []
            while not bodies:
                bodies += [message.body for batch in reader.batches(idle_timeout=0) for message in batch]
        assert bodies == [KEYS[0].encode()]
        assert [one["broker"] for one in reader.missing] == [pair.b.url]
        with within(SOON):
            assert list(reader.batches(idle_timeout=0.3)) == []
        pair.be("there")
        batch = next(reader.batches())
        assert [message.body for message in batch] == [KEYS[1].encode()]
        assert not reader.missing


# Asking


@pytest.mark.invariant("I41")
@mostly("silent")
def test_listings_and_look_ups_answer_for_the_living_and_name_who_is_missing(pair: Pair, away: str) -> None:
    topic = f"listed-{away}"
    with mq.connect(pair.url) as bus:
        producer = bus.producer("listed", checker=lambda check: mq.UNKNOWN)
        for key in KEYS:
            producer.prepare(topic, b"", key=key)
        with bus.consumer("listing", topic) as consumer:
            assert consumer.receive(wait=0.0) == []
        pair.be(away)
        admin = bus.admin
        for ask in (
            admin.topics,
            admin.groups,
            admin.producers,
            admin.writers,
            admin.stats,
            admin.hello,
            admin.health,
            lambda: admin.transactions("open", "listed"),
            lambda: admin.offsets(topic),
            lambda: admin.lookup(key=KEYS[0], topic=topic),
            lambda: admin.create_topic(f"made-{away}", may_exist=True),
        ):
            with within(SOON):
                rows = ask()  # type: ignore[operator]
            assert [one["broker"] for one in rows.missing] == [pair.b.url]
            assert len(rows) or ask in (admin.writers,)
        assert not admin.lookup(key=KEYS[1], topic=topic)
        assert [row["status"] for row in admin.health()] == ["ok", "unreachable"]
        with within(SOON), pytest.raises(Overloaded) as problem:
            admin.read(topic)  # never gives fewer rows without a word
        refused(problem, pair)
        with within(SOON), pytest.raises(Overloaded) as problem:
            admin.offsets("nowhere")
        refused(problem, pair)
        pair.be("there")
        eventually("it is back", lambda: not bus.missing())
        assert not admin.topics().missing
        assert len(admin.lookup(key=KEYS[1], topic=topic)) == 1


def test_commands_list_the_living_and_have_an_exit_code_for_who_is_missing(killed: Pair) -> None:
    with mq.connect(killed.a.url) as bus:
        bus.admin.create_topic("typed", 1, may_exist=True)
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "escrowmq", "topics", "list", "-u", killed.url, *flags]
        result = forked.run(command)
        assert result.returncode == 9
        assert "typed" in result.stdout
        assert killed.b.url in result.stderr
    assert "typed" in {topic["name"] for topic in json.loads(result.stdout)}
    assert [one["broker"] for one in json.loads(result.stderr)["missing"]] == [killed.b.url]


def test_tail_shows_the_living_and_names_who_is_missing(killed: Pair) -> None:
    with mq.connect(killed.a.url) as bus:
        bus.producer("filler").send("tailed", b"there")
    command = [sys.executable, "-m", "escrowmq", "tail", "tailed", "-u", killed.url]
    result = forked.run(command)
    assert (result.returncode, "there" in result.stdout) == (9, True)
    assert killed.b.url in result.stderr


# The database's side


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 120.0})  # for SQLite's lock
    outbox.migrate(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE done (id VARCHAR(32))"))
    yield engine
    engine.dispose()


def business(name: str) -> Any:
    return lambda session: session.execute(sa.text("INSERT INTO done VALUES (:id)"), {"id": name})


def done(engine: sa.Engine) -> list[str]:
    with engine.begin() as connection:
        return sorted(connection.scalars(sa.text("SELECT id FROM done")))


def stages(engine: sa.Engine) -> list[Stage]:
    with engine.begin() as connection:
        return [Stage(state) for state in connection.scalars(sa.select(trans_driven.c.state))]


@pytest.mark.invariant("I37")
@pytest.mark.parametrize("merged", [False, True], ids=["stored first", "merged"])
@pytest.mark.parametrize("met", [False, True], ids=["never met", "met"])
def test_a_driven_message_for_an_absent_broker_does_its_business_and_goes_on_later(
    pair: Pair, shop: sa.Engine, merged: bool, met: bool
) -> None:
    topic = f"driven-{merged}-{met}"
    pair.be("there" if met else "killed")
    with mq.connect(pair.url) as bus, outbox.Driven(bus, shop, topic, merged=merged, timeout=TIMEOUT) as driven:
        if met:
            for key in KEYS:
                assert driven.send(mq.Message(topic, b"0", key=key), business("0")).done
            pair.be("killed")
            eventually("it is noticed", lambda: noticed(bus, pair))
        with within(SOON):
            result = driven.send(mq.Message(topic, b"1", key=KEYS[1]), business("1"))
        assert result.code is Code.BROKER_AWAY
        assert driven.send(mq.Message(topic, b"2", key=KEYS[0]), business("2")).done
        both = driven.run_batch([mq.Message(topic, b"3", key=key) for key in KEYS], business("3"))
        assert [one.code for one in both] == [Code.COMMITTED, Code.BROKER_AWAY]
        with pytest.raises(ZeroDivisionError):
            driven.send(mq.Message(topic, b"4", key=KEYS[1]), lambda session: 1 / 0)
        assert done(shop) == (["0", "0"] if met else []) + ["1", "2", "3"]
        assert stages(shop) == [Stage.DECIDED] * 2
        with within(SOON):
            assert driven.redrive().left == 2
        pair.be("there")
        eventually("it is back", lambda: not bus.missing())
        assert driven.redrive().committed == 2
        assert stages(shop) == []
        bodies = sorted(bus.admin.read(topic).read_all()["body"].to_pylist())
        assert bodies == ([b"0", b"0"] if met else []) + [b"1", b"2", b"3", b"3"]
        assert not bus.admin.transactions("open", driven.producer.group)


@pytest.mark.invariant("I37")
def test_compensating_and_both_reach_leave_their_rows_and_go_on_later(killed: Pair, shop: sa.Engine) -> None:
    with mq.connect(killed.url) as bus:
        producer = bus.producer("plain-modes", timeout=TIMEOUT)
        way = outbox.Compensating(producer, shop, "comp")
        with within(SOON):
            codes = way.send([mq.Message("comp", key.encode(), key=key) for key in KEYS], business("comp"))
        assert codes.tolist() == [Code.OK, Code.BROKER_AWAY]
        both = outbox.BothReachProducer(producer, shop, "both")
        results = [both.send(mq.Message("both", b"%d" % n), business(f"both {n}")) for n in range(8)]
        left = sum(not one.done for one in results)
        assert 0 < left < 8
        assert done(shop) == sorted(["comp", *(f"both {n}" for n in range(8))])
        assert sorted(stages(shop)) == [Stage.TO_SEND] + [Stage.DECIDED] * left
        killed.be("there")
        eventually("it is back", lambda: not bus.missing())
        assert way.resend() == 0
        assert both.redrive().committed == left
        assert stages(shop) == []
        assert len(stored(bus, "comp")) == 2
        effects: list[bytes] = []
        consumer = outbox.BothReachConsumer(shop, "reach", lambda _, messages: effects.extend(m.body for m in messages))
        done_with = 0
        while done_with < 8:
            done_with += consumer.consume(bus, "both", idle_timeout=1.0).effects
        assert sorted(effects) == [b"%d" % n for n in range(8)]


def test_a_consumer_with_its_own_offsets_claims_the_absent_brokers_queues_later(pair: Pair, shop: sa.Engine) -> None:
    pair.be("there")
    with mq.connect(pair.url) as bus:
        for key in KEYS:
            bus.producer("filler").send("offsets", key.encode(), key=key)
    pair.be("killed")
    came: list[bytes] = []
    effect = lambda _, messages: came.extend(message.body for message in messages)  # noqa: E731
    with mq.connect(pair.url) as bus, outbox.OffsetConsumer(bus, shop, "cart", "offsets", owner="one") as consumer:
        with within(SOON):
            while not came:
                consumer.run(effect, idle_timeout=0.5)
        assert came == [KEYS[0].encode()]
        assert [one["broker"] for one in consumer.missing] == [pair.b.url]
        pair.be("there")
        eventually("it is back", lambda: not bus.missing())
        while len(came) < 2:
            consumer.run(effect, idle_timeout=0.5)
        assert came == [KEYS[0].encode(), KEYS[1].encode()]
        assert not consumer.missing


def test_a_consumer_with_its_own_offsets_claims_queues_of_a_broker_that_had_no_such_topic(
    pair: Pair, shop: sa.Engine
) -> None:
    pair.be("there")
    came: list[bytes] = []
    enough = threading.Event()

    def effect(_: Any, messages: Any) -> None:
        came.extend(message.body for message in messages)
        enough.set()

    with mq.connect(pair.url) as bus:
        producer = bus.producer("filler")
        producer.send("offsets-late", b"first", key=KEYS[0])
        with outbox.OffsetConsumer(bus, shop, "cart", "offsets-late", owner="one") as consumer:
            consumer.run(effect, stop=enough)
            assert came == [b"first"]
            enough.clear()
            producer.send("offsets-late", b"second", key=KEYS[1])
            consumer.run(effect, stop=enough)
            assert came == [b"first", b"second"]
            assert len({slot.shard for slot in consumer.positions}) == 2


@pytest.mark.invariant("I38")
def test_the_relay_sends_what_belongs_to_the_living_and_the_rest_later(killed: Pair, shop: sa.Engine) -> None:
    with shop.begin() as connection:
        for n in range(10):
            outbox.send_tx(connection, "relayed", b"%d" % n, key=KEYS[n % 2])
    with (
        Relay(shop, open_target(killed.url, timeout=2.0)),
        mq.connect(killed.a.url) as there,
    ):
        eventually("the living have theirs", lambda: len(bodies_of(there, "relayed")) == 5)
        killed.be("there")
        with mq.connect(killed.b.url) as back:
            eventually("the other has its own, too", lambda: len(bodies_of(back, "relayed")) == 5)
    with mq.connect(killed.url) as bus:
        for key, start in zip(KEYS, (0, 1), strict=True):
            rows = bus.admin.read("relayed", key=key).read_all()
            assert rows["body"].to_pylist() == [b"%d" % n for n in range(start, 10, 2)]


def bodies_of(bus: mq.Bus, topic: str) -> list[bytes]:
    try:
        found: list[bytes] = bus.admin.read(topic).read_all()["body"].to_pylist()
    except mq.Rejected:
        return []
    return found


# Over HTTP


@mostly("killed")
def test_the_gateway_goes_on_with_the_living(pair: Pair, away: str) -> None:
    import httpx

    from escrowmq.connecting import links
    from escrowmq.gateway import GatewaySettings, beside

    topic = f"http-{away}"
    pair.be(away)
    settings = GatewaySettings(timeout=TIMEOUT)
    with (
        beside(lambda _: links(pair.url, {}), listen="127.0.0.1:0", settings=settings) as ready,
        httpx.Client(base_url=f"{ready['http']}/v1", timeout=2 * TIMEOUT) as http,
    ):
        with within(SOON):
            for _ in range(4):
                assert http.post(f"/topics/{topic}/messages", json={"text": "x"}).status_code == 200
        eventually("it is noticed", lambda: keyed(http, topic).status_code == 503)
        with within(SOON):
            answer = keyed(http, topic)
        assert answer.json()["name"] == "BROKER_AWAY"
        with within(SOON):
            receive = {"topics": [topic], "max_messages": 10, "wait": 1.0, "lease": LEASE}
            got: list[Any] = []
            while len(got) < 4:
                got += http.post(f"/consumers/http-{away}/receive", json=receive).json()["messages"]
            assert len(got) == 4
            handles = {"handles": [one["handle"] for one in got]}
            assert http.post(f"/consumers/http-{away}/ack", json=handles).status_code == 200
            assert http.post(f"/consumers/http-{away}/receive", json=receive).json()["messages"] == []
        with within(SOON):
            topics = http.get("/topics")
            assert topic in {one["name"] for one in topics.json()["topics"]}
            assert [one["broker"] for one in topics.json()["missing"]] == [pair.b.url]
            assert [one["broker"] for one in http.get("/lookup", params={"key": "k"}).json()["missing"]] == [pair.b.url]
        pair.be("there")
        eventually("it is back", lambda: keyed(http, topic).status_code == 200)
        eventually(
            "it is received, too",
            lambda: http.post(f"/consumers/http-{away}/receive", json=receive).json()["messages"],
        )


def keyed(http: Any, topic: str) -> Any:
    return http.post(f"/topics/{topic}/messages", json={"text": "k", "key": KEYS[1]})


# What was wrong from the start


def test_nobody_there_is_a_clear_error_after_the_timeout_and_it_works_when_they_come(tmp_path: Path) -> None:
    with Broker(tmp_path / "a", **QUICK) as one, Broker(tmp_path / "b", **QUICK) as other:
        url = f"{one.url},{other.url.removeprefix('escrow://')}"
        one.kill()
        other.kill()
        with mq.connect(url) as bus:
            producer = bus.producer("late", timeout=1.0)
            for ask in (lambda: producer.send("late", b""), lambda: bus.consumer("late", "late", timeout=1.0)):
                with within(10.0), pytest.raises(mq.EscrowError) as problem:
                    ask()
                assert one.url in str(problem.value)
                assert other.url in str(problem.value)
            other.start()
            eventually("one is there", lambda: sent(producer))
            one.start()
            eventually("both are there", lambda: not bus.missing())
            for key in KEYS:
                eventually("each takes messages", lambda key=key: sent(producer, key))


def sent(producer: mq.Producer, key: str | None = None) -> bool:
    try:
        producer.send("late", b"", key=key)
    except mq.EscrowError as problem:
        if problem.code not in (Code.BROKER_AWAY, Code.TIMED_OUT):
            raise
        return False
    return True


def test_a_name_that_is_no_broker_and_one_broker_twice(pair: Pair) -> None:
    pair.be("there")
    with mq.connect(f"{pair.a.url},no-such-host.invalid:7700") as bus, within(SOON):
        bus.producer("names", timeout=TIMEOUT).send("names", b"")
        assert [one["broker"] for one in bus.admin.topics().missing] == ["escrow://no-such-host.invalid:7700"]
    port = pair.a.url.rpartition(":")[2]
    with mq.connect(f"{pair.a.url},localhost:{port}") as bus:
        with pytest.raises(Misuse) as problem:
            bus.producer("twice").send("twice", b"")
        assert problem.value.code is Code.BAD_URL
        assert "the same broker" in problem.value.message


def test_another_folder_at_the_same_address_is_not_taken_for_the_broker(tmp_path: Path, pair: Pair) -> None:
    pair.be("there")
    with Broker(tmp_path / "one", **QUICK) as one, mq.connect(f"{pair.a.url},{one.url[9:]}") as bus:
        producer = bus.producer("folder", timeout=TIMEOUT)
        for key in KEYS:
            producer.send("folder", b"1", key=key)
        one.kill()
        one.folder = tmp_path / "another"
        one.start()
        eventually("it is not it", lambda: missing_of(bus) == [one.url] or noticed_other(bus))
        with pytest.raises(Overloaded) as problem:
            producer.send("folder", b"2", key=KEYS[1])
        assert "another data folder" in problem.value.message
        producer.send("folder", b"2", key=KEYS[0])
        one.kill()
        one.folder = tmp_path / "one"
        one.start()
        eventually("it is it", lambda: not bus.missing())
        producer.send("folder", b"3", key=KEYS[1])


def noticed_other(bus: mq.Bus) -> bool:
    bus.router.presence.suspect(1)
    return False


@pytest.mark.invariant("I9")
def test_what_may_be_stored_at_a_broker_that_is_gone_goes_elsewhere_only_by_choice(pair: Pair) -> None:
    """The doubled message has one id, by which an idempotent consumer knows it."""
    pair.be("there")
    with mq.connect(pair.url) as bus:
        producer = bus.producer("repeat", timeout=TIMEOUT, failover="repeat")
        producer.send("repeat", b"before")
        # A slow machine: who is not met yet gets nothing, and a broker that falls silent while nobody waits for it is
        # not missed.
        eventually("both are met", lambda: all(map(bus.router.presence.there, range(2))))
        for _ in range(3):
            producer.send("repeat", b"before")
        pair.be("silent")
        ids: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: ids.append(producer.send("repeat", b"x").message_id)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        eventually("it is noticed", lambda: missing_of(bus) == [pair.b.url])
        pair.be("killed")  # now the connection is lost, and what it took is not known
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 4
        pair.be("there")
        eventually("it is back", lambda: not bus.missing())
        assert set(ids) <= set(stored(bus, "repeat"))
        assert len(set(stored(bus, "repeat"))) == 8
