"""A Django project on a fresh database of each kind, and a broker in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import django_project
import pytest

django_project.configure()

from django.core.management import call_command  # noqa: E402  # settings come first
from django.db import connections  # noqa: E402
from till_app.models import Effect, Order, Payment  # noqa: E402

import escrowmq as mq  # noqa: E402
from escrowmq.django.database import open_relay  # noqa: E402
from escrowmq.django.tasks import EscrowBackend  # noqa: E402
from escrowmq.django.working import Worker  # noqa: E402
from escrowmq.outbox.targets.escrow import EscrowTarget  # noqa: E402

QUICK: dict[str, Any] = {"retry_backoff": 0.05, "max_attempts": 3}
"""Settings of the broker under which a dead letter comes to pass within a test."""


@pytest.fixture
def empty(database_url: str) -> Iterator[str]:
    """The default database of Django: each kind, without tables. Its SQLAlchemy URL."""
    django_project.use_database(database_url)
    yield database_url
    connections.close_all()


@pytest.fixture
def site(empty: str) -> str:
    """The same with the tables of the outbox, the tasks and the till."""
    call_command("migrate", "escrowmq", verbosity=0)
    with connections["default"].schema_editor() as editor:
        editor.create_model(Order)
        editor.create_model(Effect)
        editor.create_model(Payment)
    return empty


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[mq.Bus]:
    """A broker in this process."""
    with mq.connect(f"file:{tmp_path / 'broker'}", **QUICK) as made:
        yield made


@pytest.fixture
def working(bus: mq.Bus) -> Callable[..., AbstractContextManager[Worker]]:
    """Make a worker and a relay, which run within a block."""

    @contextmanager
    def run(queues: tuple[str, ...] = ("default", "slow"), wait: Any = None, **options: Any) -> Iterator[Worker]:
        backend = EscrowBackend("default", {"QUEUES": ["default", "slow"], "OPTIONS": options})
        worker = Worker(bus, backend, queues, wait=wait)
        target = EscrowTarget.over([mq.connect(bus.router.links[0].address, **QUICK)])
        with closing(target), open_relay("default", target) as relay, relay:
            thread = threading.Thread(target=worker.run)
            thread.start()
            try:
                yield worker
            finally:
                worker.ask_to_stop()
                thread.join()

    return run
