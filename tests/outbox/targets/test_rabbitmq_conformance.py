"""The target for RabbitMQ keeps the contract of the relay's targets, on a real server."""

from collections.abc import Iterator

import pytest
from target_sites import RabbitSite, serving

from escrowmq.testing.target_conformance import TargetConformance


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitSite]:
    with serving("rabbitmq", tmp_path_factory.mktemp("rabbitmq")) as server:
        yield RabbitSite(server)


class TestRabbit(TargetConformance):
    pass
