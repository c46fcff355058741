"""How much work one small transaction is, counted on a served broker and its client, never timed: rounds, calls of the
ledger, syncs, bytes, requests, context switches, threads, calls of Python and objects in memory. Each guard is also
shown a regression, which it must see.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.client.lanes import filling
from escrowmq.message.row import Checker

PROGRAM = Path(__file__).with_name("counting_broker.py")
BODY = b"x" * 1024
GROUP = "counted"

LIMITS: dict[str, dict[str, float]] = {
    "one caller": {
        "requests": 2.0,
        "rounds": 2.2,
        "decides": 2.2,
        "applies": 2.2,
        "syncs": 2.1,
        "written_per_body_byte": 2.3,
        "switches": 14,
        "client_switches": 14,
        "threads": 8,
    },
    "64 threads": {
        "requests": 0.25,
        "rounds": 0.25,
        "decides": 0.3,
        "applies": 0.3,
        "syncs": 0.25,
        "written_per_body_byte": 1.45,
        "switches": 3,
        "client_switches": 7,
    },
    "8 clients of 4 threads": {
        "requests": 2.0,
        "rounds": 0.8,
        "decides": 1.0,
        "applies": 1.0,
        "syncs": 0.8,
        "written_per_body_byte": 1.75,
        "switches": 20,
        "client_switches": 30,
    },
    "1,000 in flight": {
        "requests": 0.02,
        "rounds": 0.02,
        "decides": 0.02,
        "applies": 0.02,
        "syncs": 0.02,
        "written_per_body_byte": 1.15,
        "switches": 0.3,
        "client_switches": 0.3,
        "objects": 14,
        "objects_left": 1,
    },
    "calls of Python, one caller": {"calls": 1250, "client_calls": 430},
    "calls of Python, in flight": {"calls": 60, "client_calls": 130},
}
"""Per transaction. Counts that do not depend on timing stand close to what they are; those that do have room for a busy
machine.
"""


class Counting:
    """A broker in a process of its own that counts what it does."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.url: str = self._answer()["url"]

    def ask(self, command: str) -> dict[str, Any]:
        """Its answer to a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def stop(self) -> None:
        """End it and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    made = Counting(tmp_path_factory.mktemp("counted") / "data")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    """One that counts calls of Python, too."""
    made = Counting(tmp_path_factory.mktemp("profiled") / "data", "--calls")
    yield made
    made.stop()


# The shapes that are counted


def one_caller(broker: Counting, transactions: int = 40) -> dict[str, float]:
    """One transaction after the other."""
    with mq.connect(broker.url) as bus:
        producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)

        def work(number: int) -> None:
            for _ in range(number):
                with producer.transaction() as txn:
                    txn.send("counted", BODY)

        work(5)
        return per_transaction(broker, transactions, lambda: work(transactions))


def threads(broker: Counting, buses: int = 1, callers: int = 64, each: int = 8) -> dict[str, float]:
    """Many threads, each one transaction after the other, over one or several connections."""
    connected = [mq.connect(broker.url) for _ in range(buses)]
    producers = [bus.producer(GROUP, checker=lambda check: mq.UNKNOWN) for bus in connected]
    ready, done = threading.Barrier(buses * callers + 1), threading.Barrier(buses * callers + 1)

    def work(producer: mq.Producer) -> None:
        with producer.transaction() as txn:
            txn.send("counted", BODY)
        ready.wait()
        for _ in range(each):
            with producer.transaction() as txn:
                txn.send("counted", BODY)
        done.wait()

    working = [threading.Thread(target=work, args=(producer,)) for producer in producers for _ in range(callers)]
    for thread in working:
        thread.start()

    def let_them() -> None:
        ready.wait()
        done.wait()

    counted = per_transaction(broker, buses * callers * each, let_them)
    for thread in working:
        thread.join()
    for bus in connected:
        bus.close()
    return counted


def in_flight(broker: Counting, tasks: int = 1000, each: int = 1) -> dict[str, float]:
    """Many tasks of one event loop."""

    async def main() -> dict[str, float]:
        async with await mq.aconnect(broker.url) as bus:
            producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)

            async def task(number: int) -> None:
                for _ in range(number):
                    async with producer.transaction() as txn:
                        await txn.send("counted", BODY)

            await asyncio.gather(*(task(1) for _ in range(tasks)))
            begun = Begun(broker)
            await asyncio.gather(*(task(each) for _ in range(tasks)))
            return begun.per(tasks * each)

    return asyncio.run(main())


class Begun:
    """What broker and client had done when the counting began."""

    def __init__(self, broker: Counting) -> None:
        self._broker = broker
        self._counts = broker.ask("counts")
        self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    def per(self, transactions: int) -> dict[str, float]:
        """Per transaction; threads as they are."""
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - self._switches
        now = self._broker.ask("counts")
        counted = {name: (value - self._counts.get(name, 0)) / transactions for name, value in now.items()}
        written = counted.pop("written_bytes") / len(BODY)
        return {
            **counted,
            "threads": now["threads"] - self._counts["threads"],
            "written_per_body_byte": written,
            "client_switches": switches / transactions,
        }


def per_transaction(broker: Counting, transactions: int, work: Callable[[], None]) -> dict[str, float]:
    begun = Begun(broker)
    work()
    return begun.per(transactions)


def objects_in_flight(broker: Counting, tasks: int = 1000) -> dict[str, float]:
    """Objects in the client's memory while a stopped broker leaves all in flight, and those that are left when all have
    ended."""

    async def main() -> dict[str, float]:
        async with await mq.aconnect(broker.url) as bus:
            producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)
            begun = 0

            async def task() -> None:
                nonlocal begun
                async with producer.transaction() as txn:
                    begun += 1
                    await txn.send("counted", BODY)

            async def all_tasks() -> tuple[int, int]:
                nonlocal begun
                before, begun = blocks(), 0
                os.kill(broker.process.pid, signal.SIGSTOP)
                try:
                    running = [asyncio.ensure_future(task()) for _ in range(tasks)]
                    while begun < tasks:
                        await asyncio.sleep(0)
                    during = blocks() - before
                finally:
                    os.kill(broker.process.pid, signal.SIGCONT)
                await asyncio.gather(*running)
                running.clear()
                return during, blocks() - before

            await all_tasks()  # what is made once
            during, after = await all_tasks()
            return {"objects": during / tasks, "objects_left": after / tasks}

    return asyncio.run(main())


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def python_calls(broker: Counting, shape: Callable[[Counting], dict[str, float]]) -> dict[str, float]:
    """Calls of Python, and from Python, on all threads of the broker and of this process."""
    ticks = count()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(ticks)

    seen: list[int] = []
    begun, per = Begun.__init__, Begun.per

    def at_begin(self: Begun, counted: Counting) -> None:
        begun(self, counted)
        seen.append(next(ticks))

    def at_end(self: Begun, transactions: int) -> dict[str, float]:
        client = (next(ticks) - seen[-1]) / transactions
        return {**per(self, transactions), "client_calls": client}

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Begun, "__init__", at_begin)
            patch.setattr(Begun, "per", at_end)
            return shape(broker)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


SHAPES: dict[str, Callable[[Counting], dict[str, float]]] = {
    "one caller": one_caller,
    "64 threads": threads,
    "8 clients of 4 threads": lambda broker: threads(broker, buses=8, callers=4),
    "1,000 in flight": lambda broker: {**in_flight(broker), **objects_in_flight(broker)},
    "calls of Python, one caller": lambda broker: python_calls(broker, lambda one: one_caller(one, 30)),
    "calls of Python, in flight": lambda broker: python_calls(broker, lambda one: in_flight(one, 200, 2)),
}


def broken(shape: str, broker: Counting) -> dict[str, float]:
    """The limits of a shape that do not hold, with what was counted."""
    counted = SHAPES[shape](broker)
    print(shape, counted)
    return {name: counted[name] for name, limit in LIMITS[shape].items() if counted[name] > limit}


def client_hands_over(patch: pytest.MonkeyPatch) -> None:
    """Each message goes through the hands of another thread ten times more."""
    here, there = threading.Semaphore(0), threading.Semaphore(0)

    def hand_over() -> None:
        while there.acquire():
            here.release()

    threading.Thread(target=hand_over, daemon=True).start()
    row = Checker.row

    def slow(self: Checker, *given: Any, **named: Any) -> Any:
        for _ in range(10):
            there.release()
            here.acquire()
        return row(self, *given, **named)

    patch.setattr(Checker, "row", slow)


def client_keeps(patch: pytest.MonkeyPatch) -> None:
    """Each message leaves objects behind."""
    kept: list[Any] = []
    row = Checker.row

    def keeping(self: Checker, *given: Any, **named: Any) -> Any:
        kept.append([[] for _ in range(80)])
        return row(self, *given, **named)

    patch.setattr(Checker, "row", keeping)


def client_combines_nothing(patch: pytest.MonkeyPatch) -> None:
    """Each row is a request."""
    patch.setattr(filling, "MAX_ROWS", 1)


def client_calls(patch: pytest.MonkeyPatch) -> None:
    """Each message takes many calls more."""
    row = Checker.row

    def calling(self: Checker, *given: Any, **named: Any) -> Any:
        for _ in range(1500):
            len("")
        return row(self, *given, **named)

    patch.setattr(Checker, "row", calling)


@pytest.mark.parametrize("shape", list(LIMITS))
def test_a_small_transaction_is_little_work(shape: str, broker: Counting, profiled: Counting) -> None:
    """What is done by the clock is counted too, and is more per transaction on a busy machine: the best of a few."""
    counted = profiled if "calls" in shape else broker
    too_much = broken(shape, counted)
    for _ in range(4):
        too_much = too_much and broken(shape, counted)
    assert too_much == {}


@pytest.mark.parametrize(
    ("wrong", "shape", "seen"),
    [
        ("sync", "one caller", {"syncs"}),
        ("switches", "one caller", {"switches"}),
        ("threads", "one caller", {"threads"}),
        ("unmerged", "8 clients of 4 threads", {"decides", "applies"}),
        ("single", "8 clients of 4 threads", {"rounds", "syncs"}),
        ("calls", "calls of Python, one caller", {"calls"}),
        (client_hands_over, "one caller", {"client_switches"}),
        (client_combines_nothing, "64 threads", {"requests", "written_per_body_byte"}),
        (client_keeps, "1,000 in flight", {"objects", "objects_left"}),
        (client_calls, "calls of Python, in flight", {"client_calls"}),
    ],
)
def test_a_planted_regression_breaks_its_guard(
    wrong: str | Callable[[pytest.MonkeyPatch], None],
    shape: str,
    seen: set[str],
    broker: Counting,
    profiled: Counting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = profiled if "calls" in shape else broker
    if callable(wrong):
        wrong(monkeypatch)
    else:
        asked.ask(f"plant {wrong}")
    try:
        assert seen <= broken(shape, asked).keys()
    finally:
        asked.ask("unplant")
