"""How soon a removed token ends what is open with it, and what wrong greetings cost a well-behaved client.

The first part measures seconds from the written rights file to the end of an open read, a waiting receive, a check-back
subscription (closed sockets), a waiting receive at the gateway (401) and a console session (led to the login). In the
second, processes send greetings with wrong tokens, as many as they can, while one client sends messages one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any
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

ATTACKERS = 4
HELD = 64
"""Connections that an attacker leaves open."""
PATIENT = 30.0


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


def guess(port: int, stop: Any, count: Synchronized[int]) -> None:
    """Send greetings with wrong tokens until told to stop, with what the broker and the client leave of the
    processors: elsewhere an attacker has its own."""
    os.nice(5)
    held: deque[socket.socket] = deque()
    greeting = frames.hello(new_token().text)
    for number in itertools.count():
        if stop.is_set():
            break
        one = socket.socket()
        held.append(one)
        try:
            one.settimeout(5.0)
            one.connect(("127.0.0.1", port))
            one.sendall(greeting)
        except OSError:
            continue
        if len(held) > HELD:
            held.popleft().close()
        if number % 64 == 0:
            with count.get_lock():
                count.value += 64


def measure_guesses(report: Report, ready: dict[str, Any], rights: Rights, seconds: float) -> None:
    """Add the latency of sends, with and without wrong greetings beside them."""
    port = urlsplit(ready["url"]).port
    assert port is not None
    with mq.connect(ready["url"], token=rights.boss) as bus:
        producer = bus.producer("p", timeout=PATIENT)

        def send(until: float) -> list[float]:
            taken = []
            while time.perf_counter() < until:
                began = time.perf_counter()
                producer.send("t", b"x" * 1024)
                taken.append(time.perf_counter() - began)
            return taken

        send(time.perf_counter() + 0.5)
        alone = send(time.perf_counter() + seconds)
        stop, count = multiprocessing.Event(), multiprocessing.Value("q", 0)
        attackers = [multiprocessing.Process(target=guess, args=(port, stop, count)) for _ in range(ATTACKERS)]
        for attacker in attackers:
            attacker.start()
        time.sleep(1.0)
        [before], began = bus.admin.stats(), time.perf_counter()
        sent = count.value
        beside = send(time.perf_counter() + seconds)
        took = time.perf_counter() - began
        [after], sent = bus.admin.stats(), count.value - sent
        stop.set()
        for attacker in attackers:
            attacker.join()
    refused = after["unauthenticated_total"] - before["unauthenticated_total"]
    report.add("wrong greetings sent", "a second", "as many as it can", [sent / took])
    report.add("wrong greetings refused", "a second", "", [refused / took])
    for name, values, goal in (("alone", alone, ""), ("beside wrong greetings", beside, "< 1000")):
        hundred = statistics.quantiles(values, n=100)
        report.add(f"send {name}, median", "ms", "", [hundred[49] * 1000])
        report.add(f"send {name}, 99 of 100", "ms", "", [hundred[98] * 1000])
        report.add(f"send {name}, longest of {len(values)}", "ms", goal, [max(values) * 1000])


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
                measure_guesses(report, ready, rights, options.seconds)
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
