"""``escrowmq inbox`` and ``escrowmq stuck``: what consumers and producer-driven transactions leave for a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from cli_runs import Run

from escrowmq.cli.failures import Exit
from escrowmq.cli.outbox import format_slot, parse_slot
from escrowmq.outbox import Slot, claim_tx, migrate
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import trans_driven, trans_prepared, trans_recv_offset

ONE, TWO = "01" * 16, "02" * 16


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sa.Engine]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    monkeypatch.setenv("ESCROWMQ_DATABASE_URL", url)
    engine = sa.create_engine(url)
    migrate(engine)
    yield engine
    engine.dispose()


def recorded(run: Run, shop: sa.Engine) -> list[tuple[str, str | None]]:
    found = run("acts", "list", "--database-url", str(shop.url), "--json").json
    return [(act["act"], act["why"]) for act in found]


def test_marks_are_listed_forgotten_and_set(run: Run, shop: sa.Engine) -> None:
    with shop.begin() as connection:
        claim_tx(connection, group="cart", message_id=bytes.fromhex(ONE), topic="orders")
    (mark,) = run("inbox", "list", "cart", "--json").json
    assert (mark["message_id"], mark["topic"], mark["forgotten"]) == (ONE, "orders", False)
    done = run("inbox", "forget", "cart", ONE, TWO, "--why", "a bad release", "--json")
    assert (done.code, [one["result"] for one in done.json]) == (Exit.REJECTED, ["OK", "NOT_FOUND"])
    table = run("inbox", "list", "cart").out
    assert ONE in table
    assert "may be handled again" in table
    assert run("inbox", "settle", "cart", TWO, "--topic", "orders").code == Exit.OK
    assert recorded(run, shop) == [("inbox.forget", "a bad release"), ("inbox.settle", None)]
    assert run("inbox", "forget", "no group", ONE).code == Exit.REJECTED
    assert run("inbox", "list", "nobody", "--json").json == []


def test_offsets_are_listed_moved_and_fenced(run: Run, shop: sa.Engine) -> None:
    place = {"consumer_group": "cart", "topic": "orders", "shard": 42, "stride": 1, "part": 0, "epoch": 1}
    with shop.begin() as connection:
        rows = [
            {**place, "queue": 0, "next_offset": 9, "owner": "c-1"},
            {**place, "queue": 1, "next_offset": 7, "owner": None},
        ]
        connection.execute(sa.insert(trans_recv_offset), rows)
    listed = run("inbox", "offsets", "--group", "cart", "--json").json
    assert [(one["slot"], one["next_offset"], one["owner"]) for one in listed] == [
        ("0000002a/0", 9, "c-1"),
        ("0000002a/1", 7, None),
    ]
    moved = run("inbox", "move", "cart", "orders", "0000002a/0", "0000002a/1", "--to", "3", "--json")
    assert (moved.code, [(one["result"], one["was"]) for one in moved.json]) == (
        Exit.REJECTED,
        [("CONFLICT", 9), ("OK", 7)],
    )
    assert (
        "the previous owner is fenced"
        in run("inbox", "fence", "cart", "orders", "0000002a/0", "--why", "it is dead").err
    )
    assert run("inbox", "move", "cart", "orders", "2a/0", "--to", "0").code == Exit.OK
    assert "none" in run("inbox", "offsets").out
    assert [act for act, _ in recorded(run, shop)] == ["offsets.move", "offsets.fence", "offsets.move"]
    refused = run("inbox", "move", "cart", "orders", "orders-0", "--to", "0")
    assert (refused.code, "0000002a/3" in refused.err) == (Exit.USAGE, True)
    for slot in (Slot(42, 1), Slot(1, 2, 3, 0)):
        assert parse_slot(format_slot(slot)) == slot


def test_prepares_are_listed_and_discarded(run: Run, shop: sa.Engine) -> None:
    row = {
        "consumer_group": "cart",
        "message_id": bytes.fromhex(ONE),
        "topic": "orders",
        "body": b"xyz",
        "prepared_us": 1,
    }
    with shop.begin() as connection:
        connection.execute(sa.insert(trans_prepared), [row])
    (found,) = run("inbox", "prepares", "cart", "--older-than", "1h", "--json").json
    assert (found["message_id"], found["body_bytes"]) == (ONE, 3)
    assert ONE in run("inbox", "prepares", "cart").out
    assert run("inbox", "discard", "cart", ONE).code == Exit.OK
    assert run("inbox", "prepares", "cart", "--json").json == []


def test_stuck_rows_are_listed_and_decided_by_name(run: Run, shop: sa.Engine) -> None:
    common = {"producer_group": "shop", "state": Stage.STUCK, "topic": "orders", "body": b"x", "delay_us": 0}
    common |= {"attempts": 1, "created_us": 5, "was": Stage.COMMITTING, "reason": "CONFLICT", "shard": 42}
    ids = [f"{number:02x}" * 16 for number in range(1, 6)]
    with shop.begin() as connection:
        rows = [{**common, "id": bytes.fromhex(one), "transaction_id": bytes.fromhex(one)} for one in ids]
        connection.execute(sa.insert(trans_driven), rows)
    listed = run("stuck", "list", "--group", "shop", "--json").json
    assert [(one["id"], one["was"], one["reason"], one["shard"]) for one in listed] == [
        (one, "committing", "CONFLICT", "0000002a") for one in ids
    ]
    assert "CONFLICT" in run("stuck", "list", "-n", "1").out
    for act, one, state in zip(
        ("retry", "commit", "rollback", "resend", "settle"),
        ids,
        ("committing", "committing", "rolling_back", "decided", None),
        strict=True,
    ):
        done = run("stuck", act, one, "--why", f"to {act}", "--json")
        assert (done.code, done.json[0]["state"]) == (Exit.OK, state)
    assert run("stuck", "list", "--json").json == []
    assert recorded(run, shop) == [
        (f"stuck.{act}", f"to {act}") for act in ("retry", "commit", "rollback", "resend", "settle")
    ]
    assert run("stuck", "list", "--state", "gone").code == Exit.USAGE
