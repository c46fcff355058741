"""The operator commands on transactions, dead letters and rows of a database: shared options, and one table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import typer
from typer import Argument, Option

from escrowmq.cli import compensate, dead_letters, outbox, transactions
from escrowmq.cli.failures import Exit, finish, show_error
from escrowmq.cli.options import App, Database, Operation, Why, time_option
from escrowmq.cli.plan import PlanOptions, run_as_plan
from escrowmq.cli.printing import notice, print_json
from escrowmq.errors import Code, EscrowError, error

_SELECT = " Name them, or select them for a plan."
_RECORDED = " The action is recorded (`escrowmq acts list`)."


class Row(NamedTuple):
    """One operation: the name of its command, the function or method that applies it, and its help."""

    name: str
    function: str
    help: str


TRANSACTIONS = (
    Row("commit", "commit", "Commit undecided transactions: their messages become visible." + _SELECT),
    Row("rollback", "rollback", "Roll back undecided transactions: their messages never become visible." + _SELECT),
    Row("recheck", "recheck", "Reopen parked transactions and restart their check-back." + _SELECT),
)
DEAD_LETTERS = (
    Row("retry", "retry_dead_letters", "Redeliver dead letters to the group, with new attempts." + _SELECT),
    Row("discard", "discard_dead_letters", "Discard dead letters: the group does not receive them again." + _SELECT),
)
OUTBOX = (
    Row("retry", "outbox.attention.retry", "Send waiting or discarded messages again, with new attempts." + _RECORDED),
    Row("discard", "outbox.attention.discard", "Discard messages; `retry` restores them." + _RECORDED),
    Row("settle", "outbox.attention.settle", "Mark messages as done without sending them." + _RECORDED),
)
STUCK = (
    Row("retry", "outbox.modes.retry_stuck", "Retry the decision at the program's next redrive." + _RECORDED),
    Row("commit", "outbox.modes.commit_stuck", "Commit these transactions." + _RECORDED),
    Row("rollback", "outbox.modes.rollback_stuck", "Roll back these transactions." + _RECORDED),
    Row(
        "resend",
        "outbox.modes.resend_stuck",
        "Prepare and commit messages whose transactions are lost." + _RECORDED + "\n\nWithin the broker's dedup_window "
        "this returns the first transaction; if that was committed, two messages have the id.",
    ),
    Row("settle", "outbox.modes.settle_stuck", "Delete resolved rows; the broker keeps its state." + _RECORDED),
)
MARKS = (
    Row(
        "forget",
        "outbox.handled.forget_marks",
        "Delete records of handled messages, so that redeliveries are handled again." + _RECORDED,
    ),
    Row("settle", "outbox.handled.settle_marks", "Mark messages as handled: the group skips them." + _RECORDED),
)
PREPARES = (
    Row(
        "discard", "outbox.modes.discard_prepares", "Delete stored prepares; a later commit has no effect." + _RECORDED
    ),
)
CASES = (
    Row("retry", "compensation.retry_cases", "Retry ids in the next run, with new attempts." + _RECORDED),
    Row(
        "settle",
        "compensation.settle_cases",
        "Close cases that an operator has resolved; `retry` reopens them." + _RECORDED,
    ),
)


# At the brokers


@dataclass
class _Transactions:
    """Transactions that are named, or selected for a plan."""

    ids: list[str] | None = Argument(
        None,
        metavar="[ID]...",
        help="Transaction ids, such as 9f3a01c2-3-2a, or ids that producers gave to their messages (--group: of which "
        "group).",
    )
    state: str | None = Option(None, "--state", "-s", help="Select by state for a plan: undecided, open or parked.")
    group: str | None = Option(None, "--group", "-g", help="Select by group for a plan; with ids: their group.")
    older_than: Any = time_option(None, "--older-than", "Select those older than 30s, 5min, 2h for a plan.")

    def selection(self, name: str) -> dict[str, Any] | None:
        """Return the selection for a plan; None if ids are named."""
        chosen = _given(state=self.state, group=self.group, older_than=self.older_than)
        if self.ids and chosen.keys() == {"group"}:
            return None  # the group in which messages with these ids are looked up
        if bool(self.ids) == bool(chosen):
            hint = "name some by their ids, or choose by --group, --state, --older-than"
            raise error(Code.BAD_ARGUMENT, f"which transactions to {name}?", hint)
        return chosen or None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _on_transactions(row: Row) -> Callable[..., None]:
    def command(chosen: _Transactions, plan: PlanOptions, operation: Operation) -> None:
        if selection := chosen.selection(row.name):
            return run_as_plan(f"transactions.{row.name}", selection, plan, operation)
        results: list[tuple[str, Code, dict[str, Any]]] = []
        with operation.admin() as admin:
            for identity in chosen.ids or ():
                try:
                    code = getattr(admin, row.function)(identity, why=operation.why, group=chosen.group)
                except EscrowError as problem:
                    code = problem.code
                    if not operation.json:
                        show_error(problem)
                results.append((identity, code, {}))
        finish("transaction", results, operation.json)

    return command


@dataclass
class _DeadLetters:
    """Dead letters that are named, or selected for a plan."""

    group: str = Argument(..., metavar="GROUP", help="The consumer group.")
    places: list[str] | None = Argument(None, metavar="[TOPIC/QUEUE/OFFSET]...", help="As `list` names them.")
    all: bool = Option(False, "--all", help="Select all that the group has now for a plan.")
    cause: str | None = Option(None, help="Select by cause for a plan; numbers and ids in it do not count.")
    topic: str | None = Option(None, "--topic", "-t", help="Select by topic for a plan.")
    older_than: Any = time_option(None, "--older-than", "Select those dead for longer than 5min for a plan.")

    def selection(self, name: str) -> dict[str, Any] | None:
        """Return the selection for a plan; None if places are named."""
        chosen = _given(cause=self.cause, topic=self.topic, older_than=self.older_than)
        if bool(self.places) == (self.all or bool(chosen)):
            hint = "name some as TOPIC/QUEUE/OFFSET, or say --all, --cause, --topic, --older-than"
            raise error(Code.BAD_ARGUMENT, f"which dead letters to {name}?", hint)
        return None if self.places else {"group": self.group, **chosen}


def _on_dead_letters(row: Row) -> Callable[..., None]:
    def command(chosen: _DeadLetters, plan: PlanOptions, operation: Operation) -> None:
        if selection := chosen.selection(row.name):
            return run_as_plan(f"dead_letters.{row.name}", selection, plan, operation)
        items = [dead_letters.parse_place(place) for place in chosen.places or ()]
        with operation.admin() as admin:
            done = getattr(admin, row.function)(chosen.group, items, why=operation.why)
        if operation.json:
            print_json({"group": chosen.group, "act": row.name, "settled": done})
        else:
            notice(f"{row.name}: {done:,} dead letters of {chosen.group}")
        if done < len(items):
            raise typer.Exit(Exit.FINDING)

    return command


# In a database


@dataclass
class _Rows(Database):
    """Rows of a database, by message id."""

    ids: list[str] = Argument(..., metavar="ID...", help="Message ids, as `list` shows them.")
    why: Why = None

    def apply(self, function: str, *of: str, states: bool = True, **given: Any) -> None:
        """Apply an operation to every id and print each result; the exit code is that of the first failure."""
        module, _, name = function.rpartition(".")
        with self.open() as engine:
            act = getattr(importlib.import_module(f"escrowmq.{module}"), name)
            done: Sequence[Any] = act(engine, *of, self.ids, why=self.why, **given)
        results: list[tuple[str, Code, dict[str, Any]]] = []
        for one in done:
            identity = one.message_id if hasattr(one, "message_id") else one.id
            state = {"state": None if one.state is None else one.state.name.lower()} if states else {}
            results.append((identity.hex(), one.code, state))
        finish("message id", results, self.json)


def _on_rows(row: Row) -> Callable[..., None]:
    def command(rows: _Rows) -> None:
        rows.apply(row.function)

    return command


def _on_cases(row: Row) -> Callable[..., None]:
    def command(rows: _Rows, name: compensate.Name) -> None:
        rows.apply(row.function, name)

    return command


def _on_marks(row: Row) -> Callable[..., None]:
    def command(
        rows: _Rows,
        group: outbox.Group,
        topic: str | None = Option(None, "--topic", "-t", help="The messages' topic, if ids are not unique."),
    ) -> None:
        rows.apply(row.function, group, topic=topic, states=False)

    return command


def _on_prepares(row: Row) -> Callable[..., None]:
    def command(rows: _Rows, group: outbox.Group) -> None:
        rows.apply(row.function, group, states=False)

    return command


TABLE: Sequence[tuple[App, Callable[[Row], Callable[..., None]], tuple[Row, ...]]] = (
    (transactions.app, _on_transactions, TRANSACTIONS),
    (dead_letters.app, _on_dead_letters, DEAD_LETTERS),
    (outbox.app, _on_rows, OUTBOX),
    (outbox.stuck, _on_rows, STUCK),
    (outbox.inbox, _on_marks, MARKS),
    (outbox.inbox, _on_prepares, PREPARES),
    (compensate.app, _on_cases, CASES),
)
"""All operations: the group of their commands, the function that makes a command of one, and the operations."""


def register() -> None:
    """Add the command of each operation to its group."""
    for app, make, rows in TABLE:
        for row in rows:
            app.command(row.name, help=row.help)(make(row))
