"""Errors on the command line: one exit code a branch, a red line, a hint."""

import pytest
import typer
from typer.testing import CliRunner

from escrowmq import errors
from escrowmq.cli.failures import Commands, Exit, exit_code, exit_code_of, show_error
from escrowmq.errors import Code, EscrowError, error

EXITS = {
    errors.Misuse: 2,
    errors.Rejected: 3,
    errors.Unknown: 4,
    errors.Overloaded: 5,
    errors.Corrupt: 6,
    errors.Denied: 7,
    errors.Fenced: 8,
}


@pytest.mark.parametrize("code", [c for c in Code if c.branch is not None])
def test_every_code_has_the_exit_code_of_its_branch(code: Code) -> None:
    assert exit_code(error(code)) == EXITS[type(error(code))]


def test_every_exit_code_has_a_meaning() -> None:
    assert all(code.meaning for code in Exit)


def test_a_subclass_has_the_exit_code_of_its_branch() -> None:
    class Special(errors.Corrupt):
        pass

    assert exit_code(Special(Code.DAMAGED)) == Exit.CORRUPT


def test_of_several_rows_the_first_failure_counts() -> None:
    assert exit_code_of([]) == Exit.OK
    assert exit_code_of([Code.COMMITTED, Code.ALREADY_COMMITTED, Code.NOTED]) == Exit.OK
    assert exit_code_of([Code.COMMITTED, Code.FENCED, Code.CONFLICT]) == Exit.FENCED


def test_the_hint_stands_below_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(error(Code.UNKNOWN_TOPIC, "no topic '[red]x'", "try [this]"))
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "UNKNOWN_TOPIC: no topic '[red]x'\nhint: try [this]\n")


def test_without_a_hint_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(error(Code.NOT_FOUND, "gone", ""))
    assert capsys.readouterr().err == "NOT_FOUND: gone\n"


@pytest.mark.parametrize(
    ("raised", "code"),
    [(error(Code.FENCED), 8), (error(Code.QUEUE_FULL), 5), (KeyboardInterrupt(), 130), (SystemExit(9), 9)],
)
def test_commands_end_with_their_exit_code(raised: BaseException, code: int) -> None:
    app = typer.Typer(cls=Commands)

    @app.command("fail")
    def fail() -> None:
        raise raised

    @app.command("other")
    def other() -> None:
        pass

    result = CliRunner().invoke(app, ["fail"])
    assert result.exit_code == code
    assert "Traceback" not in result.output
    if isinstance(raised, EscrowError):
        assert result.stderr.startswith(raised.code.name)
