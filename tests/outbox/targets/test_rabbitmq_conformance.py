"""The target for RabbitMQ keeps the contract of the relay's targets, on a real server."""

import pytest
from target_sites import RabbitSite

from escrowmq.testing.target_conformance import TargetConformance
from escrowmq_lab.servers.process import Server


@pytest.fixture(scope="module")
def site(rabbitmq_server: Server) -> RabbitSite:
    return RabbitSite(rabbitmq_server)


class TestRabbit(TargetConformance):
    pass
