"""``escrowmq serve`` as a real process, and commands against it as real processes."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Run, Served

from escrowmq.cli.failures import Exit

Serve = Callable[..., Served]


def command(*words: str, url: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ESCROWMQ_URL": url}
    words = (sys.executable, "-m", "escrowmq", *words)
    return subprocess.run(words, env=environment, input=input, capture_output=True, text=True)


def test_a_served_broker_serves_commands_and_stops_cleanly(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    assert set(served.ready) == {"url", "metrics", "folder", "shard", "epoch", "pid"}
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
        assert b"escrowmq_" in answer.read()


def test_settings_come_from_flags_over_environment_over_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "broker.toml"
    config.write_text("[broker]\ndefault_queues = 2\nmax_queues = 7\nmax_key_bytes = 3\n")
    monkeypatch.setenv("ESCROWMQ_DEFAULT_QUEUES", "3")
    monkeypatch.setenv("ESCROWMQ_MAX_QUEUES", "8")
    served = serve("--config", str(config), "--max-queues", "9", "--auto-create-topics", "off")
    made = command("topics", "create", "orders", "--json", url=served.url)
    assert json.loads(made.stdout)[0]["queues"] == 3, "the environment wins over the file"
    assert command("topics", "create", "many", "--queues", "10", url=served.url).returncode == Exit.REJECTED
    assert command("topics", "create", "many", "--queues", "9", url=served.url).returncode == 0
    assert "KEY_TOO_LARGE" in command("send", "orders", "x", "-k", "long", url=served.url).stderr
    assert "UNKNOWN_TOPIC" in command("send", "unheard-of", "x", url=served.url).stderr


def test_tail_follows_and_ends_with_ctrl_c(serve: Serve) -> None:
    served = serve()
    command("topics", "create", "orders", url=served.url)
    words = [sys.executable, "-m", "escrowmq", "tail", "orders", "--follow", "--json", "--from-start", "-u", served.url]
    following = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        for number in range(3):
            command("send", "orders", f"m{number}", url=served.url)
            assert json.loads(following.stdout.readline())["body"] == f"m{number}"
        following.send_signal(signal.SIGINT)
        _, err = following.communicate()
        assert (following.returncode, err) == (Exit.INTERRUPTED, "")
    finally:
        following.kill()
        following.communicate()


def test_a_folder_in_use_is_said_to_be(serve: Serve, tmp_path: Path) -> None:
    serve()
    second = command("serve", "--folder", str(tmp_path / "served"), "--listen", "127.0.0.1:0", url="")
    assert (second.returncode, "FOLDER_IN_USE" in second.stderr) == (Exit.USAGE, True)


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


def test_no_broker_is_unknown_after_a_while(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("escrowmq.cli.options.PATIENCE", 0.2)
    ran = run("topics", "list", "--url", "escrow://127.0.0.1:1")
    assert ran.code == Exit.UNKNOWN
    assert ran.out == ""
