"""A consumer group as a whole on the command line: reset, pause, resume, limit, delete."""

from collections.abc import Callable

import pytest
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit


@pytest.fixture
def consumed(bus: mq.Bus) -> Callable[[int], None]:
    """Some messages of a topic with one queue, all acknowledged by the group cart."""

    def make(count: int) -> None:
        bus.admin.create_topic("orders", 1, may_exist=True)
        bus.producer("shop").send_batch([mq.Message("orders", b"x") for _ in range(count)])
        with bus.consumer("cart", "orders") as consumer:
            for message in consumer.receive(count, wait=60.0):
                message.ack()

    return make


def test_a_reset_is_shown_and_done(run: Run, consumed: Callable[[int], None]) -> None:
    consumed(4)
    dry = run("groups", "reset", "cart", "--to", "earliest", "--dry-run")
    assert ("orders/0" in dry.out, "would continue: 4 messages again, 0 skipped" in dry.err) == (True, True)
    assert run("groups", "show", "cart", "--json").json[0]["queues"][0]["acked"] == 4
    (moved,) = run("groups", "reset", "cart", "--by=-1", "--why", "the last one was wrong", "--json").json
    assert (moved["was"], moved["now"], moved["again"]) == (4, 3, 1)
    for where, now in (
        (("--to", "end"), 4),
        (("--to", "1h"), 0),
        (("--to", "2999-01-31T09:30"), 4),
        (("--offset", "2", "--topic", "orders", "--queue", "0"), 2),
    ):
        assert run("groups", "reset", "cart", *where, "--json").json[0]["now"] == now
    assert "skipped" in run("groups", "show", "cart").out


@pytest.mark.parametrize("where", [(), ("--to", "end", "--by", "3"), ("--to", "soon"), ("--to", "9x")])
def test_where_to_must_be_clear(run: Run, bus: mq.Bus, where: tuple[str, ...]) -> None:
    told = run("groups", "reset", "cart", *where)
    assert (told.code, "BAD_ARGUMENT" in told.err) == (Exit.USAGE, True)


def test_a_pause_is_seen_in_every_listing(run: Run, consumed: Callable[[int], None]) -> None:
    consumed(1)
    assert "cart is paused for orders" in run("groups", "pause", "cart", "--topic", "orders").out
    assert "paused for orders since" in run("groups", "show", "cart").out
    assert "cart is paused" in run("groups", "pause", "cart", "--why", "the database is full").out
    assert run("groups", "list", "--json").json[0]["paused"] is True
    assert "yes" in run("groups", "list").out
    refused = run("groups", "resume", "cart", "--topic", "orders")
    assert (refused.code, "CONFLICT" in refused.err) == (Exit.REJECTED, True)
    assert "cart receives messages" in run("groups", "resume", "cart").out
    assert "paused" not in run("groups", "show", "cart").out


def test_a_deleted_group_is_gone(run: Run, consumed: Callable[[int], None]) -> None:
    consumed(1)
    assert "cart is deleted with 0 dead letters" in run("groups", "delete", "cart").out
    assert run("groups", "list", "--json").json == []
    gone = run("groups", "delete", "cart")
    assert (gone.code, "UNKNOWN_GROUP" in gone.err) == (Exit.REJECTED, True)


def test_limits_are_set_shown_and_removed(run: Run, consumed: Callable[[int], None], bus: mq.Bus) -> None:
    consumed(1)
    set_ = run(
        "groups", "limit", "cart", "--rate", "100", "--in-flight", "5000", "--per-key", "1", "--why", "the provider"
    )
    assert "100 messages per second, 5,000 in flight, 1 in flight per key; its consumers hold 0" in set_.out
    assert "5,000 in flight" in run("groups", "show", "cart").out
    assert "limited" in run("status").out
    (limited,) = run("groups", "limit", "cart", "--in-flight", "7", "--json").json
    assert (limited["in_flight"], "rate" in limited, "in_flight_per_key" in limited) == (7, False, False)
    for wrong in ((), ("--none", "--rate", "1")):
        told = run("groups", "limit", "cart", *wrong)
        assert (told.code, "BAD_ARGUMENT" in told.err) == (Exit.USAGE, True)
    assert "no limits" in run("groups", "limit", "cart", "--none").out
    assert "in flight" not in run("groups", "show", "cart").out
    refused = run("groups", "limit", "gone", "--rate", "1")
    assert (refused.code, "UNKNOWN_GROUP" in refused.err) == (Exit.REJECTED, True)
    assert [act["act"] for act in bus.admin.acts()].count("groups.limit") == 4
