"""Brokers, databases and children for the modes."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from modes_roles import prepare_database

import escrowmq as mq
from escrowmq_lab.servers.process import free_port
from zygote import Zygote

QUICK = {"transaction_timeout": 3600.0, "retry_backoff": 0.05, "retry_backoff_max": 0.05, "default_queues": 1}


class ServedBroker:
    """A broker in a process of its own, which can be killed and comes back at the same address."""

    def __init__(self, zygote: Zygote, folder: Path, settings: dict[str, Any]) -> None:
        self._zygote, self._folder, self._settings = zygote, folder, settings
        self._listen = f"127.0.0.1:{free_port()}"  # where it is again after each kill
        self.pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"escrow://{self._listen}"

    def start(self) -> None:
        ready = self._folder.with_name(f"{self._folder.name}-{uuid.uuid4().hex}")
        given = {"folder": str(self._folder), "listen": self._listen, "ready": str(ready), "settings": self._settings}
        self.pid = self._zygote.start("serve", **given)
        deadline = time.monotonic() + 60.0
        while not ready.exists():
            assert time.monotonic() < deadline, "the broker did not start"
            time.sleep(0.005)
        self._listen = json.loads(ready.read_text())["url"].removeprefix("escrow://")

    def stop(self) -> None:
        self._zygote.kill(self.pid)

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote(Path(__file__).with_name("modes_roles.py"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def served(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """One for all tests; topics and groups do not meet, and whoever kills it starts it again."""
    broker = ServedBroker(zygote, tmp_path_factory.mktemp("served") / "data", QUICK)
    yield broker
    broker.stop()


@pytest.fixture
def make_served(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., ServedBroker]]:
    made: list[ServedBroker] = []

    def make(**settings: Any) -> ServedBroker:
        made.append(ServedBroker(zygote, tmp_path / f"served-{len(made)}", {**QUICK, **settings}))
        return made[-1]

    yield make
    for broker in made:
        broker.stop()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[mq.Bus]:
    """A broker in this process."""
    with mq.connect(f"file:{tmp_path / 'embedded'}", **QUICK) as bus:
        yield bus


@pytest.fixture
def t() -> str:
    """A topic that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def blank_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables, to be copied: quicker than making them anew."""
    path = tmp_path_factory.mktemp("blank") / "blank.db"
    prepare_database(f"sqlite:///{path}")
    return path


@pytest.fixture
def make_database(blank_database: Path, tmp_path: Path) -> Callable[[str], str]:
    """Make SQLite databases with all tables; their URLs."""

    def make(name: str) -> str:
        path = tmp_path / f"{name}.db"
        shutil.copy(blank_database, path)
        return f"sqlite:///{path}"

    return make


@pytest.fixture
def database(engine: sa.Engine) -> sa.Engine:
    """An engine over a database with all tables; on SQLite, PostgreSQL and MariaDB."""
    prepare_database(engine.url.render_as_string(hide_password=False))
    return engine
