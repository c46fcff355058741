"""How soon a removed token ends what is open with it, and what wrong greetings cost a well-behaved client.

The first part measures seconds from the written rights file to the end of an open read, a waiting receive, a check-back
subscription (closed sockets), a waiting receive at the gateway (401) and a console session (led to the login). In the
second, processes offer 12,000 greetings with wrong tokens a second, whatever becomes of them, while one client sends
messages one by one, and two others connect for each message, one from the attackers' address.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import multiprocessing
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from random import randrange
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from _harness import Report, arguments, serve

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.rights.tokens import digest, new_token
from escrowmq.wire import ask, frames
from escrowmq.wire.actions.groups import SUBSCRIBE
from escrowmq.wire.actions.producers import OPEN_SESSION
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

ATTACKERS = 2
PATIENT = 30.0
MOST_CONNECTING = 1.0
"""Seconds after which an attacker gives an unanswered SYN up."""
WARM_SECONDS = 5.0
IP_BIND_ADDRESS_NO_PORT = 24


class Rights:
    """A rights file of two principals, of which one comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rights.toml"
        self.shop, self.boss = new_token().text, new_token().text
        self.write()

    def write(self, *, shop: bool = True) -> float:
        """Write the file, at once; the time."""
        boss = '["view", "send *", "produce *"]'
        allow = '["send t", "produce shop", "consume g", "read t", "view"]'
        text = f'[principals.boss]\ntokens = [{{ sha256 = "{digest(self.boss)}" }}]\nallow = {boss}\n'
        if shop:
            text += f'[principals.shop]\ntokens = [{{ sha256 = "{digest(self.shop)}" }}]\nallow = {allow}\n'
        made = self.path.with_suffix(".new")
        made.write_text(text)
        made.rename(self.path)
        return time.perf_counter()


class Open:
    """Everything that is open with a token. Each is a function that returns when it has ended."""

    def __init__(self, ready: dict[str, Any], token: str, number: int) -> None:
        self._at = (urlsplit(ready["url"]).hostname, urlsplit(ready["url"]).port)
        self._ready, self._token = ready, token
        [link] = links(ready["url"], {"token": token})
        session = ask(link, OPEN_SESSION({"group": "shop", "instance": f"i{number}", "transactional": True}), PATIENT)
        ask(link, SUBSCRIBE({"group": "g", "topics": ["t"], "start": "latest"}), PATIENT)
        link.close()
        watch = frame(Kind.WATCH, 1, b"", encoder.encode(session["session"]))
        receive = frames.receive_request(1, {"group": "g", "member": 1, "wait_ms": 60_000})
        read = frame(Kind.READ, 1, json.dumps({"source": "t"}).encode(), encoder.encode(1))
        self.ends: dict[str, Callable[[], None]] = {
            "open read": self._connection(read),
            "waiting receive": self._connection(receive),
            "check-back subscription": self._connection(watch),
            "receive at the gateway": self._gateway,
            "console session": self._log_in(),
        }

    def _connection(self, request: Any) -> Callable[[], None]:
        opened = socket.create_connection(self._at, PATIENT)
        opened.sendall(frames.hello(self._token))
        opened.recv(65536)
        opened.sendall(b"".join(map(bytes, request)) if isinstance(request, list | tuple) else bytes(request))

        def end() -> None:
            with opened:
                while opened.recv(65536):
                    pass

        return end

    def _gateway(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        address = f"{self._ready['http']}/v1/consumers/g/receive"
        answer = httpx.post(address, json={"wait": 30}, headers=headers, timeout=PATIENT + 30)
        assert answer.status_code == 401, answer.text

    def _log_in(self) -> Callable[[], None]:
        url = self._ready["console"]
        browser = httpx.Client(base_url=url, timeout=PATIENT)
        page = browser.get("/login").text
        form = {"token": page.partition('name="token" value="')[2][:64], "access_token": self._token}
        assert browser.post("/login", data=form, headers={"Origin": url}).status_code == 303

        def end() -> None:
            with contextlib.closing(browser):
                while browser.get("/plans").status_code == 200:
                    time.sleep(0.01)

        return end


def measure_endings(report: Report, ready: dict[str, Any], rights: Rights) -> None:
    """Add the seconds until each thing has ended."""
    found: dict[str, list[float]] = {}
    for number in range(report.repeats):
        opened, ended = Open(ready, rights.shop, number), dict[str, float]()

        def run(name: str, end: Callable[[], None], ended: dict[str, float] = ended) -> None:
            end()
            ended[name] = time.perf_counter()

        threads = [threading.Thread(target=run, args=pair) for pair in opened.ends.items()]
        for thread in threads:
            thread.start()
        time.sleep(0.5 + number * 0.013)  # the gateway's receive waits; any phase of the looks at the file
        written = rights.write(shop=False)
        for thread in threads:
            thread.join()
        for name, at in ended.items():
            found.setdefault(name, []).append(at - written)
        rights.write()
        time.sleep(0.5)
    for name, seconds in found.items():
        report.add(f"end of an {name}" if name[0] == "o" else f"end of a {name}", "s", "< 1", seconds)


class Attack(NamedTuple):
    """One way to guess: greetings a second of each attacker, how long (s) it waits for an answer, and whether each
    comes from another address."""

    name: str
    rate: int
    patience: float
    spread: bool = False


ATTACKS = (
    Attack("guesses that await an answer", 6000, 1.5),
    Attack("guesses that await nothing", 6000, 0.0),
    Attack("guesses from many addresses", 6000, 1.5, spread=True),
)
SOURCES = {"another address": "127.0.0.2", "the attackers' address": "127.0.0.1"}


class Guesser:
    """An open loop: each greeting is sent when it is due, whatever became of the former ones."""

    def __init__(self, port: int, attack: Attack) -> None:
        self._port, self._attack = port, attack
        self._greeting = frames.hello(new_token().text)
        self._greeted = deque[tuple[float, socket.socket]]()
        self._connecting: dict[int, tuple[float, socket.socket]] = {}
        self._connected = select.epoll()
        self.counts = Counter[str]()

    def run(self, stop: Any, counting: Any) -> None:
        """Guess until told to stop. Counts begin with ``counting``."""
        began, number = time.perf_counter(), 0
        while not stop.is_set():
            now = time.perf_counter()
            due = min(int((now - began) * self._attack.rate) - number, 64)
            for _ in range(due):
                self._begin(now)
            number += max(due, 0)
            self._go_on(now)
            if not counting.is_set():
                self.counts.clear()
            if due <= 0:
                time.sleep(0.0005)

    def _begin(self, now: float) -> None:
        one = socket.socket()
        one.setblocking(False)
        if self._attack.spread:
            one.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            one.bind((f"127.{randrange(1, 255)}.{randrange(1, 255)}.{randrange(1, 255)}", 0))
        self.counts["tried"] += 1
        if one.connect_ex(("127.0.0.1", self._port)) not in (0, errno.EINPROGRESS):
            self.counts["without a port"] += 1
            one.close()
        else:
            self._greet(now, one)

    def _greet(self, now: float, one: socket.socket) -> None:
        try:
            one.send(self._greeting)
        except BlockingIOError:  # the system has dropped the SYN: too many wait to be accepted
            self._connecting[one.fileno()] = now, one
            self._connected.register(one, select.EPOLLOUT)
        except OSError:
            self.counts["greeted"] += 1
            self.counts["closed unread"] += 1
            one.close()
        else:
            self.counts["greeted"] += 1
            self._greeted.append((now, one))

    def _go_on(self, now: float) -> None:
        for number, _ in self._connected.poll(0.0) if self._connecting else ():
            self._connected.unregister(number)
            self._greet(*self._connecting.pop(number))
        while self._connecting and (first := next(iter(self._connecting.values())))[0] < now - MOST_CONNECTING:
            self.counts["not connected"] += 1
            del self._connecting[first[1].fileno()]
            first[1].close()
        while self._greeted and self._greeted[0][0] <= now - self._attack.patience:
            _, one = self._greeted.popleft()
            try:
                self.counts["answered" if one.recv(4096) else "closed unread"] += 1
            except BlockingIOError:
                self.counts["no answer yet"] += 1
            except OSError:
                self.counts["closed unread"] += 1
            one.close()


def guess(port: int, attack: Attack, stop: Any, counting: Any, counts: Any) -> None:
    """Run one attacker; its counts are put into a queue."""
    guesser = Guesser(port, attack)
    guesser.run(stop, counting)
    counts.put(dict(guesser.counts))


def come_anew(url: str, token: str, source: str, stop: Any, counting: Any, taken: Any) -> None:
    """Connect from an address, send, close, again and again; the seconds of each are put into a queue."""
    socket.create_connection = functools.partial(socket.create_connection, source_address=(source, 0))
    seconds: list[float] = []
    while not stop.is_set():
        began = time.perf_counter()
        with mq.connect(url, token=token) as bus:
            bus.producer("p", timeout=PATIENT).send("t", b"x" * 1024)
        if counting.is_set():
            seconds.append(time.perf_counter() - began)
        stop.wait(0.05)
    taken.put((source, seconds))


def send(producer: mq.Producer, seconds: float) -> list[float]:
    """Send messages one by one; the seconds that each took."""
    taken, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        producer.send("t", b"x" * 1024)
        taken.append(time.perf_counter() - began)
    return taken


def add_times(report: Report, name: str, goal: str, seconds: list[float]) -> None:
    """Add median, 99th of 100 and the longest."""
    ordered = sorted(seconds) or [math.inf]
    report.add(f"{name}, median", "ms", "", [statistics.median(ordered) * 1000])
    report.add(f"{name}, 99 of 100", "ms", "", [ordered[len(ordered) * 99 // 100] * 1000])
    report.add(f"{name}, longest of {len(seconds)}", "ms", goal, [ordered[-1] * 1000])


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_guesses(
    report: Report, broker: subprocess.Popen[str], url: str, token: str, seconds: float, attack: Attack | None
) -> None:
    """Add the times of sends, over an open connection and over new ones, beside an attack or none."""
    beside = f"beside {attack.name}" if attack is not None else "alone"
    goal = "< 1000" if attack is not None else ""
    new = multiprocessing.get_context("spawn")
    stop, counting, counts, taken = new.Event(), new.Event(), new.Queue(), new.Queue()
    others = [
        new.Process(target=come_anew, args=(url, token, source, stop, counting, taken)) for source in SOURCES.values()
    ]
    attackers = [
        new.Process(target=guess, args=(urlsplit(url).port, attack, stop, counting, counts))
        for _ in range(ATTACKERS if attack is not None else 0)
    ]
    with mq.connect(url, token=token) as bus:
        producer = bus.producer("p", timeout=PATIENT)
        for process in (*others, *attackers):
            process.start()
        send(producer, WARM_SECONDS)
        [before], began, used = bus.admin.stats(), time.perf_counter(), processor_seconds(broker)
        counting.set()
        sends = send(producer, seconds)
        [after], took, used = bus.admin.stats(), time.perf_counter() - began, processor_seconds(broker) - used
        stop.set()
        total = sum((Counter(counts.get()) for _ in attackers), Counter[str]())
        came = dict(taken.get() for _ in others)
        for process in (*others, *attackers):
            process.join()
    for name in sorted(total):
        report.add(f"{beside}: {name}", "a second", "", [total[name] / took])
    if attack is not None:
        refused = after["unauthenticated_total"] - before["unauthenticated_total"]
        report.add(f"{beside}: refused", "a second", "", [refused / took])
    report.add(f"{beside}: the broker's processor time", "s a second", "", [used / took])
    add_times(report, f"{beside}: send", goal, sends)
    for name, source in SOURCES.items():
        own = source == SOURCES["the attackers' address"]
        add_times(report, f"{beside}: connect from {name}, send", "" if own else goal, came[source])


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=20, seconds=20.0)
    options = parser.parse_args()
    report = Report("attacks on access rights", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as made:
        folder = Path(made)
        rights = Rights(folder)
        flags = ["--rights", str(rights.path), "--http", "127.0.0.1:0", "--console", "127.0.0.1:0"]
        process, ready = serve(folder / "data", *flags)
        try:
            with mq.connect(ready["url"], token=rights.boss) as bus:
                bus.producer("p").send("t", b"x" * 1024)
            if report.wants("endings"):
                measure_endings(report, ready, rights)
            if report.wants("guesses"):
                for attack in (None, *ATTACKS):
                    measure_guesses(report, process, ready["url"], rights.boss, options.seconds, attack)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=PATIENT)
            except subprocess.TimeoutExpired:
                process.kill()
                sys.exit("the broker did not stop")
    report.end()


if __name__ == "__main__":
    main()
