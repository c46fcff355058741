"""The sweeps on Spark over PostgreSQL and MariaDB, every shard a database or a schema of its own: killed where it
hurts, two at once.

Every place, with executors of a cluster: test_jobs_cluster.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from sweeps_killing import EACH, Content, both, killing, once_cleanly
from sweeps_world import SHARDS, World, world

from escrowmq_lab.databases import databases

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

WORST = ("sweep.released", "sweep.fenced")
"""One database has committed, the other has not."""
NAMES = ["swept_products", "swept_warehouse", *(f"swept_orders_{number}" for number in range(SHARDS))]


def schemas(server: str, stack: ExitStack) -> list[str]:
    """URLs of schemas of one PostgreSQL database; they are dropped at the end."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def run(words: str) -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql(words)

    for name in NAMES:
        run(f"CREATE SCHEMA {name}")
        stack.callback(run, f"DROP SCHEMA {name} CASCADE")
    urls = [sa.make_url(server).update_query_dict({"options": f"-csearch_path={name}"}) for name in NAMES]
    return [url.render_as_string(hide_password=False) for url in urls]


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.long),
        "postgresql schemas",
        pytest.param("mariadb", marks=pytest.mark.long),
    ]
)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    server = request.getfixturevalue("mariadb_url" if request.param == "mariadb" else "postgres_url")
    with ExitStack() as stack:
        if request.param == "postgresql schemas":
            urls = schemas(server, stack)
        else:
            urls = stack.enter_context(databases(NAMES, tmp_path, server))
        made = stack.enter_context(world(urls))
        made.fill(EACH)
        yield made


@pytest.fixture
def clean(shop: World) -> Content:
    return once_cleanly(shop)


def test_killed_in_the_worst_places_and_two_at_once(
    spark: SparkSession, shop: World, clean: Content, tmp_path: Path
) -> None:
    killed_while_two_run(spark, shop, WORST, tmp_path)
    finish(spark, shop, clean)


def killed_while_two_run(spark: SparkSession, shop: World, points: tuple[str, ...], told: Path) -> None:
    """Two drivers sweep again and again until somebody was killed at each of the places."""
    deadline = time.monotonic() + 300

    def run(killed: list[str]) -> None:
        while len(killed) < len(points):
            assert time.monotonic() < deadline, f"only {killed} were reached"
            try:
                both(spark, shop)
            except Exception as problem:
                if "Python worker" not in str(problem):
                    raise

    with killing(spark, points, told) as killed, ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(run, killed) for _ in range(2)]:
            one.result()
    assert sorted(killed) == sorted(points)
    assert shop.problems() == []


def finish(spark: SparkSession, shop: World, clean: Content) -> None:
    """One more run ends what was begun."""
    assert not any(swept.failed for swept in both(spark, shop))
    assert shop.content() == clean
