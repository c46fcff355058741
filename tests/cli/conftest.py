"""Running commands: in this process on a folder, or as real processes."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_runs import Ran, Run, Served
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli import halves, messages, options, reconcile
from escrowmq.cli.main import app
from escrowmq.overview import sources
from forked import Forked


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'data'}"


@pytest.fixture
def run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the folder of ``url``: exit code, standard output, standard error."""
    monkeypatch.setenv("ESCROWMQ_URL", url)
    monkeypatch.setenv("ESCROWMQ_PLANS", str(tmp_path / "plans"))
    monkeypatch.setenv("COLUMNS", "200")
    for module in (options, halves, messages, reconcile, sources):  # a busy machine may need long
        monkeypatch.setattr(module, "PATIENCE", 60.0)

    def runner(*words: str, input: bytes | None = None) -> Ran:
        result = CliRunner().invoke(app, list(words), input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return runner


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which somebody listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def made(url: str) -> None:
    """The folder of ``url`` holds a log, with nothing in it: commands that look make none."""
    with mq.connect(url):
        pass


@pytest.fixture
def bus(url: str) -> Iterator[mq.Bus]:
    with mq.connect(url) as opened:
        yield opened


@pytest.fixture
def undecided(bus: mq.Bus) -> Callable[[str], str]:
    """Prepare a half message, about which nobody asks within a test; its transaction id as printed."""
    producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)

    def prepare(key: str) -> str:
        body = b"body of " + key.encode()
        return str(producer.prepare("orders", body, key=key, check_immunity=3600.0).transaction_id)

    return prepare


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start ``escrowmq serve`` as a process on ``tmp_path/served``; returns when it has said that it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> Served:
        words = ["serve", "--folder", str(tmp_path / "served"), "--listen", "127.0.0.1:0", "--json", *options]
        process = Forked(
            [sys.executable, "-m", "escrowmq", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return Served(process, json.loads(line))

    yield start
    for process in started:
        process.kill()
        process.communicate()
