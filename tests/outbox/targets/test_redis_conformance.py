"""The target for Redis Streams keeps the contract of the relay's targets, on a real server."""

from collections.abc import Iterator

import pytest
from target_sites import RedisSite, serving

from escrowmq.testing.target_conformance import TargetConformance


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSite]:
    with serving("redis", tmp_path_factory.mktemp("redis")) as server:
        yield RedisSite(server)


class TestRedis(TargetConformance):
    pass
