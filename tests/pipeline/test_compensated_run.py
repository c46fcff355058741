"""The two-set compensation under everything that can happen to it: the processes of examples/cart/compensated with a
real Redis.

Confirms are lost, every process is killed once, consumers are rebalanced by it, two schedulers work at once, and Redis
is stopped, emptied and started again without its files, all of it while orders come. Every committed order has its
effect exactly once, by id; nothing stays suspended or in the sets; and the Spark audit of the run agrees.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from escrowmq.pipeline.audit import run as audit
from escrowmq_lab.databases import databases
from escrowmq_lab.servers import escrow
from escrowmq_lab.servers.process import Server
from forked import Forked

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cart" / "compensated"))

from compensated_check import Effect
from compensated_run import Act, Run, killing
from compensated_staff import ROLES
from compensated_tables import CART, SHOP

pytestmark = pytest.mark.spark


def emptied(server: Server) -> Act:
    def act(*_: Any) -> None:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()

    return act


def without_its_files(server: Server, data: Path) -> Act:
    """Killed and started on an empty disk, as another machine would."""

    def act(*_: Any) -> None:
        server.kill()
        shutil.rmtree(data)
        data.mkdir()
        server.start()

    return act


def stopped(server: Server) -> Act:
    return lambda *_: server.stop()


def started(server: Server) -> Act:
    return lambda *_: server.start()


def judged(
    spark: SparkSession, folder: Path, server: Server, acts: Sequence[Act], orders: int, share: float
) -> tuple[list[Effect], int]:
    """A run with these acts; asserts what must hold at its end. Its effects, and how many ends were lost."""
    with (
        databases([SHOP, CART], folder) as urls,
        escrow.serving(folder, launcher=Forked) as broker,
        contextlib.closing(Run(urls, server.url, folder, broker, share)) as run,
    ):
        run.work(orders, acts)
        assert run.missing() == []
        run.tidy()
        assert run.wrong() == []
        effects = run.effects()
    # The broker has stopped: of a folder in use, the last frame is believed only when the next one says that it was
    # synced.
    verdict = audit(folder, spark=spark, page=False)
    assert verdict.findings == ()
    assert verdict.agrees
    assert verdict.settled
    assert verdict.consumed == len(effects)
    return effects, run.lost


@pytest.mark.invariant("I48")
def test_whoever_dies_and_whatever_redis_forgets_each_order_has_its_effect_once(
    spark: SparkSession, tmp_path: Path, own_redis: Server
) -> None:
    acts = [
        killing("cart-1"),
        killing("scheduler-1"),
        stopped(own_redis),  # at least one part of the orders comes while it is away
        killing("cart-2"),
        started(own_redis),
        killing("keys"),
        emptied(own_redis),
        killing("broker"),
        without_its_files(own_redis, tmp_path / "redis"),
        killing("shop"),
        killing("relay"),
        killing("scheduler-2"),
    ]
    effects, lost = judged(spark, tmp_path / "run", own_redis, acts, 130, 0.1)
    assert lost
    assert {effect.made_by for effect in effects} == {"message", "scheduler"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_in_any_order(spark: SparkSession, tmp_path: Path, own_redis: Server, seed: int) -> None:
    """Everybody several times, Redis stopped, emptied and replaced between any two of them."""
    import random

    chance = random.Random(seed)
    trouble: list[list[Act]] = [
        [stopped(own_redis), killing("cart-1"), started(own_redis)],
        [stopped(own_redis), killing("keys"), killing("scheduler-1"), started(own_redis)],
        [emptied(own_redis)],
        [without_its_files(own_redis, tmp_path / "redis")],
        *([killing(name)] for name in (*ROLES, "broker")),
    ] * 3
    chance.shuffle(trouble)
    judged(spark, tmp_path / "run", own_redis, list(itertools.chain(*trouble)), 2_000, 0.1)
