"""The target for Kafka keeps the contract of the relay's targets, on a real server."""

from collections.abc import Iterator

import pytest
from target_sites import KafkaSite, serving

from escrowmq.testing.target_conformance import TargetConformance


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSite]:
    with serving("kafka", tmp_path_factory.mktemp("kafka")) as server:
        yield KafkaSite(server)


class TestKafka(TargetConformance):
    pass
