"""Every set store keeps the contract, on real servers; the one in memory, on which other tests stand, too."""

import pytest
from set_sites import MemorySite, RedisSite, SqlSite

from escrowmq.testing.set_conformance import SetConformance


class TestMemory(SetConformance):
    @pytest.fixture
    def site(self, memory_site: MemorySite) -> MemorySite:
        return memory_site


@pytest.mark.invariant("I48")
class TestSqlite(SetConformance):
    @pytest.fixture
    def site(self, sqlite_site: SqlSite) -> SqlSite:
        return sqlite_site


@pytest.mark.invariant("I48")
class TestPostgresql(SetConformance):
    @pytest.fixture
    def site(self, postgresql_site: SqlSite) -> SqlSite:
        return postgresql_site


class TestMariadb(SetConformance):
    @pytest.fixture
    def site(self, mariadb_site: SqlSite) -> SqlSite:
        return mariadb_site


@pytest.mark.invariant("I48")
class TestRedis(SetConformance):
    @pytest.fixture
    def site(self, redis_site: RedisSite) -> RedisSite:
        return redis_site
