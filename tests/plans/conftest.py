"""An embedded broker with dead letters and undecided transactions, and a folder for plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import escrowmq as mq
from escrowmq.plans import Plans


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[mq.Bus]:
    with mq.connect(f"file:{tmp_path / 'data'}", check_interval=600.0, transaction_timeout=600.0) as opened:
        yield opened


@pytest.fixture
def plans(tmp_path: Path) -> Plans:
    return Plans(tmp_path / "plans")


@pytest.fixture
def prepared(bus: mq.Bus) -> Callable[[int], list[str]]:
    """Prepare undecided transactions; their ids."""
    producer = bus.producer("payments", checker=lambda check: mq.UNKNOWN)

    def prepare(count: int) -> list[str]:
        receipts = producer.prepare_batch([mq.Message("bills", b"%d" % number) for number in range(count)])
        return [str(receipt.transaction_id) for receipt in receipts]

    return prepare
