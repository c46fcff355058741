"""``escrowmq dev``: broker, HTTP and console from one command, which Ctrl-C stops."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit
from forked import Forked

FREE = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--console", "127.0.0.1:0")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Start]:
    """Start ``escrowmq dev`` in ``tmp_path``."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "escrowmq", "dev", *FREE, *options]
        pipe = subprocess.PIPE
        started.append(Forked(words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_everything_answers_and_ctrl_c_stops_it(dev: Start, tmp_path: Path) -> None:
    process = dev("--json")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    for page in (ready["console"], f"{ready['http']}/docs"):
        with urllib.request.urlopen(page) as answer:
            assert answer.status == 200
    with mq.connect(ready["url"]) as bus:
        bus.producer("p").send("orders", b"one")
    assert list((tmp_path / "escrow-data").glob("*.segment"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
    with mq.connect(f"file:{tmp_path / 'escrow-data'}") as bus:
        assert [topic["name"] for topic in bus.admin.topics()] == ["orders"]


def test_the_commands_that_it_prints_show_a_half_message(dev: Start, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    process = dev()
    assert process.stderr is not None
    printed = ""
    while "escrowmq commit" not in printed:
        line = process.stderr.readline()
        assert line, printed
        printed += line
    monkeypatch.delenv("ESCROWMQ_URL")
    prepare, tail, commit = (shlex.split(line)[1:] for line in re.findall(r"^  escrowmq .*", printed, re.MULTILINE))
    assert (prepare[0], tail[0], commit[0]) == ("prepare", "tail", "commit")
    assert run(*prepare).code == 0
    assert run(*tail).out == ""
    assert run(*commit).code == 0
    assert "one book" in run(*tail).out


@pytest.mark.parametrize("option", ["--listen", "--http", "--console"])
def test_other_machines_cannot_reach_it(run: Run, tmp_path: Path, option: str) -> None:
    refused = run("dev", "--folder", str(tmp_path / "refused"), *FREE, option, "0.0.0.0:0")
    assert refused.code == Exit.USAGE
    assert f"{option} 0.0.0.0:0" in refused.err
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("option", ["--listen", "--http", "--console"])
def test_a_port_in_use_is_named(dev: Start, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = dev(option, address)
        _, err = process.communicate()
    assert process.returncode == Exit.USAGE
    assert f"cannot listen on {address}" in err
    assert "Traceback" not in err
