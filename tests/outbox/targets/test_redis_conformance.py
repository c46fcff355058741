"""The target for Redis Streams keeps the contract of the relay's targets, on a real server."""

import pytest
from target_sites import RedisSite

from escrowmq.testing.servers.process import Server
from escrowmq.testing.target_conformance import TargetConformance


@pytest.fixture(scope="module")
def site(redis_server: Server) -> RedisSite:
    return RedisSite(redis_server)


class TestRedis(TargetConformance):
    pass
