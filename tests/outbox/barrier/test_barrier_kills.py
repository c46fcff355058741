"""The shop killed between every two steps: a message is seen if and only if its order stands, by id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import barrier_shop
import pytest
import sqlalchemy as sa
from barrier_race import orders

import escrowmq as mq
import forked
from escrowmq.outbox import Barrier
from forked import Forked

POINTS = (
    "shop.prepared:3",
    "barrier.bound:2",
    "barrier.bound:3",
    "shop.committed:2",
    "transaction.told:2",
    "barrier.closed",
)
"""After the prepare; after the mark, of an order that would commit and of one that would go back; after the database's
commit; before the broker's COMMIT; after the barrier's own mark, before its answer.
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker in a process of its own."""
    folder = tmp_path_factory.mktemp("served") / "broker"
    flags = [part for name, value in barrier_shop.QUICK.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "escrowmq", "serve", "--json", "-d", str(folder), "-l", "127.0.0.1:0", *flags]
    with Forked(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def run(broker: str, shop: sa.Engine, topic: str, point: str, first: int, count: int) -> int:
    """A shop process, and how it ended."""
    url = shop.url.render_as_string(hide_password=False)
    command = [sys.executable, "-W", "error", barrier_shop.__file__, broker, url, topic, str(first), str(count)]
    return forked.run(command, env={**os.environ, "ESCROWMQ_FAILPOINT": point}).returncode


def judge(broker: str, shop: sa.Engine, topic: str, eventually) -> tuple[set[int], set[int]]:
    """Let the check-back settle everything; (orders that stand, messages that are seen)."""
    with mq.connect(broker, **(barrier_shop.QUICK if broker.startswith("file:") else {})) as bus:
        bus.producer(topic, checker=Barrier(shop))
        eventually(lambda: not bus.admin.transactions(state="open", group=topic), 120)
        assert not bus.admin.transactions(state="parked", group=topic)
        with shop.connect() as connection:
            placed = set(connection.scalars(sa.select(orders.c.id)))
        consumer, seen = bus.consumer(topic, [topic]), []
        while len(seen) < len(placed):
            found = consumer.receive(100, wait=60.0)
            assert found, f"of {sorted(placed)} only {sorted(seen)} were seen"
            seen += [int(message.body) for message in found]
            for message in found:
                message.ack()
        seen += [int(message.body) for message in consumer.receive(100, wait=0.05)]
        assert len(seen) == len(set(seen))
        return placed, set(seen)


def killed_at(point: str, broker: str, shop: sa.Engine, eventually) -> None:
    topic = f"t-{uuid.uuid4().hex[:8]}"
    assert run(broker, shop, topic, point, 0, 9) == -signal.SIGKILL
    placed, seen = judge(broker, shop, topic, eventually)
    assert placed == seen
    assert placed <= {0, 1, 3, 4, 6, 7}
    assert len(placed) == (1 if point == "barrier.bound:2" else 2)  # it died where it was told to


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", POINTS)
def test_killed_with_the_broker_inside(tmp_path: Path, shop, point, eventually):
    killed_at(point, f"file:{tmp_path / 'broker'}", shop, eventually)


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("point", ["barrier.bound:2", "shop.committed:2", "transaction.told:2", "barrier.closed"])
def test_killed_beside_a_served_broker(served, shop, point, eventually):
    killed_at(point, served, shop, eventually)


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
@pytest.mark.parametrize("point", ["barrier.bound:2", "shop.committed:2"])
def test_killed_over_mariadb(served, shop, point, eventually):
    killed_at(point, served, shop, eventually)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["embedded", "served"])
def test_killed_everywhere_over_everything(tmp_path: Path, request, shop, kind, point, eventually):
    broker = f"file:{tmp_path / 'broker'}" if kind == "embedded" else request.getfixturevalue("served")
    killed_at(point, broker, shop, eventually)
