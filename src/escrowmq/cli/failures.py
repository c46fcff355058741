"""Errors for people and scripts: a red line on stderr, and a meaningful exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from escrowmq import errors
from escrowmq.cli.flags import hide_options
from escrowmq.cli.printing import RUN, print_json, print_table, show_missing
from escrowmq.errors import DONE, Code, EscrowError
from escrowmq.platform.extras import EXTRAS, LAB, missing_package


class Exit(IntEnum):
    """Exit codes of every command: number, meaning (for docs/reference/command-line.md), and the error class that maps
    to it."""

    meaning: str
    branch: type[EscrowError] | None

    def __new__(cls, number: int, meaning: str, branch: type[EscrowError] | None = None) -> Exit:
        status = int.__new__(cls, number)
        status._value_ = number
        status.meaning, status.branch = meaning, branch
        return status

    OK = 0, "done"
    FINDING = 1, "done, with a negative result: a failed verdict, nothing found"
    USAGE = 2, "wrong use: an option, a URL, a setting, a folder (`Misuse`)", errors.Misuse
    REJECTED = 3, "refused, surely not applied (`Rejected`)", errors.Rejected
    UNKNOWN = 4, "no answer, may have been applied: repeat with the same id (`Unknown`)", errors.Unknown
    OVERLOADED = 5, "not applied, try again later (`Overloaded`)", errors.Overloaded
    CORRUPT = 6, "stored data is damaged or unreadable (`Corrupt`)", errors.Corrupt
    DENIED = 7, "no right to do this (`Denied`)", errors.Denied
    FENCED = 8, "a newer process took over (`Fenced`)", errors.Fenced
    MISSING = 9, "done at the reachable brokers; standard error names the others"
    INTERRUPTED = 130, "stopped by Ctrl-C"


def exit_code(problem: EscrowError) -> Exit:
    """Return the exit code of an error's class."""
    return next((code for code in Exit if code.branch and isinstance(problem, code.branch)), Exit.FINDING)


def exit_code_of(codes: Sequence[Code]) -> Exit:
    """Return the exit code of a call with one result per row: that of the first failed row."""
    return next((exit_code(errors.error(code)) for code in codes if code not in DONE), Exit.OK)


def show_error(problem: EscrowError) -> None:
    """Print a red line with code and message on stderr, and the hint below it."""
    line = Text.assemble((problem.code.name, "bold red"), (f": {problem.message}", "red"))
    if problem.hint:
        line.append(f"\nhint: {problem.hint}", "default")
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def finish(head: str, results: Sequence[tuple[str, Code, dict[str, Any]]], json: bool) -> None:
    """Print one result per id, with further fields if any, and exit with the code of the first failure."""
    if json:
        print_json([{"id": i, "result": code.name, **more, "ok": code in DONE} for i, code, more in results])
    else:
        heads = (head, "result", *(results[0][2] if results else ()))
        rows = [(i, Text(code.name, "green" if code in DONE else "red"), *more.values()) for i, code, more in results]
        print_table(heads, rows, "")
    if status := exit_code_of([code for _, code, _ in results]):
        raise typer.Exit(status)


class Commands(TyperGroup):
    """A command group that converts every EscrowError to an error line and exit code."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the commands on one screen, without a panel of options: the usage line names the needed ones."""
        self.help, self.options_metavar = "", "[--version] [-h]"
        with hide_options(self, {str(param.name) for param in self.params}):
            super().format_help(ctx, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        """Return ``--help``, hidden in the list of options."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        RUN.missing, RUN.json = [], False
        try:
            result = super().invoke(ctx)
            if RUN.missing:
                raise typer.Exit(Exit.MISSING)
            return result
        except EscrowError as problem:
            show_error(problem)
            raise typer.Exit(exit_code(problem)) from None
        except ModuleNotFoundError as problem:
            if (problem.name or "").partition(".")[0] not in EXTRAS.keys() | LAB:
                raise
            lacking = missing_package(problem.name or "", "this command")
            show_error(lacking)
            raise typer.Exit(exit_code(lacking)) from None
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None
        finally:
            show_missing()
