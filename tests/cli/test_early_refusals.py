"""What cannot work is said before the work begins, in one line: an address at which nobody listens, a folder that
cannot be written.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Run

from escrowmq.cli import options
from escrowmq.cli.options import check_reachable

COMMANDS = [
    ["topics", "list"],
    ["status"],
    ["find", "o-1"],
    ["send", "orders", "x"],
    ["tail", "orders"],
    ["groups", "list"],
    ["transactions", "list"],
    ["dead-letters", "list", "cart"],
    ["acts", "list"],
    ["writers", "list"],
    ["lookup", "o-1"],
    ["step-down"],
    ["report", "--out", "page"],
    ["backup", "--to", "copy"],
]


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """A socket with an address that refuses connections: bound, so that no other process gets it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def nobody(reserved: socket.socket) -> str:
    return f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_an_address_that_refuses_connections_is_one_line(
    run: Run, nobody: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*words, "--url", f"escrow://{nobody}")
    assert ran.code == 5
    assert ran.out == ""
    first, hint = ran.err.splitlines()
    assert first == f"BROKER_AWAY: no broker answers at {nobody}: connection refused"
    assert "escrowmq serve" in hint


def test_every_address_is_named(run: Run, nobody: str) -> None:
    ran = run("topics", "list", "--url", f"escrow://{nobody}|no-such-host.invalid:7700")
    assert f"{nobody}: connection refused; no-such-host.invalid:7700: no such host" in ran.err


def test_a_broker_that_is_just_starting_is_waited_for(
    reserved: socket.socket, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens as soon as the command was refused once, and pauses."""
    monkeypatch.setattr(options, "REFUSED_SECONDS", 60.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: reserved.listen())
    check_reachable(f"escrow://{nobody}")


@pytest.mark.parametrize(
    "words", [["report", "--out"], ["reconcile", "--half", "h", "--commits", "c", "--out"]], ids=lambda words: words[0]
)
def test_a_folder_that_cannot_be_written_is_refused_before_spark_starts(
    run: Run, tmp_path: Path, made: None, url: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setattr("escrowmq.pipeline.session.local_session", lambda *_, **__: pytest.fail("Spark started"))
    ran = run(*words, str(file / "below"), "--url", url)
    assert ran.code == 2
    assert ran.err.startswith("BAD_ARGUMENT: --out: nothing can be written into ")


@pytest.mark.parametrize(
    "words", [["delete", "nosuch"], ["alter", "nosuch", "--queues", "9"]], ids=lambda words: words[0]
)
def test_nobody_is_advised_to_create_the_topic_that_is_deleted(run: Run, made: None, words: list[str]) -> None:
    ran = run("topics", *words)
    assert ran.code == 3
    assert "UNKNOWN_TOPIC" in ran.err
    assert "topics list" in ran.err
    assert "topics create" not in ran.err


@pytest.mark.parametrize("why", ["", "  "])
def test_a_reason_without_a_word_is_refused(run: Run, made: None, why: str) -> None:
    ran = run("topics", "delete", "orders", "--why", why)
    assert (ran.code, ran.err.splitlines()[0]) == (2, "BAD_ARGUMENT: --why gives no reason")


def test_a_port_in_use_is_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        for words in (["--listen", at], ["--listen", "127.0.0.1:0", "--metrics", at]):
            command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(tmp_path / "data"), *words]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ran.returncode == 2
            first, hint = ran.stderr.splitlines()
            assert first.startswith(f"BAD_URL: cannot listen on {at}: ")
            assert hint == "hint: is the port in use?"
            assert not (tmp_path / "data").exists()
