"""Programs for the test of the ways in which a client can end: ``WAY URL``. Each exits with 0, or says what was
wrong."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ticks import Ticks

import escrowmq as mq
from escrowmq.client.admin import Admin
from escrowmq.errors import Code, EscrowError

TOPIC = "orders"
BOUND = 20.0
"""Seconds that closing may take, as this process has them, with calls that give up after one: twice as many as both
halves of it and of the connections need."""
MOST = 120.0
"""Seconds that it may take by the clock."""
T = TypeVar("T")
TICKS = Ticks()


def surely(call: Callable[[], T]) -> T:
    """Call until it is answered within its second: before anything is closed, a slow machine is no matter."""
    while True:
        try:
            return call()
        except EscrowError as problem:
            if problem.code not in (Code.TIMED_OUT, Code.DISCONNECTED):
                raise


def busy(url: str) -> mq.Bus:
    """A bus with everything in use: a producer that is asked, and threads that wait in calls of a consumer and a
    reader."""
    bus = mq.connect(url)
    shop = bus.producer("shop", timeout=1.0, checker=lambda check: mq.UNKNOWN)
    for _ in range(3):
        surely(lambda: shop.prepare(TOPIC, b"x"))
    plain = bus.producer("plain", timeout=1.0)
    surely(lambda: plain.send(TOPIC, b"x"))
    consumer = surely(lambda: bus.consumer("cart", TOPIC, timeout=1.0))
    first = consumer.receive(1, wait=60)
    assert first
    reader = surely(lambda: bus.reader(TOPIC, timeout=1.0))
    for wait in (lambda: consumer.receive(1, wait=60), lambda: list(reader.batches()), lambda: sending(plain)):
        threading.Thread(target=quietly, args=(wait,), daemon=True).start()
    return bus


def sending(producer: mq.Producer) -> None:
    while True:
        producer.send(TOPIC, b"x" * 1000)


def quietly(call: Callable[[], object]) -> None:
    with suppress(EscrowError):
        call()


def refused(call: Callable[[], object], *others: Code) -> str:
    """Return the text of the error with which a call fails because everything is closed, or of one of ``others``."""
    try:
        call()
    except EscrowError as problem:
        if problem.code in (Code.CLOSED, *others):
            return str(problem)
        raise
    raise AssertionError("it was not refused")


def in_time(close: Callable[[], None]) -> None:
    begun, had = time.monotonic(), TICKS.seconds
    close()
    took, had = time.monotonic() - begun, TICKS.seconds - had
    assert had < BOUND, f"closing took {had:.1f} s"
    assert took < MOST, f"closing took {took:.1f} s"


def leaves(url: str) -> None:
    """Exits without closing."""
    busy(url)


def twice(url: str) -> None:
    bus = busy(url)
    closing = [threading.Thread(target=bus.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    in_time(bus.close)
    for thread in closing:
        thread.join(MOST)
        assert not thread.is_alive()
    in_time(bus.close)


def while_others_wait(url: str) -> None:
    bus = busy(url)
    kept = (threading.main_thread(), TICKS.thread)
    others = [thread for thread in threading.enumerate() if thread not in kept]
    in_time(bus.close)
    for thread in others:
        thread.join(MOST)
    left = [thread.name for thread in others if thread.is_alive()]
    assert not left, f"left: {left}"


def in_a_signal_handler(url: str) -> None:
    """Wherever the main thread stands: it may hold a lock that closing wants."""
    for number in range(4):
        bus = mq.connect(url)
        plain = bus.producer("plain", timeout=1.0)
        surely(partial(plain.send, TOPIC, b"x"))
        signal.signal(signal.SIGALRM, lambda *_, bus=bus: in_time(bus.close))
        signal.setitimer(signal.ITIMER_REAL, 0.01 + number / 1000)
        # closing waits for the send that it interrupts, which may be longer than the send's own timeout
        refused(partial(sending, plain), Code.TIMED_OUT)


class Holder:
    """Closes when it is collected, in whatever thread."""

    def __init__(self, url: str) -> None:
        self.bus = busy(url)
        self.itself = self

    def __del__(self) -> None:
        in_time(self.bus.close)
        print("collected", flush=True)


def in_a_finalizer(url: str) -> None:
    Holder(url)
    gc.collect()
    global kept
    kept = Holder(url)


def in_a_forked_child(url: str) -> None:
    """Producers from before the fork are closed in the child, where questions to a served broker go over a connection
    of its own; all goes on in the parent."""
    bus = busy(url)
    plain = bus.producer("plain", timeout=1.0)
    surely(lambda: plain.send(TOPIC, b"x"))
    child = os.fork()
    if not child:
        assert "fork" in refused(lambda: plain.send(TOPIC, b"x"))
        if url.startswith("file:"):
            assert "fork" in refused(bus.admin.topics)
        else:
            assert [topic["name"] for topic in bus.admin.topics()] == [TOPIC]
        in_time(bus.close)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child"
    surely(lambda: plain.send(TOPIC, b"x"))
    in_time(bus.close)


def of_a_broker_that_stands_still(url: str) -> None:
    """Its caller stops the broker when this says so, and lets it go on at the end."""
    buses = [busy(url), busy(url)]
    print("ready", flush=True)
    sys.stdin.readline()
    admin = Admin(buses[1].router, 3.0)
    threading.Thread(target=quietly, args=(admin.topics,), daemon=True).start()
    in_time(buses[0].close)


WAYS = {
    way.__name__: way
    for way in (
        leaves,
        twice,
        while_others_wait,
        in_a_signal_handler,
        in_a_finalizer,
        in_a_forked_child,
        of_a_broker_that_stands_still,
    )
}

if __name__ == "__main__":
    TICKS.start()
    WAYS[sys.argv[1]](sys.argv[2])
