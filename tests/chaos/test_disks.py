"""A full disk of the chaos run: nothing grows, what is there stays as it was, and all goes on when there is room."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq.broker.embedded import open_engine as open_broker
from escrowmq.errors import Code
from escrowmq.settings import BrokerSettings
from escrowmq_lab.chaos.disks import fill_database, fillable_disk, set_full
from escrowmq_lab.databases import open_engine


def test_a_full_disk_makes_no_file_and_none_longer(tmp_path: Path) -> None:
    disk = fillable_disk(tmp_path)(tmp_path / "data")
    file = disk.open("old", create=True)
    file.allocate(100)
    set_full(tmp_path, True)
    for grow in (
        lambda: disk.open("new", create=True),
        lambda: file.allocate(101),
        lambda: file.write_at(96, [b"abcdefgh"]),
        lambda: file.write_at(200, [b"x"]),
    ):
        with pytest.raises(OSError) as full:
            grow()
        assert full.value.errno == errno.ENOSPC
    assert disk.list() == ["old"]
    assert disk.free_bytes() == 0
    assert file.read_at(96, 8) == b"abcd"  # what had its blocks was written
    assert file.size() == 100
    file.write_at(0, [b"within"])
    file.allocate(50)
    disk.open("old", create=True).close()
    disk.rename("old", "other")
    set_full(tmp_path, False)
    file.write_at(96, [b"abcdefgh"])
    assert file.read_at(96, 8) == b"abcdefgh"
    assert disk.free_bytes() > 0
    file.close()
    disk.close()


@pytest.mark.invariant("I33")
def test_a_broker_on_a_full_disk_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """And what it had acknowledged is there."""
    from escrowmq.broker.calls import Calls
    from escrowmq.broker.embedded import lent_link
    from escrowmq.client.bus import Bus

    settings = BrokerSettings(segment_bytes=1 << 14)
    engine = open_broker(tmp_path / "data", settings, fillable_disk(tmp_path))
    engine.start()
    calls = Calls(engine)
    sent: list[str] = []
    with Bus([lent_link(tmp_path / "data", calls)]) as bus, bus.producer("p") as producer:
        set_full(tmp_path, True)

        def fill() -> None:
            for number in range(100):
                producer.send("t", b"x" * 1000, key=str(number))
                sent.append(str(number))

        with pytest.raises(mq.Overloaded) as full:
            fill()
        assert full.value.code is Code.DISK_FULL
        set_full(tmp_path, False)
        producer.send("t", b"after", key="after")
        with bus.consumer("g", ["t"]) as consumer:
            got = {message.key for message in consumer.receive(200, wait=60.0)}
    assert {*sent, "after"} <= got
    calls.give_back()
    engine.stop()
    calls.close()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = open_engine(f"sqlite:///{tmp_path / 'books.db'}")
    fill_database(engine, tmp_path)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x BLOB)")
    yield engine
    engine.dispose()


def _grow(engine: sa.Engine, rows: int) -> None:
    with engine.begin() as connection:
        for _ in range(rows):
            connection.exec_driver_sql("INSERT INTO t VALUES (zeroblob(3000))")


def _rows(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM t").scalar_one())


def test_a_full_database_rolls_back_whole_transactions(database: sa.Engine, tmp_path: Path) -> None:
    _grow(database, 5)
    set_full(tmp_path, True)
    with pytest.raises(sa.exc.OperationalError, match="full"):
        _grow(database, 20)
    assert _rows(database) == 5  # the first rows of it may have had room
    with database.begin() as connection:
        connection.exec_driver_sql("DELETE FROM t WHERE rowid = 1")  # needs no page
    set_full(tmp_path, False)
    _grow(database, 20)  # on the same connection
    assert _rows(database) == 24
