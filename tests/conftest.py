"""What all tests share: how Hypothesis searches, which tests share a process, and real servers to test against.

Servers are started when the first test of a process asks for them. A server that this machine does not have: its tests are skipped,
and fail where ``CI`` is set.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from escrowmq.testing.servers.process import Server
from escrowmq.testing.servers.seam import Absent

if TYPE_CHECKING:
    from escrowmq.testing.servers.spark import Cluster

settings.register_profile("here", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

SPARK = ("tests/pipeline/", "tests/demo/", "tests/spark/")
HEAVY = ("kafka", "rabbitmq")
"""Servers that cost seconds to start: tests that have one of these names in theirs share a process, and so the server."""


class OneOfEach(LoadScopeScheduling):
    """Tests go one by one to whichever process is free, but those with Spark all to the same (a second JVM costs more than
    it brings), and so those of each heavy server."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SPARK):
            return "spark"
        return next((server for server in HEAVY if server in nodeid.lower()), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneOfEach:
    """How ``pytest -n`` shares tests out."""
    return OneOfEach(config, log)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Around the start of a server: where this machine does not have it, the test is skipped, or fails (``CI``)."""
    try:
        yield
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))


@contextlib.contextmanager
def served(name: str, factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of :mod:`escrowmq.testing.servers`."""
    module = importlib.import_module(f"escrowmq.testing.servers.{name}")
    with needed(), module.serving(factory.mktemp(name)) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served("postgres", tmp_path_factory) as server:
        yield server.url


@pytest.fixture(scope="session")
def mariadb_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served("mariadb", tmp_path_factory) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Who pauses or kills it, lets it run again: other tests use it, too."""
    with served("redis", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: Server) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """See :func:`redis_server`."""
    with served("rabbitmq", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq_url(rabbitmq_server: Server) -> str:
    return rabbitmq_server.url


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """See :func:`redis_server`."""
    with served("kafka", tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_url(kafka_server: Server) -> str:
    return kafka_server.url


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone Spark cluster of two workers, a module's own: its tests kill them."""
    from escrowmq.testing.servers.spark import cluster

    with needed(), cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@contextlib.contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """The URL of an empty database inside a running PostgreSQL or MariaDB; it is dropped afterwards."""
    import sqlalchemy as sa

    name = f"test_{uuid.uuid4().hex[:16]}"
    server = sa.create_engine(server_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    postgres = server.dialect.name == "postgresql"
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            if not postgres:  # a transaction that a test left open would block the drop
                left = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
                for (thread,) in connection.execute(left, {"name": name}).all():
                    with contextlib.suppress(sa.exc.DBAPIError):
                        connection.exec_driver_sql(f"KILL {thread}")
            connection.exec_driver_sql(f"DROP DATABASE {name}" + (" WITH (FORCE)" if postgres else ""))


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The SQLAlchemy URL of a fresh, empty database; every test that asks for it runs on all three."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'database.db'}"
        return
    server = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "mariadb_url")
    with fresh_database(server) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Any]:
    """A SQLAlchemy engine over :func:`database_url`."""
    import sqlalchemy as sa

    made = sa.create_engine(database_url)
    yield made
    made.dispose()
