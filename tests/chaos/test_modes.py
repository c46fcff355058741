"""Each delivery mode of the chaos run does what it says where nothing is wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alone import run_alone, two_brokers

from escrowmq.chaos.modes import MODES, Site
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target


def relay(site: Site) -> None:
    """The relay of a producer's node."""
    target = open_target(site.url)
    try:
        with Relay(site.engine, target, poll_interval=0.05):
            site.ended.wait()
    finally:
        target.close()


BESIDE: dict[str, Callable[[Site], Any]] = {"outbox": relay}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_brokers(tmp_path_factory.mktemp("brokers")) as url:
        yield url


@pytest.mark.parametrize("name", MODES)
def test_without_faults_each_business_row_has_one_effect(name: str, brokers: str, tmp_path: Path) -> None:
    run_alone(MODES[name](), tmp_path, brokers, beside=BESIDE.get(name))
