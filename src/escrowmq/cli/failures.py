"""Errors as a person and as a script see them: a red line on stderr, and an exit code with a meaning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from escrowmq import errors
from escrowmq.cli.printing import print_json, print_table
from escrowmq.errors import DONE, Code, EscrowError


class Exit(IntEnum):
    """Exit codes of every command; docs/command-line.md is made from this table."""

    OK = 0
    FINDING = 1
    USAGE = 2
    REJECTED = 3
    UNKNOWN = 4
    OVERLOADED = 5
    CORRUPT = 6
    DENIED = 7
    FENCED = 8
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FINDING: "done, and the answer is bad news: a failed verdict, nothing found",
    Exit.USAGE: "wrong use: an option, a URL, a setting, a folder (`Misuse`)",
    Exit.REJECTED: "refused, surely not applied (`Rejected`)",
    Exit.UNKNOWN: "no answer, may have been applied: ask again with the same id (`Unknown`)",
    Exit.OVERLOADED: "not applied, try again later (`Overloaded`)",
    Exit.CORRUPT: "stored data is damaged or unreadable (`Corrupt`)",
    Exit.DENIED: "no right to do this (`Denied`)",
    Exit.FENCED: "someone newer took over (`Fenced`)",
    Exit.INTERRUPTED: "stopped by Ctrl-C",
}

_EXITS: dict[type[EscrowError], Exit] = {
    errors.Misuse: Exit.USAGE,
    errors.Rejected: Exit.REJECTED,
    errors.Unknown: Exit.UNKNOWN,
    errors.Overloaded: Exit.OVERLOADED,
    errors.Corrupt: Exit.CORRUPT,
    errors.Denied: Exit.DENIED,
    errors.Fenced: Exit.FENCED,
}


def exit_code(problem: EscrowError) -> Exit:
    """The exit code of an error's branch."""
    return next((code for branch, code in _EXITS.items() if isinstance(problem, branch)), Exit.FINDING)


def exit_code_of(codes: Sequence[Code]) -> Exit:
    """The exit code of a call with one result per row: that of the first row that failed."""
    for code in codes:
        if code not in DONE:
            return exit_code(errors.error(code))
    return Exit.OK


def show_error(problem: EscrowError) -> None:
    """One red line with code and message on stderr, and the hint below it."""
    line = Text.assemble((problem.code.name, "bold red"), (f": {problem.message}", "red"))
    if problem.hint:
        line.append(f"\nhint: {problem.hint}", "default")
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def finish(head: str, results: Sequence[tuple[str, Code, dict[str, Any]]], json: bool) -> None:
    """Print one result per id, with more fields if there are, and exit with the code of the first that failed."""
    if json:
        print_json([{"id": i, "result": code.name, **more, "ok": code in DONE} for i, code, more in results])
    else:
        heads = (head, "result", *(results[0][2] if results else ()))
        rows = [(i, Text(code.name, "green" if code in DONE else "red"), *more.values()) for i, code, more in results]
        print_table(heads, rows, "")
    if status := exit_code_of([code for _, code, _ in results]):
        raise typer.Exit(status)


class Commands(TyperGroup):
    """A group of commands that turns every EscrowError into its line and exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except EscrowError as problem:
            show_error(problem)
            raise typer.Exit(exit_code(problem)) from None
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None
