"""Folders to back up: made once, by a real broker, and copied for each test."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import escrowmq as mq

SEGMENT = 1 << 14


def fill(bus: mq.Bus, count: int, start: int = 0) -> None:
    producer = bus.producer("p")
    messages = [mq.Message("t", b"%06d" % n + b"." * 300, key=f"k{n}") for n in range(start, start + count)]
    for at in range(0, count, 10):
        producer.send_batch(messages[at : at + 10])


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several segments, a base, a snapshot, a group, undecided transactions, a record of acts."""
    folder = tmp_path_factory.mktemp("kept") / "data"
    options = {"segment_bytes": SEGMENT, "default_queues": 2}
    with mq.connect(f"file:{folder}", **options) as bus:
        fill(bus, 100)
    with mq.connect(
        f"file:{folder}", **options, retention=1.0
    ):  # it is looked for what is older a second after the start
        deadline = time.monotonic() + 60
        while not list(folder.glob("base-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with mq.connect(f"file:{folder}", **options) as bus:
        fill(bus, 100, start=100)
        shop = bus.producer("shop", unasked=True)
        ids = [shop.prepare("t", b"half %d" % n).transaction_id for n in range(3)]
        shop.commit(ids[0])
        bus.admin.rollback(ids[1], why="so")
        with bus.consumer("g", "t") as consumer:
            for message in consumer.receive(5, wait=60.0):
                message.ack()
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "data"))


@pytest.fixture
def again() -> Callable[[Path, int, int], None]:
    """More messages for a folder."""

    def write(folder: Path, count: int, start: int) -> None:
        with mq.connect(f"file:{folder}", segment_bytes=SEGMENT, default_queues=2) as bus:
            fill(bus, count, start)

    return write
