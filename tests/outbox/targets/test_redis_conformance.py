"""The target for Redis Streams keeps the contract of the relay's targets, on a real server."""

import pytest
from target_sites import RedisSite

from escrowmq.testing.target_conformance import TargetConformance
from escrowmq_lab.servers.process import Server


@pytest.fixture(scope="module")
def site(redis_server: Server) -> RedisSite:
    return RedisSite(redis_server)


class TestRedis(TargetConformance):
    pass
