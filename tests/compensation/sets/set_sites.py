"""Where pairs of sets live, for the conformance suite and the model: each a real server, a file, or memory."""

from __future__ import annotations

import redis
import sqlalchemy as sa

from escrowmq.compensation.sets.opening import open_sets
from escrowmq.compensation.sets.seam import SetStore
from escrowmq.compensation.sets.tables import metadata, set_run
from escrowmq.errors import Code, Misuse
from escrowmq.testing.memory_sets import MemorySets

PATIENT = "?socket_timeout=120&socket_connect_timeout=120"
"""At the end of the URL of a Redis that must answer, however slow the machine is."""


class MemorySite:
    def __init__(self) -> None:
        self._stores: dict[str, MemorySets] = {}

    def open(self, name: str) -> SetStore:
        return _Handle(self._stores.setdefault(name, MemorySets(name)))

    def expire(self, name: str, run: str) -> None:
        self._stores[name].leases[run] = 0

    def empty(self) -> None:
        for store in self._stores.values():
            store.lose()


class _Handle:
    """One of several ways to a store in memory: closing it closes only itself."""

    def __init__(self, store: MemorySets) -> None:
        self._store, self._closed = store, False

    def __getattr__(self, name: str) -> object:
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the set store is closed")
        return getattr(self._store, name)

    def close(self) -> None:
        self._closed = True


class SqlSite:
    def __init__(self, url: str) -> None:
        self.url = url
        self.admin = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)

    def open(self, name: str) -> SetStore:
        return open_sets(self.url, name)

    def expire(self, name: str, run: str) -> None:
        with self.admin.begin() as connection:
            connection.execute(sa.update(set_run).where(set_run.c.run == run).values(leased_until_us=0))

    def empty(self) -> None:
        with self.admin.begin() as connection:
            metadata.drop_all(connection)


class RedisSite:
    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, name: str) -> SetStore:
        return open_sets(self.url, name)

    def expire(self, name: str, run: str) -> None:
        with redis.Redis.from_url(self.url) as admin:
            admin.zadd(f"escrowmq:sets:{{{name}}}:leases", {run: 0}, xx=True)

    def empty(self) -> None:
        with redis.Redis.from_url(self.url) as admin:
            admin.flushall()
