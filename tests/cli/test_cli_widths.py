"""Every command that lists, with names of 40 characters and ids of 32, on a terminal of 80 columns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
import typer
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit
from escrowmq.cli.main import app
from escrowmq.compensation import CaseState
from escrowmq.outbox import State, claim_tx, migrate, send_tx
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import (
    trans_compensation_case,
    trans_driven,
    trans_message,
    trans_prepared,
    trans_recv_offset,
)

TOPIC, GROUP, SHOP, KEY = (name.ljust(40, "x") for name in ("orders-", "cart-", "shop-", "key-"))
ID = "5512d6ce8039354f0000000000000001"
LISTINGS = {
    "topics list": [TOPIC],
    "groups list": [GROUP, TOPIC],
    "groups list --producers": [SHOP],
    f"groups show {GROUP}": [GROUP, TOPIC],
    f"groups members {GROUP}": ["unnamed"],
    f"groups reset {GROUP} --to earliest --dry-run": [TOPIC],
    "writers list": [SHOP],
    "transactions list": [SHOP, "{transaction}"],
    "transactions summary": [SHOP],
    "transactions show {transaction}": [SHOP, TOPIC, KEY, "{transaction}"],
    f"dead-letters list {GROUP}": [f"{TOPIC}/0/0", KEY],
    "dead-letters summary": [GROUP],
    f"dead-letters show {GROUP} {TOPIC}/0/0": [TOPIC, KEY],
    "status": [GROUP, SHOP],
    f"lookup {KEY}": [KEY, "{transaction}"],
    "acts list": [GROUP],
    "acts show 1": [GROUP],
    "plan list": ["{plan}"],
    "plan show {plan}": ["{plan}", "{transaction}"],
    "plan rows {plan}": ["{transaction}"],
    "outbox list": [ID, TOPIC, KEY],
    f"outbox show {ID}": [ID, TOPIC, KEY],
    f"inbox list {GROUP}": [ID, TOPIC],
    f"inbox prepares {GROUP}": [ID, TOPIC],
    "inbox offsets": [GROUP, TOPIC, "worker-of-the-north-region-of-the-carts"],
    "stuck list": [ID, SHOP, TOPIC],
    "compensate list": [ID, GROUP],
    "tokens list --rights rights.toml": ["service"],
    f"sql 'SELECT key, topic FROM \"{TOPIC}\"'": [KEY, TOPIC],
}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "file:data"


@pytest.fixture
def places(bus: mq.Bus, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A broker and a database with one of everything. Yields the ids that only they know."""
    bus.admin.create_topic(TOPIC, 1)
    shop = bus.producer(SHOP, checker=lambda check: mq.UNKNOWN)
    shop.commit(shop.prepare(TOPIC, b"{}", key=KEY).transaction_id)
    shop.commit_batch("revenue", 7, [])
    transaction = str(shop.prepare(TOPIC, b"{}", key=KEY).transaction_id)
    consumer = bus.consumer(GROUP, TOPIC, max_attempts=1)
    (message,) = consumer.receive(1, wait=60.0)
    message.reject("ValueError: no such row in the table of the north region " * 3)
    run("groups", "pause", GROUP, "--why", "the database is full")
    plan = run("plan", "make", "transactions.commit", "--group", SHOP, "--json").json["id"]
    engine = sa.create_engine("sqlite:///shop.db")
    migrate(engine)
    fill(engine)
    run("rights", "init", "rights.toml", "--tokens", "tokens")
    monkeypatch.setenv("ESCROWMQ_DATABASE_URL", str(engine.url))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    yield {"transaction": transaction, "plan": plan}
    consumer.close()
    engine.dispose()


def fill(engine: sa.Engine) -> None:
    """Store one row of each kind that commands list."""
    row = {"topic": TOPIC, "body": b"{}"}
    owner = {"owner": "worker-of-the-north-region-of-the-carts", "epoch": 1}
    slot = {"shard": 2**31, "stride": 1, "part": 0, "queue": 12, "next_offset": 2**40}
    driven = {"producer_group": SHOP, "state": Stage.STUCK, "delay_us": 0, "attempts": 1, "created_us": 5}
    driven |= {"was": Stage.COMMITTING, "reason": "CONFLICT", "shard": 2**31, "transaction_id": bytes.fromhex(ID)}
    case = {"name": GROUP, "state": CaseState.STUCK, "attempts": 3, "first_us": 5, "changed_us": 5}
    with engine.begin() as connection:
        send_tx(connection, TOPIC, b"{}", key=KEY, message_id=bytes.fromhex(ID))
        connection.execute(sa.update(trans_message).values(state=State.WAITING, attempts=4, error="UNKNOWN_TOPIC"))
        claim_tx(connection, group=GROUP, message_id=bytes.fromhex(ID), topic=TOPIC)
        prepared = {**row, "consumer_group": GROUP, "message_id": bytes.fromhex(ID), "prepared_us": 1}
        connection.execute(sa.insert(trans_prepared), [prepared])
        connection.execute(sa.insert(trans_recv_offset), [{"consumer_group": GROUP, "topic": TOPIC, **slot, **owner}])
        connection.execute(sa.insert(trans_driven), [{**row, **driven, "id": bytes.fromhex(ID)}])
        found = {**case, "message_id": bytes.fromhex(ID), "reason": "ValueError: no such row " * 9}
        connection.execute(sa.insert(trans_compensation_case), [found])


@pytest.mark.verify
def test_every_listing_fits_80_columns_and_keeps_ids_in_one_piece(run: Run, places: dict[str, str]) -> None:
    bad, here = [], str(Path.cwd())  # a path that is longer than a line is left to the terminal
    for command, names in LISTINGS.items():
        told = run(*shlex.split(command.format(**places)))
        shown = re.sub(r"\x1b\[[0-9;]*m", "", told.out)
        print(f"$ {command}{shown}")
        lacking = [name for name in (name.format(**places) for name in names) if name not in shown]
        wide = [line for line in shown.splitlines() if len(line) > 80 and here not in line]
        if told.code not in (Exit.OK, Exit.FINDING) or lacking or wide:
            bad.append((command, told.code, lacking, wide, told.err))
    assert not bad, bad


def test_the_commands_above_are_all_that_list() -> None:
    names = {"list", "show", "summary", "members", "rows", "prepares", "offsets"}

    def listings(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
        for name, one in getattr(command, "commands", {}).items():
            yield from listings(one, (*path, name))
        if len(path) > 1 and path[-1] in names:
            yield " ".join(path)

    assert set(listings(typer.main.get_command(app))) <= {" ".join(words.split()[:2]) for words in LISTINGS}
