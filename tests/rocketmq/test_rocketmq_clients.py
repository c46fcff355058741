"""Published RocketMQ clients, unchanged: the same cases with each of them (clients/README.md)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from rocketmq_programs import LANGUAGES, command_of
from rocketmq_runs import GatewayProcess, Start

import escrowmq as mq

PATIENCE = 120.0
NO_STREAM_AFTER_A_RESTART = ("go", "rust")
"""Clients that answered no check-back within PATIENCE after a restart (docs/rocketmq.md)."""
pytestmark = pytest.mark.timeout(1200)  # the first test of a language builds its program


class Client:
    """A program over a published client."""

    language = ""

    def __init__(self, command: list[str], home: Path, *words: str):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        with (home / "stderr").open("w") as log:
            self.process = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=home,
            )
        self._answers: Queue[dict[str, Any]] = Queue()
        self.checks: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._next() == {"ready": True}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue  # some clients log to standard output
            answer = json.loads(line)
            if "check" in answer:
                self.checks.put(answer["check"])
            else:
                self._answers.put(answer)
        self._answers.put({"error": "the program ended"})

    def _next(self) -> dict[str, Any]:
        return self._answers.get(timeout=PATIENCE)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Make a request. Fails the test if the client reports an error."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        answer = self._next()
        assert "error" not in answer, answer
        return answer

    def insist(self, do: str, **given: Any) -> dict[str, Any]:
        """Repeat a request until the client has no error to report: its server is restarting."""
        while True:
            try:
                return self.ask(do, **given)
            except AssertionError:
                assert self.process.poll() is None

    def receive(self, count: int, invisible: int = 30) -> list[dict[str, Any]]:
        """Receive until ``count`` messages came, and acknowledge them."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            messages = self.insist("receive", max=16, invisible=invisible)["messages"]
            if messages:
                self.ask("ack")
            found += messages
        return found

    def is_empty(self) -> bool:
        """Return whether one receive finds nothing."""
        return not self.ask("receive", max=16, invisible=30)["messages"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


@pytest.fixture(params=LANGUAGES)
def run(request: pytest.FixtureRequest, tmp_path: Path, gateway: GatewayProcess, topic: str) -> Iterator[Any]:
    """Start the program of a language: ``run(group="cart", check="commit")``."""
    command = command_of(request.param)
    started: list[Client] = []

    def start(group: str = "cart", check: str = "commit", address: str | None = None) -> Client:
        home = tmp_path / f"home{len(started)}"
        home.mkdir()
        client = Client(command, home, address or gateway.ready["rocketmq"], topic, group, check)
        client.language = request.param
        started.append(client)
        return client

    yield start
    for client in started:
        client.kill()


Run = Callable[..., Client]


def test_it_sends_and_receives_with_keys_tags_and_properties(run: Run, bus: mq.Bus, topic: str) -> None:
    client = run()
    sent = client.ask("send", body="one ä", keys=["k1", "k2"], tag="paid", properties={"a": "b", "c": "ü"})
    (got,) = client.receive(1)
    assert got["id"] == sent["id"]
    assert (got["body"], got["keys"], got["tag"]) == ("one ä", ["k1", "k2"], "paid")
    assert (got["properties"], got["attempt"]) == ({"a": "b", "c": "ü"}, 1)
    (own,) = bus.consumer(f"own-{topic}", topic).receive(1, wait=60.0)
    assert (own.body.decode(), own.tag) == ("one ä", "paid")
    assert own.key in ("k1", "k2")  # the Python client keeps keys as a set
    assert "01" + own.message_id.hex() == sent["id"].lower()
    bus.producer("shop").send(topic, b"two", key="k", tag="t", properties={"e": "f"})
    (got,) = client.receive(1)
    assert (got["body"], got["keys"], got["tag"], got["properties"]) == ("two", ["k"], "t", {"e": "f"})
    assert client.ask("stop") == {"ok": True}
    assert client.process.wait(PATIENCE) == 0


def test_messages_of_a_group_come_in_order(run: Run) -> None:
    client = run("fifo-cart")
    for number in range(8):
        client.ask("send", body=str(number), group="ab"[number % 2])
    got = client.receive(8)
    for group in "ab":
        bodies = [one["body"] for one in got if one["group"] == group]
        assert bodies == [str(number) for number in range(8) if "ab"[number % 2] == group]


def test_a_delayed_message_comes_later(run: Run) -> None:
    client = run()
    client.ask("send", body="late", delay=4.0)
    client.ask("send", body="now")
    assert [one["body"] for one in client.receive(2)] == ["now", "late"]


def test_transactions_are_committed_and_rolled_back(run: Run) -> None:
    client = run(check="unknown")
    good = client.ask("half", body="good", keys=["k"], tag="t", properties={"a": "b"})
    assert client.ask("commit") == {"ok": True}
    client.ask("half", body="bad")
    assert client.ask("rollback") == {"ok": True}
    client.ask("send", body="last")
    got = client.receive(2)
    assert {one["body"] for one in got} == {"good", "last"}
    (first,) = [one for one in got if one["body"] == "good"]
    assert (first["id"], first["keys"], first["tag"], first["properties"]) == (good["id"], ["k"], "t", {"a": "b"})
    assert client.is_empty()


@pytest.mark.parametrize("answer", ["commit", "rollback"])
def test_another_process_answers_for_one_that_was_killed_before_its_commit(run: Run, answer: str) -> None:
    # The sender knows nothing of its transaction, so a check that comes before it dies decides nothing.
    sender = run("", check="unknown")
    half = sender.ask("half", body="decided by another")
    sender.kill()
    other = run(check=answer)
    assert other.checks.get(timeout=PATIENCE) == half["id"]
    if answer == "commit":
        assert [one["id"] for one in other.receive(1)] == [half["id"]]
    assert other.is_empty()


def test_what_is_not_acknowledged_comes_again(run: Run) -> None:
    client = run()
    client.ask("send", body="again")
    found: list[Any] = []
    while not found:
        found = client.ask("receive", max=1, invisible=10)["messages"]
    (got,) = client.receive(1)
    assert (found[0]["attempt"], got["attempt"], got["id"]) == (1, 2, found[0]["id"])


def test_it_goes_on_after_the_gateway_was_killed(run: Run, start: Start) -> None:
    first = start("--fifo", "fifo-*")
    client = run(check="commit", address=first.ready["rocketmq"])
    before = client.ask("send", body="before")
    first.kill()
    second = start(listen=first.ready["rocketmq"], second=first.ready["second"])
    after = client.insist("send", body="after")
    got = {one["id"] for one in client.receive(2)}
    assert got == {before["id"], after["id"]}
    assert second.process.poll() is None
    if client.language in NO_STREAM_AFTER_A_RESTART:
        return
    half = client.ask("half", body="asked after the restart")
    assert client.checks.get(timeout=PATIENCE) == half["id"]
    assert [one["id"] for one in client.receive(1)] == [half["id"]]
