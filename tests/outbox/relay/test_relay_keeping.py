"""What happens to sent rows: deleted, kept, confirmed by the consumer, sent again without. Never before a durable
OK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from relay_checks import eventually, left, lost, numbered, put, rows, states

from escrowmq import outbox
from escrowmq.errors import Code
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay.reading import COLUMNS, outgoing
from escrowmq.outbox.tables import State, trans_message
from escrowmq.testing.memory_target import MemoryTarget

MakeRelay = Callable[..., Relay]


@pytest.mark.invariant("I40")
def test_sent_rows_are_kept_as_long_as_asked_and_then_leave(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    put(tables, *numbered("k", 3))
    running = relay(keep=3600.0)
    assert running.drain()
    assert running.drain()
    assert len(target.ids) == 3
    assert states(tables) == [State.SENT] * 3
    assert all(row.sent_us for row in rows(tables))
    running.stop()
    with relay(keep=0.05) as later:
        eventually(lambda: not rows(tables))
    assert later.statistics.purged == 3


@pytest.mark.invariant("I40")
def test_only_rows_with_a_durable_receipt_are_purged(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    ids = put(tables, *numbered("ok", 2), *numbered("refused", 2), *numbered("waiting", 2), ("away", "0"))
    codes = {"refused": Code.BAD_DELAY, "waiting": Code.BODY_TOO_LARGE, "away": Code.TIMED_OUT}
    target.answer = lambda taken: codes.get(taken.key or "", Code.OK)
    first = relay(redeliveries=0)
    eventually(lambda: not first.drain(0.1) and first.statistics.waiting == 2)  # "away" is still to be sent
    with relay(redelivery_interval=3600.0, keep=0.001, purge_interval=0.001) as running:
        put(tables, ("late", "0"))
        eventually(lambda: running.statistics.purged)
    assert not lost(ids, target.ids, tables)
    assert left(tables) == set(ids[2:])


@pytest.mark.invariant("I40")
def test_planted_a_relay_that_marks_before_it_sends_is_caught(tables: sa.Engine, target: MemoryTarget) -> None:
    ids = put(tables, *numbered("k", 3))
    with tables.begin() as connection:
        batch = connection.execute(sa.select(*COLUMNS)).all()
        connection.execute(sa.delete(trans_message))
    target.answer = lambda _: Code.DISCONNECTED  # and here it dies
    target.send(outgoing(batch))
    assert lost(ids, target.ids, tables) == set(ids)


def test_the_consumers_word_makes_a_row_done_and_it_leaves(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    ids = put(tables, *numbered("k", 4))
    running = relay(await_callback=True, redelivery_interval=3600.0)
    assert running.drain()
    assert states(tables) == [State.SENT] * 4
    assert outbox.mark_done(tables, ids[:2]) == 2
    running.stop()
    with relay(await_callback=True, redelivery_interval=3600.0):
        eventually(lambda: states(tables) == [State.SENT] * 2)
    assert len(target.ids) == 4


@pytest.mark.invariant("I40")
def test_a_word_that_is_quicker_than_the_mark_stands(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    ids = put(tables, *numbered("k", 2))
    target.after = lambda: (outbox.mark_done(tables, ids[:1]), None)[1]
    running = relay(await_callback=True, keep=3600.0, redelivery_interval=3600.0)
    assert running.drain()
    assert states(tables) == [State.DONE, State.SENT]
    assert running.statistics.repeated == 0
    deleting = relay()
    (third,) = put(tables, ("k", "2"))
    target.after = lambda: (outbox.mark_done(tables, [third]), None)[1]
    running.stop()
    assert deleting.run_once() == 1
    assert third not in {row.id for row in rows(tables)}


def test_without_the_consumers_word_a_message_is_sent_again_then_waits(
    tables: sa.Engine, target: MemoryTarget, relay: MakeRelay
) -> None:
    silent, heard, late = put(tables, ("a", "0"), ("b", "0"), ("a", "1"))
    target.after = lambda: (outbox.mark_done(tables, [heard]), None)[1]
    with relay(await_callback=True, redelivery_interval=0.05, redeliveries=3, keep=3600.0) as running:
        eventually(lambda: running.statistics.waiting == 2)
    assert target.ids.count(silent) == target.ids.count(late) == 4
    assert target.ids.count(heard) == 1
    found = {bytes(row.id): row for row in rows(tables)}
    assert found[silent].state == State.WAITING
    assert "no callback" in found[silent].error
    assert found[heard].state == State.DONE
    put(tables, ("a", "2"))  # what was sent holds nobody
    assert relay(await_callback=True, redelivery_interval=3600.0).drain()
    assert "2" in [t.body.decode() for t in target.taken if t.key == "a"]
    assert outbox.mark_done(tables, [silent]) == 1  # and a late word still counts


def test_a_target_away_costs_no_redelivery(tables: sa.Engine, target: MemoryTarget, relay: MakeRelay) -> None:
    put(tables, ("a", "0"))
    target.answer = lambda _: Code.OK if target.batches <= 2 else Code.DISCONNECTED  # away after the first redelivery
    with relay(await_callback=True, redelivery_interval=0.02, redeliveries=5) as running:
        eventually(lambda: running.statistics.redelivered)
        eventually(lambda: target.batches > 22)
        assert states(tables) == [State.SENT]


class TestDatabases:
    """The database itself goes away."""

    @pytest.fixture(params=["postgres", "mariadb"])
    def server(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
        import importlib

        from escrowmq_lab.servers.seam import Absent

        module = importlib.import_module(f"escrowmq_lab.servers.{request.param}")
        request.getfixturevalue(
            "postgres_url" if request.param == "postgres" else "mariadb_url"
        )  # skips, or fails in CI
        try:
            with module.serving(tmp_path) as server:
                yield server
        except Absent as absent:
            pytest.skip(str(absent))

    @pytest.mark.invariant("I38")
    def test_the_relay_survives_a_restart_of_its_database(self, server: object, target: MemoryTarget) -> None:
        engine = sa.create_engine(server.url)  # type: ignore[attr-defined]
        outbox.migrate(engine)
        ids = put(engine, *numbered("k", 5))
        options = {"workers": 2, "poll_interval": 0.02, "backoff": 0.01, "backoff_max": 0.05, "lease": 2.0}
        with Relay(engine, target, **options) as running:
            eventually(lambda: not rows(engine))
            server.stop()  # type: ignore[attr-defined]
            eventually(lambda: running.statistics.database_failures > 2)
            server.start()  # type: ignore[attr-defined]
            ours = sa.create_engine(server.url)  # type: ignore[attr-defined]  # without connections of the server before
            ids += put(ours, *numbered("k", 5, 5))
            eventually(lambda: not rows(ours))
        assert list(dict.fromkeys(target.ids)) == ids
        engine.dispose()
        ours.dispose()
