"""The four jobs on a standalone cluster, by ``--master`` and by spark-submit: they print and write what a local run
does.

All of it is long (`make chaos`): a cluster takes half a minute to start, and each job as much again. What a cluster
does in the quick suite: tests/spark/test_cluster_kills.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jobs_world
import pyspark
import pytest
from jobs_world import JOBS
from pyspark.sql import SparkSession
from sweeps_killing import ALL, EACH, told_places
from sweeps_world import BOOKS, SHARDS, world
from typer.testing import CliRunner

from escrowmq.cli import submit
from escrowmq.cli.main import app
from escrowmq.pipeline.java import find_java, write_launcher
from escrowmq.platform.failpoints import TELL_VARIABLE, VARIABLE
from escrowmq_lab.databases import databases
from escrowmq_lab.servers.spark import Cluster

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

Told = tuple[int, Any, dict[str, Any]]
"""Exit code, what was printed, what was written."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs_world.make(tmp_path_factory.mktemp("jobs") / "template")


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_launcher(find_java(), tmp_path_factory.mktemp("java"))


def locally_as_well(template: Path, place: Path, job: str) -> Told:
    """What the job tells and leaves on this machine, in the session that there is, with everything at the same place as
    before."""
    place.rename(place.with_name("done"))
    jobs_world.copy(template, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        ran = CliRunner().invoke(app, [job, *JOBS[job], "--json"])
    assert ran.exit_code in (0, 1), ran.output
    return ran.exit_code, json.loads(ran.stdout), jobs_world.left(place)


def by_master(hands: Cluster, job: str, words: list[str]) -> list[str]:
    return [sys.executable, "-m", "escrowmq", job, *words, "--json", "--master", hands.url]


def by_submit(hands: Cluster, job: str, words: list[str], **settings: str) -> list[str]:
    starter = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    given = [word for name, value in settings.items() for word in ("--conf", f"spark.{name}={value}")]
    return [starter, "--master", hands.url, *given, submit.__file__, job, *words, "--json"]


def surroundings(java: Path) -> dict[str, str]:
    """The environment of somebody who uses spark-submit."""
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java)}


def program(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> Told:
    """Run it in the folder."""
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode in (0, 1), ran.stderr[-3000:]
    return ran.returncode, json.loads(ran.stdout), jobs_world.left(folder)


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("job", JOBS)
def test_by_master(hands: Cluster, spark: SparkSession, template: Path, tmp_path: Path, job: str) -> None:
    place = jobs_world.copy(template, tmp_path / "place")
    told = program(by_master(hands, job, JOBS[job]), place)
    assert told == locally_as_well(template, place, job)
    check(job, told)


@pytest.mark.invariant("I43")
@pytest.mark.parametrize("job", JOBS)
def test_by_spark_submit(
    hands: Cluster, spark: SparkSession, template: Path, tmp_path: Path, java: Path, job: str
) -> None:
    place = jobs_world.copy(template, tmp_path / "place")
    own = {"sql.session.timeZone": "Asia/Kathmandu", "sql.ansi.enabled": "false", "executor.memory": "512m"}
    told = program(by_submit(hands, job, JOBS[job], **own), place, surroundings(java))
    assert told == locally_as_well(template, place, job)
    check(job, told)


def check(job: str, told: Told) -> None:
    """Equal is not enough: it is what was put there."""
    code, printed, left = told
    assert left["problems"] == []
    match job:
        case "audit":
            assert {(one["kind"], one["id"]) for one in printed["findings"]} == jobs_world.WRONG
            assert left["run/verdict.json"] == printed
        case "reconcile":
            assert {one["id"] for one in printed["named"]} == jobs_world.UNCONFIRMED
            assert left["findings/report.json"] == printed
        case "report":
            assert (printed["totals"]["committed"], printed["totals"]["rolled_back"]) == (3, 3)
            assert left["pages/report.json"] == printed
        case "sweep":
            assert {name: swept["failed"] for name, swept in printed.items()} == {"orders": 0, "freezes": 0}
    assert code == (job in ("audit", "reconcile"))


def kill(hands: Cluster, pid: int) -> None:
    """An executor, and its Python process, which would only later notice that it is alone."""
    assert hands.kill_executor(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ended(driver: subprocess.Popen[bytes]) -> None:
    """Wait for a driver; what it could not settle it may leave to the next."""
    try:
        _, said = driver.communicate(timeout=900)
        assert driver.returncode in (0, 1), said[-3000:]
    finally:
        driver.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("server", ["sqlite", "postgresql", "mariadb"])
def test_two_sweeps_at_once_whose_executors_are_killed_at_every_place(
    hands: Cluster, spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path, java: Path, server: str
) -> None:
    name = {"sqlite": None, "postgresql": "postgres_url", "mariadb": "mariadb_url"}[server]
    names = ["killed_products", "killed_warehouse", *(f"killed_orders_{number}" for number in range(SHARDS))]
    tables = tmp_path / "tables.json"
    tables.write_text(json.dumps({one: value for one, value in asdict(BOOKS).items() if value is not None}))
    with (
        databases(names, tmp_path, name and request.getfixturevalue(name)) as urls,
        world(urls) as shop,
    ):
        words = ["--products", urls[0], "--tables", str(tables)]
        words += [word for url in urls[2:] for word in ("--orders", url)]
        shop.fill(EACH)
        assert CliRunner().invoke(app, ["sweep", *words]).exit_code == 0
        clean = shop.content()
        shop.fill(EACH)
        own = {"cores.max": "1", "executor.memory": "512m", "task.maxFailures": "10"}
        own |= {f"executorEnv.{VARIABLE}": ",".join(ALL), f"executorEnv.{TELL_VARIABLE}": str(tmp_path)}
        command = by_submit(hands, "sweep", words, **own)
        with told_places(ALL, tmp_path, lambda pid: kill(hands, pid)) as killed, ExitStack() as stack:
            for _ in range(2):
                driver = subprocess.Popen(command, env=surroundings(java), stderr=subprocess.PIPE)
                stack.callback(ended, driver)
        assert sorted(killed) == sorted(ALL)
        assert shop.problems() == []
        assert CliRunner().invoke(app, ["sweep", *words]).exit_code == 0
        assert shop.content() == clean
