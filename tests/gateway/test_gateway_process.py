"""The commands: ready line, clean stop, refusals, and a gateway that is killed between a prepare and its answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_runs import Client, Receiver
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app
from escrowmq.gateway import sign_answer, verify
from forked import Forked

SECRET = "a-secret-of-enough-bytes"
Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command with --json; the process and its ready line."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = Forked(
            [sys.executable, "-m", "escrowmq", *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """The standard error of a process that is told to stop, which it does cleanly."""
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "Traceback" not in told
    return told


def test_a_broker_serves_http_in_its_own_process(start: Start, tmp_path: Path) -> None:
    receiver = Receiver()
    receiver.answer = lambda asked: (200, {}, asked.all("committed"))
    quick = ("--transaction-timeout", "0.1", "--check-interval", "0.1")
    words = ("serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0", "--http", "127.0.0.1:0")
    process, ready = start(*words, "--ask", f"shop={receiver.url}", *quick)
    assert set(ready) == {"url", "socket", "metrics", "folder", "shard", "epoch", "pid", "http", "asks"}
    assert ready["asks"] == ["shop"]
    client = Client(ready["http"])
    client.prepare("shop", "orders", "by http")
    with mq.connect(ready["url"]) as bus:
        bus.producer("plain").send("orders", b"by socket")
        messages = bus.consumer("c", "orders").messages()
        assert {next(messages).body, next(messages).body} == {b"by http", b"by socket"}
    ended(process)
    receiver.close()
    client.http.close()


def test_a_gateway_of_its_own_asks_with_the_secret_of_its_configuration(
    start: Start, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    receiver = Receiver()

    def answer(asked: Any) -> tuple[int, dict[str, str], bytes]:
        verify(SECRET, asked.headers, asked.body)
        body = asked.all("rolled back")
        return 200, sign_answer(SECRET, asked.headers, body), body

    receiver.answer = answer
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'[gateway]\nmax_messages = 3\n[check_back.shop]\nurl = "{receiver.url}"\nsecret_env = "SHOP_SECRET"\ntimeout '
        '= "3s"\n'
    )
    quick = ("--transaction-timeout", "0.1", "--check-interval", "0.1")
    _, broker = start("serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0", *quick)
    words = ("gateway", "--url", broker["url"], "-l", "127.0.0.1:0", "--config", str(config))
    process, ready = start(*words, SHOP_SECRET=SECRET)
    assert set(ready) == {"http", "asks", "url", "pid"}
    client = Client(ready["http"])
    assert client.post("/v1/topics/t/messages", {"messages": [{"text": "x"}] * 4})[0] == 413
    transaction = client.prepare("shop", "orders")
    eventually(lambda: client.state("shop", transaction) == "rolled_back")
    client.http.close()
    assert SECRET not in ended(process)
    receiver.close()


@pytest.mark.invariant("I9")
def test_a_gateway_killed_between_a_prepare_and_its_answer_is_asked_again(start: Start, tmp_path: Path) -> None:
    _, broker = start("serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0")
    words = ("gateway", "--url", broker["url"], "-l", "127.0.0.1:0")
    process, ready = start(*words, ESCROWMQ_FAILPOINT="gateway.prepared:2")
    path, half = "/v1/groups/shop/transactions", {"messages": [{"topic": "orders", "text": "x", "message_id": "o-1"}]}
    with httpx.Client(base_url=ready["http"], trust_env=False, timeout=60) as http:
        before = http.post(path, json=half).json()
        with pytest.raises(httpx.TransportError):
            http.post(path, json={"messages": [{"topic": "orders", "text": "y"}]}, headers={"Idempotency-Key": "o-2"})
    assert process.wait(60) == -signal.SIGKILL
    _, ready = start(*words)
    client = Client(ready["http"])
    assert client.ok(path, half) == before, "by message id"
    lost = client.prepare("shop", "orders", "y", **{"Idempotency-Key": "o-2"})
    with mq.connect(broker["url"]) as bus:
        open_ones = {transaction["id"] for transaction in bus.admin.transactions(state="open")}
    assert open_ones == {before["transaction_id"], lost}, "nothing was prepared twice"
    for transaction in open_ones:
        client.ok(f"{path}/{transaction}/commit")
    found: set[str] = set()
    while len(found) < 2:
        found |= {message["text"] for message in client.receive("c", "orders", wait=30)}
    assert found == {"x", "y"}
    client.http.close()


def test_stopping_ends_long_polls_at_once(start: Start, tmp_path: Path, eventually: Callable[..., Any]) -> None:
    _, broker = start("serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0")
    process, ready = start("gateway", "--url", broker["url"], "-l", "127.0.0.1:0")
    client = Client(ready["http"])
    client.receive("c", "t")
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.receive("c", "t", wait=30)))
    waiting.start()
    with mq.connect(broker["url"]) as bus:
        eventually(lambda: bus.admin.stats()[0]["parked_receives"] == 1)
        ended(process)
        waiting.join(60)
        assert answers == [[]]
        eventually(lambda: bus.admin.stats()[0]["parked_receives"] == 0)
    client.http.close()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("gateway", "--listen", "0.0.0.0:0"), 7, "--insecure"),
        (("gateway", "--listen", "nonsense"), 2, "BAD_URL"),
        (("gateway", "--url", "nonsense:", "--listen", "127.0.0.1:0"), 2, "BAD_URL"),
        (("gateway", "--ask", "shop"), 2, "GROUP=URL"),
        (("gateway", "--ask", "shop=gopher://a/"), 2, "BAD_URL"),
        (("gateway", "--config", "absent.toml"), 2, "absent.toml"),
        (("serve", "--folder", "new", "--http", "0.0.0.0:0"), 7, "--insecure"),
        (("serve", "--folder", "new", "--ask", "shop=http://a/"), 2, "--http"),
    ],
)
def test_commands_refuse_what_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, list(words))
    assert (done.exit_code, done.stdout) == (code, "")
    assert told in done.stderr


def test_without_the_packages_the_error_names_the_extra(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None\n"
        "import escrowmq.gateway as g\n"
        "from escrowmq.errors import Misuse\n"
        "g.verify, g.sign_answer\n"
        "try:\n    g.serve\nexcept Misuse as problem:\n    print(problem.code.name, problem.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("MISSING_PACKAGE"), done.stderr
    assert "escrowmq[http]" in done.stdout
