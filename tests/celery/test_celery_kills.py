"""A task is sent, and has its effect, if and only if the database committed, by id: with the process killed between any
two of its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import placing_orders
import pytest
import sqlalchemy as sa
from celery_world import until
from placing_orders import Effect, Order

import escrowmq as mq
from escrowmq_lab.servers.process import Server
from zygote import Zygote

WORKER_STEPS = 12
"""More than a worker takes for a task."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(Path(placing_orders.__file__))
    yield zygote
    zygote.close()


def test_a_task_has_its_effect_if_and_only_if_its_order_was_committed(
    engine: sa.Engine, broker: Server, zygote: Zygote, tmp_path: Path
) -> None:
    placing_orders.make_tables(engine)
    own = {"database_url": engine.url.render_as_string(hide_password=False), "broker_url": broker.url}
    log = tmp_path / "children.log"
    kills = 0
    for die_at in range(1, 1000):
        code = zygote.wait(zygote.start("place", log=log, run=die_at, die_at=die_at, **own))
        assert code in (0, -signal.SIGKILL), log.read_text()
        if code == 0:
            break
        kills += 1
    assert kills > 10, "every statement, commit and publish is a step"
    for run in range(1000, 1000 + 2 * WORKER_STEPS):  # so that each worker has enough to do
        assert zygote.wait(zygote.start("place", log=log, run=run, die_at=0, **own)) == 0, log.read_text()

    with engine.connect() as connection:
        committed = set(connection.scalars(sa.select(Order.id)))
    for die_at in (1, 2, 0):
        code = zygote.wait(zygote.start("relay", log=log, die_at=die_at, **own))
        assert code == (-signal.SIGKILL if die_at else 0), log.read_text()
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(sa.table("trans_message"))) == 0
    assert {f"{kills + 1}-{number}" for number in range(2)} & committed == {f"{kills + 1}-1"}
    with mq.connect(broker.url) as bus:
        sent = bus.admin.read("celery").read_all().column("properties").to_pylist()
        bodies = bus.admin.read("celery").read_all().column("body").to_pylist()
        bus.consumer("celery", "celery", max_attempts=50).close()  # more than all kills and lost leases together
    assert {dict(properties)["task"] for properties in sent} == {"ship"}
    assert sorted(order_of(body) for body in bodies) == sorted(committed), "each once, by id"

    for die_at in range(1, WORKER_STEPS):
        code = zygote.wait(zygote.start("work", log=log, die_at=die_at, **own))
        assert code == -signal.SIGKILL, log.read_text()
    worker = zygote.start("work", log=log, die_at=0, **own)
    until(lambda: effects(engine) >= len(committed), "an effect of each order")
    os.kill(worker, signal.SIGTERM)
    assert zygote.wait(worker) == 0, log.read_text()
    with engine.connect() as connection:
        assert sorted(connection.scalars(sa.select(Effect.order_id))) == sorted(committed)


def order_of(body: bytes) -> str:
    """The order that a task is about: the first of its arguments."""
    import json

    return str(json.loads(json.loads(body)["body"])[0][0])


def effects(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(Effect)) or 0
