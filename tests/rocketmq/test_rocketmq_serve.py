"""``escrowmq serve --rocketmq``: a broker and the gateway for RocketMQ clients in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rocketmq_runs import RawClient

import escrowmq as mq
from forked import Forked, run


def test_a_broker_serves_rocketmq_clients_in_its_own_process(
    connect: Callable[..., RawClient], tmp_path: Path, topic: str
) -> None:
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0", "--json"]
    process = Forked([*command, "--rocketmq", "127.0.0.1:0", "--fifo", "fifo-*"], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    raw = connect(ready["rocketmq"])
    raw.send(raw.message(topic, b"by gRPC"))
    with mq.connect(ready["url"]) as bus:
        bus.producer("plain").send(topic, b"by socket")
        messages = bus.consumer("own", topic).messages()
        assert {next(messages).body, next(messages).body} == {b"by gRPC", b"by socket"}
    other = connect(ready["second"])
    found: list[bytes] = []
    while len(found) < 2:
        found += [one.body for one in other.receive("fifo-cart", topic)]
    assert sorted(found) == [b"by gRPC", b"by socket"]
    process.terminate()
    _, logged = process.communicate(timeout=60)
    assert process.returncode == 0, logged
    assert "Traceback" not in logged, logged


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--rocketmq", "0.0.0.0:0"), 7, "--insecure"),
        (("--fifo", "cart"), 2, "--rocketmq"),
        (("--access-keys", "keys.toml"), 2, "--rocketmq"),
        (("--rocketmq", "127.0.0.1:0", "--access-keys", "none.toml"), 2, "none.toml"),
    ],
)
def test_options_that_do_not_fit(words: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(tmp_path / "data"), "-l", "127.0.0.1:0", *words]
    done = run(command, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
