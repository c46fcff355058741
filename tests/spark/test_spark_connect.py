"""Format "escrow" over Spark Connect, without ``register``: read, SQL, write, and a stream that is exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_runs import numbers, send, visible
from killing import Broker, content

from escrowmq.platform.failpoints import TELL_VARIABLE, VARIABLE
from escrowmq_lab.servers.process import Server
from escrowmq_lab.servers.seam import Absent
from escrowmq_lab.servers.spark import connect_server

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("connect_program.py")
PACKAGES = Path(sys.prefix) / "connect"
"""Where ``make setup`` installs pandas, for these clients alone."""
POINTS = ("spark.prepared", "spark.after-decision")


@dataclass
class Connect:
    """A Connect server and a broker; ``told``: where the server's processes say that they stand still."""

    server: Server
    broker: Broker
    folder: Path

    @property
    def told(self) -> Path:
        return self.folder / "told"

    def start(self, what: str) -> subprocess.Popen[str]:
        """Start a client."""
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(PACKAGES)])
        command = [sys.executable, str(PROGRAM), what, self.server.url, self.broker.url, str(self.folder)]
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, what: str) -> None:
        """Run a client to its end."""
        client = self.start(what)
        said, _ = client.communicate()
        assert client.returncode == 0, said[-4000:]


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    if not (PACKAGES / "pandas").is_dir():
        text = f"Spark Connect needs pandas in {PACKAGES}: make setup"
        pytest.fail(text) if "CI" in os.environ else pytest.skip(text)
    folder = tmp_path_factory.mktemp("connect")
    (folder / "told").mkdir()
    try:
        server = connect_server(folder, {VARIABLE: ",".join(POINTS), TELL_VARIABLE: str(folder / "told")})
    except Absent as problem:
        pytest.fail(str(problem)) if "CI" in os.environ else pytest.skip(str(problem))
    for point in POINTS:
        (folder / "told" / f"{point}.told").touch()  # nobody stands still yet
    broker = Broker(folder / "data", "--check-interval", "1s", "--check-max", "1000")
    try:
        server.start()
        send(broker.url, 0, 5)
        yield Connect(server, broker, folder)
    finally:
        server.stop()
        broker.kill()


def test_a_client_reads_in_python_and_sql_and_writes_once(connect: Connect) -> None:
    connect.run("batch")
    assert visible(connect.broker.url, "out") == numbers(0, 5)


def test_a_client_may_register_its_own_class(connect: Connect) -> None:
    connect.run("registered")


def test_errors_of_the_source_come_to_the_client(connect: Connect) -> None:
    connect.run("refused")


@pytest.mark.long
def test_a_stream_is_exactly_once_though_client_and_server_are_killed(
    connect: Connect, eventually: Callable[..., Any]
) -> None:
    """The client while its query runs, which goes on without it; the server when the broker has decided a batch and the
    checkpoint does not know."""
    send(connect.broker.url, 0, 40, "orders")
    for point in POINTS:
        (connect.told / f"{point}.told").unlink()
    client = connect.start("stream")
    prepared, decided = (connect.told / point for point in POINTS)
    eventually(lambda: prepared.exists() or client.poll() is not None, 300)
    assert client.poll() is None, client.communicate()[0]
    client.kill()
    client.communicate()
    prepared.unlink()
    eventually(decided.exists, 300)
    assert not (connect.folder / "checkpoint" / "commits" / "0").exists()
    assert len(visible(connect.broker.url, "loud")) == 10
    connect.server.kill()
    decided.unlink()
    connect.server.start()
    connect.run("stream")
    assert content(connect.broker.url, "loud") == {(str(n), b"%d" % n): 1 for n in range(40)}
