"""The generated pages are those of the code, and the code leaves nothing out."""

import dataclasses
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from escrowmq.cli.flags import lines
from escrowmq.cli.main import app
from escrowmq.cli.reference import PAGES, write
from escrowmq.errors import Code
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Exchange
from escrowmq.wire.actions.table import ACTIONS

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"


def test_writing_writes_every_page(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)


def test_every_setting_is_documented_and_is_a_flag() -> None:
    page = (DOCS / "settings.md").read_text()
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {option for parameter in serve.params for option in parameter.opts}
    for field in dataclasses.fields(BrokerSettings):
        assert f"| `{field.name}` |" in page
        assert "--" + field.name.replace("_", "-") in flags
    assert len(list(lines())) == len(dataclasses.fields(BrokerSettings))


def test_every_code_is_documented_once() -> None:
    page = (DOCS / "errors.md").read_text()
    assert [code for code in Code if page.count(f"| `{code.name}` | {int(code)} |") != 1] == []


def test_every_action_and_exchange_is_documented_once() -> None:
    page = (DOCS / "protocol.md").read_text()
    assert [name for name in (*ACTIONS, *Exchange) if page.count(f"### `{name}`\n") != 1] == []


def every_command(command=None, words: tuple[str, ...] = ()):
    command = command or typer.main.get_command(app)
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from every_command(child, (*words, name))


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_the_commands_of_the_design_are_there() -> None:
    every = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    moved = {name for name, command in every.items() if command.hidden}
    assert moved == {"bench", "simulate", "chaos"}, "they say where they went"
    commands = set(every) - moved
    assert commands == {
        "serve",
        "dev",
        "step-down",
        "work",
        "rocketmq",
        "gateway",
        "webhooks",
        "demo",
        "topics",
        "send",
        "prepare",
        "commit",
        "rollback",
        "tail",
        "transactions",
        "dead-letters",
        "plan",
        "lookup",
        "find",
        "status",
        "groups",
        "writers",
        "rights",
        "tokens",
        "certs",
        "whoami",
        "acts",
        "backup",
        "restore",
        "outbox",
        "inbox",
        "stuck",
        "compensate",
        "console",
        "audit",
        "report",
        "reconcile",
        "sweep",
        "sql",
        "log",
    }


def test_the_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands, one line each, in groups; and of the broker's flags those that are used most."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    every = CliRunner().invoke(app, ["--help"]).output
    assert len(every.rstrip().splitlines()) <= 55
    for panel in ("Run", "Messages", "Inspect", "Operate", "Verify", "Databases"):
        assert f"─ {panel} ─" in every
    few = CliRunner().invoke(app, ["serve", "--help"]).output
    shown = {word for word in few.split() if word.startswith("--") and word[2:3].isalpha()}
    assert {"--listen", "--tls-cert", "--help-all"} <= shown
    assert "--check-interval" not in few
    everything = CliRunner().invoke(app, ["serve", "--help-all"])
    assert everything.exit_code == 0
    assert "--check-interval" in everything.output
    assert "--advertise" in everything.output
