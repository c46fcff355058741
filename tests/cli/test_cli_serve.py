"""``escrowmq serve`` as a real process, and commands against it as real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Run, Served

import escrowmq as mq
from escrowmq.cli.failures import Exit

DOCS = Path(__file__).parent.parent.parent / "docs"
Serve = Callable[..., Served]


def command(*words: str, url: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ESCROWMQ_URL": url}
    words = (sys.executable, "-m", "escrowmq", *words)
    return subprocess.run(words, env=environment, input=input, capture_output=True, text=True)


def test_a_served_broker_serves_commands_and_stops_cleanly(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    assert set(served.ready) == {"url", "socket", "metrics", "folder", "shard", "epoch", "pid"}
    assert served.ready["pid"] == served.process.pid
    sent = command("send", "orders", "-", "--key", "o-1", "--json", url=served.url, input="from a pipe")
    assert sent.returncode == 0, sent.stderr
    shown = command("tail", "orders", "--json", url=served.url)
    assert json.loads(shown.stdout)["body"] == "from a pipe"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait() == 0
    again = serve()
    assert again.ready["epoch"] > served.ready["epoch"]
    assert json.loads(command("tail", "orders", "--json", url=again.url).stdout)["key"] == "o-1"


def test_ctrl_c_is_a_clean_stop(serve: Serve) -> None:
    served = serve()
    served.process.send_signal(signal.SIGINT)
    out, err = served.process.communicate()
    assert (served.process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_metrics_and_health_are_served(serve: Serve) -> None:
    served = serve("--metrics", "127.0.0.1:0")
    with urllib.request.urlopen(f"{served.ready['metrics']}/metrics") as answer:
        told = answer.read().decode()
    of_brokers = (DOCS / "reference" / "metrics.md").read_text().partition("## A relay and its table")[0]
    documented = re.findall(r"`(escrowmq_\w+)`", of_brokers)
    assert documented
    assert [name for name in documented if f"# TYPE {name} " not in told] == []


def test_settings_come_from_flags_over_environment_over_file(
    serve: Serve, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "broker.toml"
    config.write_text("[broker]\ndefault_queues = 2\nmax_queues = 7\nmax_key_bytes = 3\n")
    monkeypatch.setenv("ESCROWMQ_DEFAULT_QUEUES", "3")
    monkeypatch.setenv("ESCROWMQ_MAX_QUEUES", "8")
    served = serve("--config", str(config), "--max-queues", "9", "--auto-create-topics", "off")
    monkeypatch.setenv("ESCROWMQ_URL", served.url)
    made = run("topics", "create", "orders", "--json")
    assert made.json[0]["queues"] == 3, "the environment wins over the file"
    assert run("topics", "create", "many", "--queues", "10").code == Exit.REJECTED
    assert run("topics", "create", "many", "--queues", "9").code == 0, "a flag wins over both"
    assert "KEY_TOO_LARGE" in run("send", "orders", "x", "-k", "long").err
    assert "UNKNOWN_TOPIC" in run("send", "unheard-of", "x").err


def test_tail_follows_and_ends_with_ctrl_c(serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setenv("ESCROWMQ_URL", served.url)
    run("topics", "create", "orders")
    words = [sys.executable, "-m", "escrowmq", "tail", "orders", "--follow", "--json", "--from-start"]
    following = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        for number in range(3):
            run("send", "orders", f"m{number}")
            assert json.loads(following.stdout.readline())["body"] == f"m{number}"
        following.send_signal(signal.SIGINT)
        _, err = following.communicate()
        assert (following.returncode, err) == (Exit.INTERRUPTED, "")
    finally:
        following.kill()
        following.communicate()


def test_tail_follows_dead_letters(serve: Serve) -> None:
    served = serve()
    with mq.connect(served.url) as bus, bus.consumer("cart", "orders", max_attempts=1) as cart:

        def fail(body: bytes) -> None:
            bus.producer("p").send("orders", body)
            next(iter(cart)).nack()
            cart.flush()

        fail(b"one")
        words = [sys.executable, "-m", "escrowmq", "tail", "%dead-letters.cart", "--follow", "--json", "-u", served.url]
        following = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert following.stdout is not None
            assert json.loads(following.stdout.readline())["body"] == "one"
            for body in ("two", "three"):
                fail(body.encode())
                assert json.loads(following.stdout.readline())["body"] == body
            following.send_signal(signal.SIGINT)
            _, err = following.communicate()
            assert (following.returncode, err) == (Exit.INTERRUPTED, "")
        finally:
            following.kill()
            following.communicate()


def test_a_folder_in_use_is_said_to_be(serve: Serve, run: Run, tmp_path: Path) -> None:
    serve()
    for words in (("serve", "--folder", f"{tmp_path}/served"), ("topics", "list", "-u", f"file:{tmp_path}/served")):
        second = run(*words)
        assert (second.code, "FOLDER_IN_USE" in second.err) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--listen", "nonsense"], Exit.USAGE, "BAD_URL"),
        (["--listen", "0.0.0.0:0"], Exit.DENIED, "--insecure"),
        (["--check-max", "0"], Exit.USAGE, "check_max = 0"),
        (["--check-interval", "soon"], Exit.USAGE, "check_interval = 'soon'"),
        (["--mixed-groups", "maybe"], Exit.USAGE, "mixed_groups = 'maybe'"),
        (["--config", "absent.toml"], Exit.USAGE, "absent.toml"),
        (["--no-such-setting", "1"], Exit.USAGE, "--no-such-setting"),
    ],
)
def test_serve_refuses_what_makes_no_sense(run: Run, tmp_path: Path, options: list[str], code: Exit, told: str) -> None:
    ran = run("serve", "--folder", str(tmp_path / "new"), *options)
    assert (ran.code, told in ran.err) == (code, True), ran


def test_a_silent_broker_is_unknown_after_a_while(monkeypatch: pytest.MonkeyPatch, run: Run, silent: str) -> None:
    monkeypatch.setattr("escrowmq.cli.options.PATIENCE", 0.2)
    ran = run("topics", "list", "--url", f"escrow://{silent}")
    assert ran.code == Exit.UNKNOWN
    assert ran.out == ""


@pytest.mark.parametrize("is_abstract", [False, pytest.param(True, marks=pytest.mark.verify)])
def test_systemd_is_notified_when_the_broker_answers_and_when_it_stops(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    """``Type=notify``: by a path, or a name in Linux's abstract namespace."""
    name = f"\0escrowmq-{tmp_path}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        served = serve()
        ready = manager.recv(4096).decode().splitlines()
        assert ready == ["READY=1", f"STATUS=serving {served.ready['folder']} at {served.url}"]
        assert command("topics", "list", url=served.url).returncode == 0
        served.process.send_signal(signal.SIGTERM)
        assert manager.recv(4096) == b"STOPPING=1"
        assert served.process.wait() == 0


def test_a_service_manager_that_is_away_does_not_stop_the_broker(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    served = serve()
    served.process.send_signal(signal.SIGTERM)
    _, errors = served.process.communicate()
    assert served.process.returncode == 0
    assert "the service manager was not notified of READY=1" in errors
