"""A served broker with few descriptors and a crowd of connections that say nothing, or half of something: it serves
on."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from served import Client

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq.schemas import OUTGOING
from escrowmq.wire import frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame_start
from escrowmq.wire.frames.rows import encoder

DESCRIPTORS = 160
CROWD = 200


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A broker, HTTP for metrics and a gateway in one process that may have few descriptors, and no more."""
    folder = tmp_path_factory.mktemp("crowds") / "data"
    flags = ["-l", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0", "--segment-bytes", "64KiB"]
    command = [sys.executable, "-m", "escrowmq", "serve", "--json", "-d", str(folder), "--snapshot-bytes", "64KiB"]
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS // 2, DESCRIPTORS)),
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def polite(broker: dict[str, Any], count: int) -> None:
    """What clients do, each over connections of its own: messages that need new segments and snapshots, pages, HTTP."""
    for _ in range(count):
        with mq.connect(broker["url"]) as bus:
            assert bus.producer("plain", timeout=60.0).send("t", bytes(40_000)).position >= 0
        for page in (broker["metrics"] + "/readyz", broker["http"] + "/healthz"):
            with urllib.request.urlopen(page) as answer:
                assert answer.status == 200


@pytest.mark.invariant("I35")
@pytest.mark.parametrize(
    ("port", "said"),
    [
        ("url", b"PRI * HTTP/2.0"),
        ("metrics", b"GET /metrics HTTP/1.1\r\nHo"),
        ("http", b""),
        ("http", b"GET /healthz HTTP/1.1\r\nHost: "),
        ("url", b""),
        ("url", frames.hello()[:7]),
        ("url", frames.hello()),
    ],
)
def test_a_crowd_that_says_nothing_keeps_nobody_from_being_served(
    broker: dict[str, Any], port: str, said: bytes
) -> None:
    host, number = broker[port].partition("://")[2].split(":")
    with ExitStack() as crowd:
        for _ in range(CROWD):
            connection = crowd.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, int(number)))
            try:
                connection.send(said)
            except OSError:
                pass  # it waits to be accepted, or was closed already
        polite(broker, 6)
    polite(broker, 1)


def test_the_soft_limit_of_descriptors_is_raised_but_for_a_reserve(broker: dict[str, Any]) -> None:
    assert resource.prlimit(broker["pid"], resource.RLIMIT_NOFILE) == (DESCRIPTORS - 32, DESCRIPTORS)


def most_memory(broker: dict[str, Any]) -> int:
    """The most bytes that the broker's process ever had in memory."""
    status = Path(f"/proc/{broker['pid']}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.invariant("I35")
def test_a_compressed_batch_is_refused_before_it_becomes_anything(broker: dict[str, Any]) -> None:
    polite(broker, 1)
    before = most_memory(broker)
    row = [pa.nulls(1, field.type) for field in OUTGOING]
    row[OUTGOING.get_field_index("body")] = pa.array([bytes(300 << 20)], pa.binary())
    bomb = pa.RecordBatch.from_arrays(row, schema=OUTGOING)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, OUTGOING, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(bomb)
    message = sink.getvalue().to_pybytes()[OUTGOING.serialize().size : -8]
    with Client(port_of(broker)) as client:
        head = encoder.encode((int(Kind.SEND), encoder.encode({})))
        client.send(frame_start(Kind.COLUMNS, 77, len(message), head), message)
        assert client.answer(77).code is Code.BAD_BATCH
    assert most_memory(broker) - before < 100 << 20
    polite(broker, 1)


def test_a_message_without_an_end_is_not_gathered(broker: dict[str, Any]) -> None:
    """One that announces more than a request may have is refused by its header."""
    polite(broker, 1)
    before = most_memory(broker)
    with Client(port_of(broker)) as client:
        client.send(frame_start(Kind.SEND, 5, 700 << 20), bytes(1 << 20))
        refusals = [frames.read_refusal(one).code for one in client.closed()]
    assert refusals == [Code.BATCH_TOO_LARGE]
    assert most_memory(broker) - before < 50 << 20
    polite(broker, 1)


def port_of(broker: dict[str, Any]) -> int:
    return int(broker["url"].rpartition(":")[2])
