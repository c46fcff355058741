"""Sites of all kinds: servers are shared, and each module has databases of its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from set_sites import PATIENT, MemorySite, RedisSite, SqlSite

from escrowmq.outbox import engines

NewDatabase = Callable[[str], AbstractContextManager[str]]


@pytest.fixture(scope="module")
def memory_site() -> MemorySite:
    return MemorySite()


@pytest.fixture(scope="module")
def sqlite_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlSite]:
    """Whose stores wait for the file's lock for as long as a slow disk needs."""
    folder: Path = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engines, "SQLITE_PATIENCE", 200.0)
        yield SqlSite(f"sqlite:///{folder / 'sets.db'}")


@pytest.fixture(scope="module")
def postgresql_site(postgres_url: str, new_database: NewDatabase) -> Iterator[SqlSite]:
    with new_database(postgres_url) as url:
        yield SqlSite(url)


@pytest.fixture(scope="module")
def mariadb_site(mariadb_url: str, new_database: NewDatabase) -> Iterator[SqlSite]:
    with new_database(mariadb_url) as url:
        yield SqlSite(url)


@pytest.fixture(scope="module")
def redis_site(redis_url: str) -> RedisSite:
    return RedisSite(redis_url + PATIENT)
