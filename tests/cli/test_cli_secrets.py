"""A password in the address of a database is in nothing that a command prints, wherever it stands in the address."""

from __future__ import annotations

import socket

import pytest
from cli_runs import Run

SECRET = "hunter2"


@pytest.fixture
def address() -> str:
    """A PostgreSQL that refuses connections, with the secret in each place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"postgresql+psycopg://u:{SECRET}@127.0.0.1:{port}/db?password={SECRET}&sslpassword={SECRET}"


@pytest.mark.parametrize(
    "words",
    [["outbox", "list"], ["acts", "list"], ["compensate", "list"], ["stuck", "list"], ["status"], ["find", "o-1"],
    ["inbox", "list", "cart"]],
    ids=lambda words: words[0],
)  # fmt: skip
@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
def test_no_command_shows_the_password_of_a_database(
    run: Run, made: None, address: str, words: list[str], json: bool
) -> None:
    ran = run(*words, "--database-url", address, *(["--json"] if json else []))
    assert ran.code != 0
    assert "127.0.0.1" in ran.out + ran.err, "it names the database"
    assert SECRET not in ran.out + ran.err


def test_an_address_that_is_none_is_named_without_its_password(run: Run, made: None) -> None:
    ran = run("outbox", "list", "--database-url", f"nosuch:kind//u:{SECRET}@h?password={SECRET}")
    assert ran.code == 2
    assert SECRET not in ran.err
    ran = run("topics", "list", "--url", f"escrow://u:{SECRET}@127.0.0.1:7700")
    assert ran.code == 2
    assert SECRET not in ran.err


def test_the_token_of_a_webhook_or_an_alarm_is_not_shown(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for wrong in ("", "x"):
        url = f"{wrong}http://127.0.0.1:{port}/hook?token={SECRET}"
        ran = run("webhooks", "test", "--webhook", f"parked={url}", "--json")
        assert ran.code != 0
        assert f":{port}/hook?token=***" in ran.out + ran.err
        assert SECRET not in ran.out + ran.err
    ran = run("sweep", "--orders", "sqlite:///a.db", "--products", "sqlite:///b.db", "--alarm", f"//u:{SECRET}@h")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "BAD_ARGUMENT: --alarm //u:***@h")
