"""A handler service under load, with its workers, the broker and the database killed in turn."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from handler_world import Service, effects

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox.engines import open_locking
from escrowmq_lab.servers import escrow
from escrowmq_lab.servers.process import Server

MESSAGES = 900
ROUNDS = 3


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Server | None]:
    """The URL of a database, and its server, if it has one."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'effects.db'}", None
    server: Server = request.getfixturevalue("own_postgres")
    return server.url, server


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    with escrow.serving(tmp_path / "broker") as server:
        yield server


def send_all(url: str, ids: list[str]) -> None:
    """Send each id until the broker has it: repeats have the same message id."""
    with mq.connect(url) as bus:
        producer = bus.producer("load", timeout=5.0)
        for body in ids:
            while True:
                try:
                    producer.send("orders", body.encode(), message_id=uuid.UUID(body))
                    break
                except (mq.Unknown, mq.Overloaded):
                    time.sleep(0.05)


def read(engine: sa.Engine) -> Counter[str]:
    """Count the effects by id, patiently while the database is away."""
    while True:
        try:
            with engine.connect() as connection:
                return Counter(connection.execute(sa.select(effects.c.id)).scalars())
        except sa.exc.DBAPIError:
            time.sleep(0.05)


@pytest.mark.invariant("I24")
def test_every_effect_happens_exactly_once(database: tuple[str, Server | None], broker: Server, tmp_path: Path) -> None:
    url, server = database
    engine = open_locking(url)
    effects.metadata.create_all(engine)
    outbox.migrate(engine)
    ids = [str(uuid.uuid4()) for _ in range(MESSAGES)]
    services = [Service(tmp_path, f"w{n}", "counting:app", broker.url, EFFECTS_URL=url) for n in range(2)]
    with ExitStack() as stack:
        for service in services:
            stack.enter_context(service)
        victims: list[Any] = [*services, broker, *([server] if server is not None else [])]
        _run(broker.url, ids, engine, victims, services)
    assert read(engine) == Counter(ids), "each id once"
    engine.dispose()


def _run(url: str, ids: list[str], engine: sa.Engine, victims: list[Any], services: list[Service]) -> None:
    """Kill a victim whenever another part of the effects is there, until all are."""
    sender = threading.Thread(target=send_all, args=(url, ids), daemon=True)
    sender.start()
    for number in range(ROUNDS * len(victims)):
        wanted = (number + 1) * MESSAGES // (ROUNDS * len(victims) + 1)
        while read(engine).total() < wanted:
            _check_running(services)
            time.sleep(0.01)
        victim = victims[number % len(victims)]
        victim.kill()
        victim.start()
    while len(read(engine)) < MESSAGES:
        _check_running(services)
        time.sleep(0.05)
    sender.join()
    with mq.connect(url) as bus:
        while any(group["leases"] for group in bus.admin.groups()):
            time.sleep(0.05)
        assert bus.admin.dead_letters("cart") == []
    for service in services:
        assert service.terminate() == 0, service.log.read_text()


def _check_running(services: list[Service]) -> None:
    """Check that no service ended by itself: one waits for a broker or a database that is away."""
    for service in services:
        assert service.process.poll() is None, service.log.read_text()[-4000:]
