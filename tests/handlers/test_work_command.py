"""``escrowmq work``: its processes, signals, health, metrics, and poison messages."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from handler_world import HERE, Service
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app as command
from escrowmq_lab.servers import escrow
from escrowmq_lab.servers.process import free_port


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with escrow.serving(tmp_path_factory.mktemp("broker")) as server:
        yield server.url


@pytest.fixture
def bus(url: str) -> Iterator[mq.Bus]:
    with mq.connect(url) as bus:
        yield bus


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_sigterm_finishes_what_runs_and_gives_back_the_rest(tmp_path: Path, bus: mq.Bus, url: str) -> None:
    """The lease is ten minutes: the others come at once, while the first one still runs."""
    with Service(tmp_path, "work", "slowly:app", url, SLOWLY=str(tmp_path)) as service:
        producer = bus.producer("p")
        for name in "abc":
            producer.send("slow", name.encode(), queue=0)
        wait_for(tmp_path / "a.begun")
        service.process.send_signal(signal.SIGTERM)
        with bus.consumer("slow", "slow") as other:
            came = []
            for message in other:
                came.append((message.body, message.attempt))
                message.ack()
                if len(came) == 2:
                    break
        (tmp_path / "go").touch()
        assert service.process.wait() == 0
        assert came == [(b"b", 1), (b"c", 1)]
        assert (tmp_path / "a.done").exists()
        log = service.log.read_text()
        assert "wait slow/0@0: acked in " in log
        (group,) = [group for group in bus.admin.groups() if group["name"] == "slow"]
        assert group["leases"] == 0


def test_a_poison_message_is_dead_with_its_traceback_and_comes_again(tmp_path: Path, bus: mq.Bus, url: str) -> None:
    """By the command; ``tests/console/test_console_handlers.py`` does it in the console."""
    with Service(tmp_path, "work", "slowly:app", url, SLOWLY=str(tmp_path)) as service:
        bus.producer("p").send("poison", b"hemlock")
        while not (found := bus.admin.dead_letters("poison") if _has_group(bus, "poison") else []):
            time.sleep(0.02)
        cause = found[0]["cause"]
        assert cause.startswith("ValueError: hemlock is poison\n")
        assert f'File "{HERE}/slowly.py", line ' in cause
        assert 'raise ValueError(f"{body} is poison")' in cause
        (tmp_path / "antidote").touch()
        ran = CliRunner().invoke(command, ["dead-letters", "retry", "poison", "--all", "--yes", "--url", url])
        assert ran.exit_code == 0, ran.output
        wait_for(tmp_path / "swallowed")
        assert service.terminate() == 0
        assert bus.admin.dead_letters("poison") == []


def _has_group(bus: mq.Bus, name: str) -> bool:
    return any(group["name"] == name for group in bus.admin.groups())


def test_processes_share_a_health_and_metrics_and_end_with_their_parent(tmp_path: Path, bus: mq.Bus, url: str) -> None:
    port, health = free_port(), tmp_path / "both.health"
    (tmp_path / "go").touch()
    flags = ("--processes", "2", "--metrics", f"127.0.0.1:{port}")
    with Service(tmp_path, "both", "slowly:app", url, *flags, SLOWLY=str(tmp_path)) as service:
        bus.producer("p").send("slow", b"one")
        wait_for(tmp_path / "one.done")
        while not _is_healthy(port):  # after a process has stood still
            time.sleep(0.02)
        while 'escrowmq_handler_messages_total{handler="wait",outcome="acked"}' not in _read(port):
            time.sleep(0.02)
        children = [
            int(pid)
            for pid in Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
        ]
        assert len(children) == 2
        Path(f"/proc/{children[0]}").stat()
        service.kill()
        while any(_runs(pid) for pid in children):  # nobody tells them but their standard input
            time.sleep(0.02)
        assert health.exists(), "what a killed process leaves is stale after seconds"


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            return b'"ok"' in answer.read()
    except HTTPError as problem:
        problem.close()
        return False


def _read(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()


def _runs(pid: int) -> bool:
    try:
        return "escrowmq" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_process_that_dies_starts_again_and_a_changed_file_restarts_all(
    tmp_path: Path, bus: mq.Bus, url: str
) -> None:
    (tmp_path / "reloaded.py").write_text(APP.format(word="old"))
    with Service(tmp_path, "one", "reloaded:app", url, "--reload", FOLDER=str(tmp_path)) as service:
        producer = bus.producer("p")
        producer.send("reload", b"1")
        wait_for(tmp_path / "1.old")
        (child,) = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
        subprocess.run(["kill", "-9", child], check=True)
        producer.send("reload", b"2")
        wait_for(tmp_path / "2.old")
        (tmp_path / "reloaded.py").write_text(APP.format(word="newer"))
        while "receiving from" not in service.log.read_text().partition("files changed")[2]:
            time.sleep(0.02)  # until then the process with the old file may take the next message
        producer.send("reload", b"3")
        wait_for(tmp_path / "3.newer")
        assert service.terminate() == 0


APP = """
import os, pathlib
from escrowmq.handlers import App
app = App()
@app.handler("reload", group="reload", lease=2.0)
def touch(name: str) -> None:
    pathlib.Path(os.environ["FOLDER"], name + ".{word}").touch()
"""


@pytest.mark.parametrize(
    ("app", "text"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("slowly:other", "slowly.other is no App hint: it has app"),
        ("broken:app", "its first parameter has no annotation"),
    ],
)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_wrong_use_ends_at_once(tmp_path: Path, url: str, app: str, text: str, processes: str) -> None:
    (tmp_path / "broken.py").write_text(
        "from escrowmq.handlers import App\napp = App()\n@app.handler('t', group='g')\ndef handle(body): ...\n"
    )
    (tmp_path / "slowly.py").write_text("from escrowmq.handlers import App\napp = App()\n")
    words = [sys.executable, "-m", "escrowmq", "work", app, "--url", url, "--processes", processes]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert ran.returncode == 2, ran.stderr
    assert text in " ".join(ran.stderr.split())
