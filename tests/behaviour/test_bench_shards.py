"""The simulation of many shards: what it counts adds up, the rules of one broker hold in it, and its shortest form
runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shards() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = util.spec_from_file_location("bench_shards", ROOT / "bench" / "shards.py")
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture
def world(shards: ModuleType) -> Any:
    return shards.World(shards=20, producers=2000, tenants=50)


def test_every_producer_has_a_tenant_and_every_tenant_its_shards(shards: ModuleType, world: Any) -> None:
    assert world.sizes().sum() == 2000
    assert world.sizes().min() >= 1
    for place in shards.RULES.values():
        placement = place(world, np.random.default_rng(1))
        spread = placement.spread(world.tenants)
        assert spread.min() >= 1
        assert len({*zip(placement.tenant.tolist(), placement.shard.tolist(), strict=True)}) == spread.sum(), (
            "a shard twice"
        )
        assert placement.connections(world).sum() == pytest.approx((world.sizes() * placement.links(50)).sum())
        assert shards.demands(world, placement)["to the mean"] >= 1.0


def test_questions_come_when_they_are_due_and_no_faster_than_a_broker_asks(shards: ModuleType, world: Any) -> None:
    slow = dataclasses.replace(world, questions=50.0)
    rng = np.random.default_rng(2)
    placement = shards.RULES[shards.BEST](slow, rng)
    lost = shards._drawn(slow, placement, np.zeros(3000), slow.sizes().astype(float), rng)

    def there(now: float) -> Any:
        return slow.sizes().astype(float)

    played = shards.play(slow, placement, lost, there, 300.0, {})
    assert len(played.seconds) == 3000
    assert played.questions == 3000
    assert played.seconds.min() >= slow.settings.transaction_timeout
    assert played.busiest <= 50.0
    fullest = np.bincount(lost.shard).max()
    assert played.seconds.max() >= slow.settings.transaction_timeout + fullest / 50.0 - 1.0


def test_unknown_is_asked_again_after_the_interval_and_parked_at_last(shards: ModuleType, world: Any) -> None:
    rng = np.random.default_rng(3)
    placement = shards.RULES[shards.BEST](world, rng)
    lost = shards._drawn(world, placement, np.zeros(10), world.sizes().astype(float), rng)
    lost.answerable[:5] = 20.0
    lost.answerable[5:] = 1e9

    def there(now: float) -> Any:
        return world.sizes().astype(float)

    played = shards.play(world, placement, lost, there, 600.0, {})
    settings = world.settings
    assert played.seconds == pytest.approx(np.full(5, settings.transaction_timeout + settings.check_interval), abs=0.2)
    assert (played.parked, played.undecided) == (5, 0)
    assert played.questions == 5 * 2 + 5 * settings.check_max


def test_nobody_there_costs_no_question(shards: ModuleType, world: Any) -> None:
    rng = np.random.default_rng(4)
    placement = shards.RULES[shards.BEST](world, rng)
    lost = shards._drawn(world, placement, np.zeros(100), world.sizes().astype(float), rng)

    def there(now: float) -> Any:
        return world.sizes().astype(float) * (now >= 50.0)

    played = shards.play(world, placement, lost, there, 100.0, {})
    assert (played.nobody, played.questions, len(played.seconds)) == (100, 100, 100)
    assert played.seconds.min() >= 50.0


def test_a_shard_that_is_away_asks_when_it_is_back(shards: ModuleType, world: Any) -> None:
    rng = np.random.default_rng(5)
    placement = shards.RULES[shards.BEST](world, rng)
    lost = shards._drawn(world, placement, np.zeros(200), world.sizes().astype(float), rng)

    def there(now: float) -> Any:
        return world.sizes().astype(float)

    away = {int(lost.shard[0]): (0.0, 30.0)}
    played = shards.play(world, placement, lost, there, 100.0, away)
    assert (played.seconds > 30.0).sum() == (lost.shard == lost.shard[0]).sum()


def test_the_whole_runs() -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "shards.py"),
        "--shards",
        "20",
        "--producers",
        "2000",
        "--tenants",
        "50",
    ]
    done = subprocess.run(
        [*command, "--measured", "1000,200", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure["median"] for figure in json.loads(done.stdout)["figures"]}
    assert all(value == 0 for name, value in figures.items() if "not decided" in name or "parked" in name)
