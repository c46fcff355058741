"""Programs for the test of clients that close while their broker dies: ``broker PORT FOLDER SEED``, or ``KIND URL
FOLDER SECONDS SEED``.

The broker is a process that is forked, serves for a moment and is killed (``kill -9``), again and again: after a while,
or at once when a client wishes it (a byte in the FIFO ``FOLDER.kill``); sometimes it stands still before. A client
connects, uses the bus, wishes the broker dead and closes within the same milliseconds, again and again; in the end it
leaves one bus open and exits. It prints how often it closed, how often it came to nobody, and the longest time that
closing took, as it had time itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ticks import Ticks

import escrowmq as mq
from escrowmq.client.admin import Admin
from escrowmq.errors import EscrowError

TOPIC = "orders"
TIMEOUT = 1.0
"""Seconds per call."""
KILLS_PER_FOLDER = 30
"""Then the broker begins with an empty folder, as another shard."""


# The broker


def serve_and_die(port: int, folder: Path, seed: int) -> None:
    """Until SIGTERM."""
    from escrowmq.broker.serving.serve import serve
    from escrowmq.settings import BrokerSettings

    chance = random.Random(seed)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings = BrokerSettings(transaction_timeout=0.1, check_interval=0.1, retry_backoff=0.05, segment_bytes=1 << 20)
    os.mkfifo(fifo := folder.with_suffix(".kill"))
    wishes = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    kills = 0
    while not stopping.is_set():
        if kills % KILLS_PER_FOLDER == 0:
            shutil.rmtree(folder, ignore_errors=True)
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = serve(folder, listen=f"127.0.0.1:{port}", settings=settings, announce=lambda _: os.write(told, b"!"))
            os._exit(code)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        if not kills:
            print("ready", flush=True)
        select.select([wishes], [], [], chance.uniform(0.1, 1.0))
        if chance.random() < 0.1:
            os.kill(child, signal.SIGSTOP)
            stopping.wait(chance.uniform(0.1, 2.0))
        os.kill(child, signal.SIGKILL)
        with suppress(BlockingIOError):
            os.read(wishes, 1 << 16)
        os.waitpid(child, 0)
        kills += 1
    print(kills, flush=True)


# The clients: each uses a bus until something fails or its time is over, and leaves what it made for ``close``


class Life:
    """How long a client goes on before it closes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._end = time.monotonic() + chance.uniform(0.0, 0.4)

    def goes_on(self) -> bool:
        return time.monotonic() < self._end


def using(use: Callable[[mq.Bus, Life], None]) -> Callable[[str, Path, Life], Callable[[], None]]:
    """A client of the blocking face: connects, and gives what closes it."""

    def client(url: str, folder: Path, life: Life) -> Callable[[], None]:
        bus = mq.connect(url)
        with suppress(EscrowError):
            use(bus, life)
        return bus.close

    return client


def producer(bus: mq.Bus, life: Life) -> None:
    plain = bus.producer("plain", timeout=TIMEOUT)
    while life.goes_on():
        plain.send(TOPIC, b"x" * life.chance.randrange(2000))


def threads(bus: mq.Bus, life: Life) -> None:
    """Callers are still waiting when the bus is closed."""

    def send() -> None:
        with suppress(EscrowError):
            while True:
                plain.send(TOPIC, b"x" * 1000)

    plain = bus.producer("plain", timeout=TIMEOUT)
    for _ in range(4):
        threading.Thread(target=send, daemon=True).start()
    plain.send(TOPIC, b"x")
    while life.goes_on():
        time.sleep(0.01)


def consumer(bus: mq.Bus, life: Life) -> None:
    producer(bus, Life(life.chance))
    reading = bus.consumer("cart", TOPIC, timeout=TIMEOUT)
    while life.goes_on():
        for message in reading.receive(10, wait=0.05):
            message.ack()


def reader(bus: mq.Bus, life: Life) -> None:
    """It stops in the middle of a stream."""
    bus.producer("plain", timeout=TIMEOUT).send_batch([mq.Message(TOPIC, b"x" * 10_000) for _ in range(100)])
    reading = bus.reader(TOPIC, timeout=TIMEOUT)
    while life.goes_on():
        for _ in reading.batches(10, idle_timeout=0.05):
            if not life.goes_on():
                break


def admin(bus: mq.Bus, life: Life) -> None:
    asking = Admin(bus.router, TIMEOUT)
    while life.goes_on():
        asking.topics()
        asking.health()


def checker(bus: mq.Bus, life: Life) -> None:
    """Transactions that only check-back ends, and some that end by themselves."""
    making = bus.producer("shop", timeout=TIMEOUT, checker=lambda check: life.chance.choice(list(mq.Outcome)))
    while life.goes_on():
        receipt = making.prepare(TOPIC, b"x")
        if life.chance.random() < 0.5 and receipt.transaction_id is not None:
            making.commit(receipt.transaction_id)


def awaited(url: str, folder: Path, life: Life) -> Callable[[], None]:
    """A producer with a checker and a consumer on an event loop."""

    async def use() -> mq.AsyncBus:
        bus = await mq.aconnect(url)
        with suppress(EscrowError, TimeoutError):
            making = bus.producer("shop", timeout=TIMEOUT, checker=lambda check: mq.COMMIT)
            reading = await bus.consumer("cart", TOPIC, timeout=TIMEOUT)
            while life.goes_on():
                async with making.transaction() as txn:
                    await txn.send(TOPIC, b"x")
                for message in await reading.receive(10, wait=0.02):
                    await message.ack()
        return bus

    loop = asyncio.new_event_loop()
    bus = loop.run_until_complete(use())

    def close() -> None:
        loop.run_until_complete(bus.close())
        loop.close()

    return close


def relay(url: str, folder: Path, life: Life) -> Callable[[], None]:
    import sqlalchemy as sa

    from escrowmq import outbox
    from escrowmq.outbox.relay.relay import Relay
    from escrowmq.outbox.targets.escrow import EscrowTarget

    engine = sa.create_engine(f"sqlite:///{folder / 'shop.db'}", connect_args={"timeout": 60.0})  # for SQLite's lock
    outbox.migrate(engine)
    target = EscrowTarget(url, timeout=TIMEOUT)
    moving = Relay(engine, target, poll_interval=0.01)
    moving.start()
    while life.goes_on():
        with engine.begin() as connection:
            outbox.send_tx(connection, TOPIC, b"x")

    def close() -> None:
        moving.stop()
        target.close()
        engine.dispose()

    return close


def gateway(url: str, folder: Path, life: Life) -> Callable[[], None]:
    import urllib.error
    import urllib.request

    from escrowmq.connecting import links
    from escrowmq.gateway.limits import GatewaySettings
    from escrowmq.gateway.server import beside

    serving = beside(lambda _: links(url, {}), listen="127.0.0.1:0", settings=GatewaySettings(timeout=TIMEOUT))
    at = serving.__enter__()["http"]
    while life.goes_on():
        for path, body in (("messages", b'{"topic":"orders","text":"x"}'), ("health", None)):
            with suppress(OSError):
                request = urllib.request.Request(f"{at}/v1/{path}", body, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=5).read()
    return lambda: serving.__exit__(None, None, None) and None


def spark_reader(url: str, folder: Path, life: Life) -> Callable[[], None]:
    """What a Python worker of Spark does for one partition; it keeps its links, and stops in the middle."""
    import pyarrow as pa

    from escrowmq.spark import brokers
    from escrowmq.spark.planning import OffsetRange, TopicPartition

    bus = mq.connect(url)
    with suppress(EscrowError):
        making = bus.producer("plain", timeout=TIMEOUT)
        making.send_batch([mq.Message(TOPIC, b"x" * 10_000, queue=0) for _ in range(100)])
        queue = TopicPartition(TOPIC, int(making.place(pa.array(["key"]))[0]), 0, url, 0, 100, 0, 100)
        while life.goes_on():
            for _ in brokers.read(OffsetRange(queue, 0, 100), ["offset", "body"], {}, TIMEOUT):
                if not life.goes_on():
                    break
    bus.close()

    def close() -> None:
        with brokers._lock:
            left = list(brokers._links.values())
            brokers._links.clear()
        for link in left:
            link.close()

    return close


def spark_writer(url: str, folder: Path, life: Life) -> Callable[[], None]:
    """What a Python worker of Spark does with the rows of one task."""
    import pyarrow as pa

    from escrowmq.spark import writing
    from escrowmq.spark.options import write_options

    options = write_options({"url": url, "topic": TOPIC, "timeout": f"{TIMEOUT}"})
    with suppress(EscrowError):
        while life.goes_on():
            rows = pa.RecordBatch.from_pydict({"body": pa.array([b"x" * 100] * 50, pa.binary())})
            writing._prepared(options, "spark.q", "q", iter([rows, rows]))

    def close() -> None:
        with writing._lock:
            left = [brokers.bus for brokers in writing._brokers.values()]
            writing._brokers.clear()
            writing._producers.clear()
        for bus in left:
            bus.close()

    return close


TICKS = Ticks()
CLOSING: list[float] = []
"""Seconds that closing took, each time, as this process had them."""
KINDS: dict[str, Callable[[str, Path, Life], Callable[[], None]]] = {
    **{use.__name__: using(use) for use in (producer, threads, consumer, reader, admin, checker)},
    **{use.__name__: use for use in (awaited, relay, gateway, spark_reader, spark_writer)},
}


def use_and_close(kind: str, url: str, folder: Path, seconds: float, seed: int) -> None:
    """Again and again for ``seconds``; then once without closing. ``folder`` stands beside the broker's."""
    chance = random.Random(seed)
    wishes = os.open(folder.parent / "data.kill", os.O_WRONLY | os.O_NONBLOCK)
    end = time.monotonic() + seconds
    rounds = failed = 0
    while True:
        last = rounds > 0 and time.monotonic() >= end
        try:
            close = KINDS[kind](url, folder, Life(chance))
        except EscrowError:
            failed += 1
        else:
            if last:
                break
            if chance.random() < 0.8:
                os.write(wishes, b"!")
                time.sleep(chance.uniform(0.0, 0.004))
            begun = TICKS.seconds
            close()
            CLOSING.append(TICKS.seconds - begun)
            rounds += 1
    print(f"{rounds} {failed} {max(CLOSING, default=0.0):.1f}", flush=True)


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.disable(logging.ERROR)
    kind, *given = sys.argv[1:]
    if kind == "broker":
        serve_and_die(int(given[0]), Path(given[1]), int(given[2]))
    else:
        TICKS.start()
        use_and_close(kind, given[0], Path(given[1]), float(given[2]), int(given[3]))


if __name__ == "__main__":
    main()
