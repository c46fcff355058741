"""What all tests share: how Hypothesis searches, which tests share a process, and real servers to test against.

Servers are started when the first test of a process asks for them. A server that this machine does not have: its tests
are skipped, and fail where ``CI`` is set.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

import own_home
import quick_java
import slow_tests
from escrowmq_lab.servers.process import Server
from escrowmq_lab.servers.seam import Absent

if TYPE_CHECKING:
    import sqlalchemy as sa

    from apart import Apart, Strangers
    from escrowmq_lab.servers.kafka_secured import Secured
    from escrowmq_lab.servers.spark import Cluster

settings.register_profile(
    "here", deadline=None, print_blob=True, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(
    "here"
)  # also where ``CI`` is set, for which Hypothesis has a profile of the same examples each time

typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]
"""The tree of all commands is made once, not for each command that a test types: that takes a tenth of a second."""

SESSIONS = {
    "tests/spark/": "spark",
    "tests/pipeline/": "pipeline",
    "tests/demo/": "pipeline",
    "tests/console/test_console_browser.py::test_three_in_the_morning": "pipeline",
}
"""Tests that share a Spark session share a process: a JVM more costs more than it brings. There are two, as one process
would work longest of all.
"""
DRIVERS = (
    "tests/spark/test_stream_kills.py",
    "tests/spark/test_cluster_kills.py",
    "tests/spark/test_workers_apart.py",
)
"""Tests whose Spark runs in processes of its own: minutes each, much of it waiting. Others run beside them."""
APART = ("tests/spark/test_kafka_", "tests/pipeline/test_kafka_")
"""Tests whose Spark runs on a cluster, with brokers on Kafka: what they share is those servers, not a session."""
ON_KAFKA = "tests/behaviour/"
"""Where a test that has "kafka" in its name is one of the suite of behaviour, on a broker with its log there: they are
several hundred, and have a Kafka and a process of their own, beside those of all other tests of Kafka.
"""
HEAVY = ("kafka", "rabbitmq")
"""Servers that cost seconds to start: tests that have one of these names in theirs share a process, and so the server.
"""
TOGETHER = (
    "tests/behaviour/test_bench_peers.py",
    "tests/console/test_console_browser.py",
    "tests/installed/test_distributions.py",
    "tests/installed/test_installed.py",
    "tests/simulation/test_simulation.py",
    "tests/system/test_counted_work.py",
    "tests/system/test_overload.py",
    "tests/system/test_served_crowds.py",
)
"""Files whose tests share what takes seconds to make: it is made in one process, not in each."""
LONG = (
    *DRIVERS,
    "tests/outbox/relay/test_relay_kills.py",
    "tests/system/test_kill_loop.py",
    "tests/chaos/test_run.py",
    "tests/examples/",
)
"""What begins early, so that no process is alone with it at the end."""


class OneOfEach(LoadScopeScheduling):
    """Tests go one by one to whichever process is free, but those of a Spark session all to the same, and so those of
    each heavy server, and those of a file whose set-up is heavy."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(DRIVERS):
            return nodeid.partition("::")[0]
        if nodeid.startswith(APART):
            return "kafka"
        for folder, session in SESSIONS.items():
            if nodeid.startswith(folder):
                return session
        if nodeid.startswith(TOGETHER):
            return nodeid.partition("::")[0]
        if nodeid.startswith(ON_KAFKA) and "kafka" in nodeid:
            return "behaviour on kafka"
        return next((server for server in HEAVY if server in nodeid.lower()), nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """What is done is forgotten: xdist goes through all that a process ever got to see how much of it is left."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prepare what all tests have: a home of their own, a seed, and a Java that starts quickly. The processes of
    ``pytest -n`` inherit them."""
    gc.disable()  # until all tests are there
    if hasattr(config, "workerinput"):
        return
    home = tempfile.TemporaryDirectory(prefix="escrowmq-home-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    before = dict(os.environ)
    own_home.isolate(os.environ, Path(home.name))
    config.add_cleanup(lambda: os.environ.clear() or os.environ.update(before))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = random.randrange(1 << 32)
    folder = tempfile.TemporaryDirectory(prefix="escrowmq-java-")
    config.add_cleanup(folder.cleanup)
    if home := quick_java.write(Path(folder.name) / "home"):
        mocked = pytest.MonkeyPatch()
        mocked.setenv("JAVA_HOME", str(home))
        mocked.setenv("SPARK_AUTH_SOCKET_TIMEOUT", "300")  # the same as that of Java in quick_java.py
        config.add_cleanup(mocked.undo)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the seed, so that a failure can be repeated: at the end, because ``-q`` leaves the header out."""
    terminalreporter.write_line(f"hypothesis seed: {config.option.hypothesis_seed} (--hypothesis-seed)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add to the report of a failure what the process's other threads do at that moment, and how busy the machine is:
    what fails once in a thousand runs must be explained by its report."""
    report = yield
    if report.failed:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
        stacks = [f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-6:])}" for ident, frame in others]
        report.sections.append((f"other threads; load {os.getloadavg()}", "".join(stacks)))
    return report


_homes = itertools.count()


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of the test's own: plans, settings and histories of the user, and of other tests, are not there."""
    home = tmp_path_factory.getbasetemp() / f"home-{next(_homes)}"
    home.mkdir()
    for name, path in own_home.variables(home).items():
        monkeypatch.setenv(name, path)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the processes of ``pytest -n``: what takes long comes first (after what xdist itself puts first, the large
    groups)."""
    for item in items:
        if slow_tests.is_slow(item.nodeid):
            item.add_marker(pytest.mark.verify)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and the thousands of tests stay until the end: nobody need look through them for garbage again
    and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


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


def server_fixture(name: str) -> Any:
    """A fixture for one server per session. A test that pauses or kills it lets it run again: other tests use it,
    too."""

    @pytest.fixture(scope="session", name=f"{name}_server")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        module = importlib.import_module(f"escrowmq_lab.servers.{name}")
        with needed(), module.serving(tmp_path_factory.mktemp(name)) as made:
            yield made

    return server


def url_fixture(name: str) -> Any:
    """A fixture for the URL of that server."""

    @pytest.fixture(scope="session", name=f"{name}_url")
    def url(request: pytest.FixtureRequest) -> str:
        return str(request.getfixturevalue(f"{name}_server").url)

    return url


postgres_server, postgres_url = server_fixture("postgres"), url_fixture("postgres")
mariadb_server, mariadb_url = server_fixture("mariadb"), url_fixture("mariadb")
redis_server, redis_url = server_fixture("redis"), url_fixture("redis")
rabbitmq_server, rabbitmq_url = server_fixture("rabbitmq"), url_fixture("rabbitmq")
kafka_url = url_fixture("kafka")


@pytest.fixture(scope="session")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """The session's Kafka, with its doors for TLS and for passwords."""
    from escrowmq_lab.servers import kafka_secured

    with needed(), kafka_secured.serving(tmp_path_factory.mktemp("kafka")) as made:
        yield made


@pytest.fixture(scope="session")
def kafka_server(secured_kafka: Secured) -> Server:
    """The same."""
    return secured_kafka.server


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser."""
    from escrowmq_lab.servers import chromium

    with needed():
        return chromium.program()


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """What a Kafka is started from, for those who start one of their own."""
    from escrowmq_lab.servers import kafka

    with needed():
        return kafka.libraries()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Server]:
    """A Redis of one test's own, with its files in ``tmp_path / "redis"``: the test may stop it, empty it, take its
    files away."""
    from escrowmq_lab.servers import redis

    with needed(), redis.serving(tmp_path) as made:
        yield made


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[Server]:
    """A PostgreSQL of one test's own, whose commits are durable: the test may kill it."""
    from escrowmq_lab.servers import postgres

    with needed(), postgres.serving(tmp_path, durable=True) as made:
        yield made


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone Spark cluster of two workers, a module's own: its tests kill them."""
    from escrowmq_lab.servers.spark import cluster

    with needed(), cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Strangers]:
    """A Spark cluster of one worker, which sees no folder of the driver's: a test's own, and all that refusals need."""
    from apart import strangers

    with needed(), strangers(tmp_path, workers=1) as made:
        yield made


@pytest.fixture(scope="session")
def aside(tmp_path_factory: pytest.TempPathFactory, kafka_url: str) -> Iterator[Apart]:
    """A Spark cluster whose workers have folders of their own, HDFS, and a shard behind failover. A test that kills a
    broker starts it again."""
    from apart import apart

    with needed(), apart(tmp_path_factory.mktemp("aside"), kafka_url) as made:
        yield made


_spare: dict[str, list[str]] = {}
"""Empty databases by the URL of their PostgreSQL: a quarter of a second of processor time goes into making and dropping
one.
"""


@contextlib.contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """The URL of an empty database inside a running PostgreSQL or MariaDB; under this name it does not outlive the
    block."""
    import sqlalchemy as sa

    server = _administration(server_url)
    postgres = server.dialect.name == "postgresql"
    spare, name = _spare.setdefault(server_url, []), f"test_{uuid.uuid4().hex[:16]}"
    with server.connect() as connection:
        connection.exec_driver_sql(
            f"ALTER DATABASE {spare.pop()} RENAME TO {name}" if spare else f"CREATE DATABASE {name}"
        )
    url = sa.make_url(server_url).set(database=name)
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            if postgres:
                spare += _emptied(connection, url)
            else:  # a transaction that a test left open would block the drop
                left = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
                for (thread,) in connection.execute(left, {"name": name}).all():
                    with contextlib.suppress(sa.exc.DBAPIError):
                        connection.exec_driver_sql(f"KILL {thread}")
                connection.exec_driver_sql(f"DROP DATABASE {name}")


@functools.cache
def _administration(server_url: str) -> sa.Engine:
    """An engine that keeps no connection; what it asks a server at first, it asks once."""
    import sqlalchemy as sa

    return sa.create_engine(server_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")


def _emptied(connection: sa.Connection, url: sa.URL) -> list[str]:
    """A PostgreSQL database without whatever was in it, under another name, so that nobody who was left over finds it.
    If somebody stays in it, it is dropped, and there is none."""
    import psycopg
    import sqlalchemy as sa

    other = f"spare_{uuid.uuid4().hex[:16]}"
    ours = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
    who = "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE datname = :name"
    try:
        connection.execute(sa.text(who), {"name": url.database})
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} RENAME TO {other}")
        text = url.set(drivername="postgresql", database=other).render_as_string(hide_password=False)
        with psycopg.connect(text, autocommit=True) as inside:
            for (schema,) in inside.execute(ours).fetchall():
                inside.execute(f'DROP SCHEMA "{schema}" CASCADE')
            inside.execute("CREATE SCHEMA public")
            inside.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
            held = inside.execute("SELECT 1 FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
    except (sa.exc.DBAPIError, psycopg.Error):
        held = [()]
    if not held:
        return [other]
    for name in (url.database, other):
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    return []


@pytest.fixture(scope="session")
def new_database() -> Callable[[str], contextlib.AbstractContextManager[str]]:
    """:func:`fresh_database`, for fixtures that keep one for longer than a test."""
    return fresh_database


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

    patient: dict[str, Any] = {"timeout": 60.0} if database_url.startswith("sqlite") else {}  # for SQLite's lock
    made = sa.create_engine(database_url, connect_args=patient)
    yield made
    made.dispose()


@pytest.fixture
def t() -> str:
    """A topic that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def g() -> str:
    """A group that no other test uses."""
    return f"g-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Poll a condition and return what it gave: for states that have no signal of their own."""

    def wait(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not come to pass"
            time.sleep(0.005)
        return found

    return wait
