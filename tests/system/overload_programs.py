"""The programs of the overload: a broker on a slow disk, and clients that are rude, silent, slow or polite. Each ends
when its input does.

``python overload_programs.py NAME '{"json": "options"}'``; each says ``ready``, and in the end one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Options = dict[str, Any]


def serve(options: Options) -> None:
    """A broker as ``escrowmq serve`` starts it, on a slow disk. It ends by SIGTERM, and tells where the time went in
    the file ``stamps``, if it is to."""
    from overload_stamps import Stamps

    from escrowmq.broker.serving.serve import serve as run
    from escrowmq.platform.descriptors import raise_descriptor_limit
    from escrowmq.settings import BrokerSettings
    from escrowmq.testing.disks import SlowDisk

    sys.setswitchinterval(0.001)
    raise_descriptor_limit()
    folder = Path(options["folder"])
    disk = SlowDisk(folder, sync_seconds=options["sync_seconds"], bytes_per_second=options["bytes_per_second"])
    settings = BrokerSettings.load(overrides=options["settings"])
    say = lambda ready: print("ready " + json.dumps(ready), flush=True)  # noqa: E731
    stamps = Stamps()
    if options["stamps"]:
        stamps.install()
    code = run(folder, listen="127.0.0.1:0", settings=settings, announce=say, disk=lambda _: disk)
    if options["stamps"]:
        Path(options["stamps"]).write_text(json.dumps(stamps.told()))
    sys.exit(code)


class Outcomes:
    """What became of ranges of message ids: first number, how many, and "ok", "refused" or "unknown"."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, str]] = []
        self.codes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, first: int, codes: list[Any]) -> None:
        """The codes of the rows from ``first`` on."""
        from escrowmq.errors import DONE, NOT_APPLIED, Code

        with self._lock:
            for number, code in enumerate(codes):
                told = "ok" if code in DONE else "refused" if code in NOT_APPLIED else "unknown"
                branch = Code(code).branch
                self.codes[f"{branch.__name__ if branch else 'Done'}.{Code(code).name}"] += 1
                last = self.ranges[-1] if self.ranges else None
                if last is not None and last[2] == told and last[0] + last[1] == first + number:
                    self.ranges[-1] = (last[0], last[1] + 1, told)
                else:
                    self.ranges.append((first + number, 1, told))


def flood(options: Options) -> None:
    """Producers that send without waiting for answers, over ``connections``; each has a window of bytes that it will
    owe its own memory, and nothing else bounds it. After a refusal it goes on at once, but for a ``pause`` of some
    milliseconds, whatever the broker asked for."""
    from escrowmq.client.links import connection, exchanges
    from escrowmq.client.links import link as links_module
    from escrowmq.connecting import links
    from escrowmq.errors import EscrowError
    from escrowmq.wire import Exchange, Parcel

    rows, body, window = options["rows"], os.urandom(options["body"]), options["window"]
    stopping, outcomes, senders = threading.Event(), Outcomes(), []
    if options["stall"]:  # a machine that is busy with other things must not look like a broker that is silent
        exchanges.STALL_SECONDS = connection.WRITE_SECONDS = options["stall"]
        connection.GONE_TICKS = int(options["stall"])
        links_module.HOLD_SECONDS = options["stall"]
    now_us = time.time_ns() // 1000

    def send(number: int) -> None:
        (link,) = links(options["url"], {})
        owed, lock, refused = [0], threading.Condition(), threading.Event()
        row = (options["topic"], body, None, None, None, None, -1, now_us, 0, 0, None)
        size, sent, instance = rows * (len(body) + 128), 0, options["instance"] + number

        def came(first: int, answer: Any) -> None:
            codes = [answer.code] * rows if isinstance(answer, EscrowError) else [entry[0] for entry in answer]
            if isinstance(answer, EscrowError):
                refused.set()
            outcomes.note((instance << 64) + first, codes)
            with lock:
                owed[0] -= size
                lock.notify()

        while not stopping.is_set():
            with lock:
                while owed[0] + size > window and not stopping.is_set():
                    lock.wait(0.2)
                owed[0] += size
            parcel = Parcel(Exchange.SEND, [row] * rows, {}, (instance, sent))
            link.parcel(parcel, lambda answer, first=sent: came(first, answer))
            sent += rows
            if refused.is_set():
                refused.clear()
                stopping.wait(options["pause"])
        with lock:
            lock.wait_for(lambda: not owed[0])
        link.close()

    for number in range(options["connections"]):
        senders.append(threading.Thread(target=send, args=(number,)))
        senders[-1].start()
    print("ready", flush=True)
    sys.stdin.read()
    stopping.set()
    for sender in senders:
        sender.join()
    print(json.dumps({"codes": outcomes.codes, "ranges": outcomes.ranges}), flush=True)


def crowd(options: Options) -> None:
    """Connections of which most say nothing, some half of a greeting, some a greeting and nothing more; those that are
    closed come again."""
    from escrowmq.platform.descriptors import raise_descriptor_limit
    from escrowmq.wire import frames

    raise_descriptor_limit()
    hello = frames.hello()
    said = [b"", b"", b"", b"PRI * HTTP/2.0\r\n", hello[:7], hello, hello + frames.ping(b"x" * 40)[:11]]
    poll, open_ = select.poll(), dict[int, tuple[socket.socket, bytes]]()
    pending: deque[int] = deque(range(options["connections"]))
    closed = reopened = 0

    def begin(number: int) -> None:
        words = said[number % len(said)]
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", options["port"]))
        poll.register(connection, select.POLLIN | select.POLLRDHUP | (select.POLLOUT if words else 0))
        open_[connection.fileno()] = connection, words

    poll.register(sys.stdin, select.POLLIN | select.POLLHUP)
    announced = False
    while True:
        for _ in range(min(len(pending), options["at_once"])):
            begin(pending.popleft())
        if not pending and not announced:
            announced = True
            print("ready", flush=True)
        for descriptor, events in poll.poll(100):
            if descriptor == sys.stdin.fileno():
                print(json.dumps({"open": len(open_), "closed": closed, "reopened": reopened}), flush=True)
                return
            connection, words = open_[descriptor]
            gone = bool(events & (select.POLLERR | select.POLLHUP | select.POLLRDHUP))
            if not gone and events & select.POLLOUT:
                with contextlib.suppress(OSError):
                    connection.send(words)
                poll.modify(descriptor, select.POLLIN | select.POLLRDHUP)
            if not gone and events & select.POLLIN:
                with contextlib.suppress(OSError):
                    gone = not connection.recv(4096)
            if gone:
                poll.unregister(descriptor)
                connection.close()
                del open_[descriptor]
                closed += 1
                if options["again"]:
                    reopened += 1
                    pending.append(random.randrange(len(said)))


def readers(options: Options) -> None:
    """Clients that ask for much and never read: receives, each of a group of its own, or reads with credit without a
    bound."""
    from escrowmq.wire import frames

    kept = list[socket.socket]()
    for number in range(options["connections"]):
        connection = socket.create_connection(("127.0.0.1", options["port"]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(frames.hello())
        for request in range(1, 65 if options["asks"] == "receives" else 2):
            wanted: Any = {"group": f"unread-{number}", "member": request, "max_messages": 1000, "wait_ms": 60_000}
            asked: Any = {"source": options["topic"], "queue": 0}
            receives = options["asks"] == "receives"
            with contextlib.suppress(ConnectionError):  # it was closed already, because it reads nothing
                connection.sendall(
                    frames.receive_request(request, wanted)
                    if receives
                    else frames.read_request(request, asked, 1 << 40)
                )
        kept.append(connection)
    print("ready", flush=True)
    sys.stdin.read()
    gone = 0
    for connection in kept:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                while connection.recv(1 << 20):
                    pass
                gone += 1
            except ConnectionError:
                gone += 1
    print(json.dumps({"closed": gone}), flush=True)


def hoarder(options: Options) -> None:
    """Consumers that hold what they lease until the lease ends, and ask for more."""
    import escrowmq as mq

    stopping, problems, taken = threading.Event(), Counter[str](), Counter[str]()

    def hold(bus: mq.Bus, number: int) -> None:
        consumer = bus.consumer("hoarders", options["topic"], start="earliest")
        while not stopping.is_set():
            try:
                for batch in consumer.batches(max_messages=200, idle_timeout=1.0):
                    taken[str(number)] += len(batch)
                    stopping.wait(1.0)
                    if stopping.is_set():
                        return
            except mq.EscrowError as problem:
                problems[f"{type(problem).__name__}.{problem.code.name}"] += 1
                stopping.wait(0.1)

    with mq.connect(options["url"]) as bus:
        threads = [threading.Thread(target=hold, args=(bus, number)) for number in range(options["consumers"])]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        stopping.set()
        for thread in threads:
            thread.join()
    print(json.dumps({"taken": sum(taken.values()), "problems": problems}), flush=True)


def polite(options: Options) -> None:
    """One client that waits for each answer: it sends, commits, lets itself be asked, receives, acknowledges, and asks
    how the broker is."""
    import escrowmq as mq
    from escrowmq.client.admin import Admin

    stopping, lock = threading.Event(), threading.Lock()
    seconds: dict[str, list[float]] = {}
    problems, sent, asked, rounds = Counter[str](), list[str](), list[float](), list[float]()
    calls: list[tuple[str, float, float]] = []
    acknowledged = 0

    def timed(what: str, act: Callable[[], Any], key: str = "") -> Any:
        began = time.monotonic()
        try:
            answer = act()
        except mq.EscrowError as problem:
            with lock:
                problems[f"{what}: {type(problem).__name__}.{problem.code.name}"] += 1
            return None
        ended = time.monotonic()
        with lock:
            seconds.setdefault(what, []).append(ended - began)
            if key:
                calls.append((key, began, ended))
        return answer

    def decide(check: mq.Check) -> mq.Outcome:
        born = float(check.messages[0].key or 0)
        with lock:
            asked.append(time.monotonic() - born)
        return mq.COMMIT

    with mq.connect(options["url"]) as bus:
        patience = options["patience"]
        plain = bus.producer("polite", timeout=patience)
        careful = bus.producer("careful", timeout=patience, checker=decide)
        consumer = bus.consumer("polite", "polite", start="earliest", timeout=patience, lease=10 * patience)
        admin = Admin(bus.router, patience)

        def produce() -> None:
            number, told = 0, False
            while not stopping.is_set():
                number += 1
                key, before = f"{number}", timed("stats", admin.stats)
                receipt = timed("send", lambda key=key: plain.send("polite", b"x" * 1000, key=key), key)
                if receipt is not None:
                    sent.append(key)
                    if before and (after := timed("stats", admin.stats)):
                        rounds.append(float(after[0]["rounds_total"]) - float(before[0]["rounds_total"]))
                if number % 4 == 0:
                    born = str(time.monotonic())
                    half = timed("prepare", lambda key=born: careful.prepare("careful", b"y" * 1000, key=key), born)
                    if half is not None and number % 8 == 0:
                        timed("commit", lambda half=half: careful.commit(half.transaction_id))
                if number % 4 == 2:
                    timed("health", admin.health)
                if not told and number > 8 and len(asked) > 1 and acknowledged > 6:
                    told = True
                    print("enough", flush=True)
                stopping.wait(options["pause"])

        def consume() -> None:
            nonlocal acknowledged
            while not stopping.is_set():
                for message in consumer.messages(idle_timeout=0.5):
                    timed("ack", message.ack)
                    acknowledged += 1
                    if stopping.is_set():
                        break

        def guarded(act: Callable[[], None]) -> None:
            while not stopping.is_set():
                try:
                    act()
                except mq.EscrowError as problem:
                    with lock:
                        problems[f"{act.__name__}: {type(problem).__name__}.{problem.code.name}"] += 1

        threads = [threading.Thread(target=guarded, args=(act,)) for act in (produce, consume)]
        for thread in threads:
            thread.start()
        while not sent and all(thread.is_alive() for thread in threads):
            stopping.wait(0.05)
        print("ready", flush=True)
        sys.stdin.read()
        stopping.set()
        for thread in threads:
            thread.join()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "rounds": rounds,
                "asked": asked,
                "problems": problems,
                "sent": sent,
                "acknowledged": acknowledged,
                "calls": calls,
            }
        ),
        flush=True,
    )


PROGRAMS = {act.__name__: act for act in (serve, flood, crowd, readers, hoarder, polite)}

RUDE = {"flood", "crowd", "readers", "hoarder"}
"""These leave the processors to the others when there is a choice, as they would on machines of their own."""

if __name__ == "__main__":
    if sys.argv[1] in RUDE:
        os.nice(10)
    PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
