"""The target for Kafka keeps the contract of the relay's targets, on a real server."""

import pytest
from target_sites import KafkaSite

from escrowmq.testing.target_conformance import TargetConformance
from escrowmq_lab.servers.process import Server


@pytest.fixture(scope="module")
def site(kafka_server: Server) -> KafkaSite:
    return KafkaSite(kafka_server)


class TestKafka(TargetConformance):
    pass
