"""Every test of a database gets an empty one, on all three servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from escrowmq_lab.servers import mariadb, postgres
from escrowmq_lab.servers.process import Server
from escrowmq_lab.servers.seam import Absent


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_gets_an_empty_database(engine: sa.Engine, turn: int) -> None:
    assert sa.inspect(engine).get_table_names() == []
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE left_behind (id INTEGER PRIMARY KEY)")


@pytest.fixture
def left_open() -> Iterator[list[sa.Connection]]:
    """Connections that are closed only after their database was dropped."""
    connections: list[sa.Connection] = []
    yield connections
    for connection in connections:
        connection.invalidate()
        connection.close()


def test_a_database_goes_even_when_a_transaction_is_left_open(
    left_open: list[sa.Connection], engine: sa.Engine
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    left_open.append(engine.connect())
    left_open[0].exec_driver_sql("INSERT INTO t VALUES (1)")


def test_text_of_any_script_comes_back(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (words VARCHAR(100))")
        connection.execute(sa.text("INSERT INTO t VALUES (:words)"), {"words": "半消息 🦄"})
        assert connection.execute(sa.text("SELECT words FROM t")).scalar_one() == "半消息 🦄"


@pytest.mark.parametrize("module", [postgres, mariadb])
def test_what_is_not_installed_is_named_with_its_package(
    module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(Absent, match="apt-get install"), module.serving(tmp_path):  # type: ignore[attr-defined]
        pass


def test_a_server_that_dies_at_its_start_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Server(
        url="", command=["sh", "-c", "echo out of luck; exit 3"], ready=lambda _: False, log=tmp_path / "log"
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        server.start()
