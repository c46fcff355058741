"""examples/transfer: two banks, two databases, real processes killed between their steps; the total is the same at
every read.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bank_a
import bank_b
import pytest
import sqlalchemy as sa
import transfer
import transfer_auditor
from bank_a import Refused, Transfer
from bank_tables import accounts_a, credits, debits
from transfer_staff import DEATHS

from escrowmq import outbox
from escrowmq_lab.databases import databases, open_engine

SCRIPT = Path(transfer.__file__)
TELLING = {
    "outbox": {"bank-a.committed", "relay.built", "relay.sent", "bank-b.committed"},
    "barrier": {"bank-a.committed", "transaction.told", "bank-b.committed"},
}
"""The places of the short form."""


def play(tmp_path: Path, way: str, server: str | None, places: set[str], transfers: int = 0) -> None:
    """Every transfer arrives once, and every read on the way had the whole total, whoever dies."""
    deaths = [death for death in DEATHS[way] if death.place in places]
    with databases(transfer.NAMES, tmp_path, server) as urls:
        assert transfer.run(urls, tmp_path, max(transfers, 2 * len(deaths) + 2), way, deaths) == []


@pytest.mark.invariant("I24", "I38")
@pytest.mark.parametrize("way", sorted(DEATHS))
def test_money_is_conserved_whoever_dies(tmp_path: Path, way: str) -> None:
    play(tmp_path, way, None, TELLING[way])


@pytest.mark.invariant("I24")
@pytest.mark.parametrize(("server", "way"), [("postgres_url", "outbox"), ("mariadb_url", "barrier")])
def test_money_is_conserved_on_servers(request: pytest.FixtureRequest, tmp_path: Path, server: str, way: str) -> None:
    play(tmp_path, way, request.getfixturevalue(server), {"bank-a.committed", "bank-b.committed"})


@pytest.mark.long
@pytest.mark.parametrize("server", [None, "postgres_url", "mariadb_url"])
@pytest.mark.parametrize("way", sorted(DEATHS))
def test_money_is_conserved_at_every_place(
    request: pytest.FixtureRequest, tmp_path: Path, server: str | None, way: str
) -> None:
    places = {death.place for death in DEATHS[way]}
    play(tmp_path, way, server and request.getfixturevalue(server), places, transfers=60)


@pytest.mark.long
def test_one_command(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--transfers", "20", "--kill", "--folder", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "verdict: no money lost, none made"


def test_what_cannot_be_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "transfer_bank_a.db").touch()
    ended = subprocess.run([sys.executable, SCRIPT, "--folder", tmp_path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "transfer_bank_a.db exists already" in ended.stderr


def test_a_process_that_cannot_go_on_leaves_its_log_where_it_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the run is removed at its end; what is named must be there to read."""

    def run(urls: list[str], folder: Path, *_: object) -> list[str]:
        (folder / "relay.log").write_text("why")
        raise RuntimeError("relay ended by itself; see relay.log")

    monkeypatch.setattr(transfer, "run", run)
    given = {"way": "outbox", "kill": False, "folder": None, "database_url": None, "keep": False, "transfers": 1}
    assert transfer.main(argparse.Namespace(**given)) == 2
    told = capsys.readouterr().err
    folder = Path(re.search(r"relay\.log \(in (.+)\)", told)[1])  # type: ignore[index]
    assert (folder / "relay.log").read_text() == "why"
    shutil.rmtree(folder)


# The banks, without processes


@pytest.fixture
def banks(tmp_path: Path) -> Iterator[tuple[sa.Engine, sa.Engine, int]]:
    with databases(transfer.NAMES, tmp_path) as urls:
        a, b = map(open_engine, urls)
        total = transfer.open_banks(a, b, 10)
        yield a, b, total
        a.dispose()
        b.dispose()


class Delivered:
    """A message as bank B gets it."""

    def __init__(self, wanted: Transfer) -> None:
        message = wanted.message()
        self.message_id = wanted.transfer_id
        self.body = message.body


ONE = Transfer("t-1", "A0", "B0", 1000)


def problems(banks: tuple[sa.Engine, sa.Engine, int]) -> tuple[str, ...]:
    return transfer_auditor.read(*banks, True).problems


def test_a_transfer_that_the_payer_cannot_afford_leaves_nothing(banks: tuple[sa.Engine, sa.Engine, int]) -> None:
    a, _, total = banks
    with pytest.raises(Refused):
        bank_a.send_by_outbox(a, Transfer("t-1", "A0", "B0", 10_000_000))
    reading = transfer_auditor.read(*banks, True)
    assert (reading.in_a, reading.debited, reading.problems) == (total, 0, ())
    assert not bank_a.was_made(a, ONE)


@pytest.mark.invariant("I24")
def test_a_message_that_comes_twice_credits_once(banks: tuple[sa.Engine, sa.Engine, int]) -> None:
    a, b, _ = banks
    bank_a.send_by_outbox(a, ONE)
    assert transfer_auditor.read(*banks, True).in_flight == 1000
    for _ in range(2):
        bank_b.take(b, Delivered(ONE), call_back=True)
    reading = transfer_auditor.read(*banks, True)
    assert (reading.in_b, reading.in_flight, reading.problems) == (1000, 0, ())
    assert transfer_auditor.not_done(a) == 1
    outbox.mark_done(a, ["t-1"])
    assert transfer_auditor.not_done(a) == 0


@pytest.mark.invariant("I24")
def test_the_auditor_catches_a_receiver_without_the_log(
    banks: tuple[sa.Engine, sa.Engine, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = banks
    bank_a.send_by_outbox(a, ONE)
    monkeypatch.setattr(bank_b, "claim_tx", lambda *_, **__: True)
    for _ in range(2):
        bank_b.take(b, Delivered(ONE), call_back=False)
    assert any("more than once" in problem for problem in problems(banks))


@pytest.mark.invariant("I37")
def test_the_auditor_catches_a_message_outside_the_transaction(banks: tuple[sa.Engine, sa.Engine, int]) -> None:
    a, *_ = banks
    with a.begin() as connection:
        outbox.send_tx(connection, ONE.message(message_id=ONE.transfer_id))
    assert problems(banks) == ("debits and messages are not the same transfers",)
    with a.begin() as connection:
        bank_a.debit(connection, ONE)
    assert problems(banks) == ()


def test_the_auditor_catches_money_from_nowhere_and_money_gone(banks: tuple[sa.Engine, sa.Engine, int]) -> None:
    a, b, _ = banks
    with b.begin() as connection:
        bank_b.credit(connection, {"transfer_id": "t-9", "payee": "B1", "amount": 5})
    assert "transfer t-9: 5 credited, nothing debited" in problems(banks)
    with b.begin() as connection:
        connection.execute(sa.delete(credits))
    with a.begin() as connection:
        connection.execute(sa.update(accounts_a).values(amount=accounts_a.c.amount - 2))
        connection.execute(sa.delete(debits))
    assert any("is not" in problem for problem in problems(banks))
