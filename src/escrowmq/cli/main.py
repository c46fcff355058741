"""The command ``escrowmq``: its name, its subcommands, and its handling of failures."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import typer

from escrowmq.cli import (
    acts,
    backup,
    compensate,
    dead_letters,
    dev,
    groups,
    halves,
    jobs,
    log,
    messages,
    operations,
    outbox,
    overview,
    plan,
    reconcile,
    rights,
    rocketmq,
    serve,
    sql,
    topics,
    transactions,
    work,
)
from escrowmq.cli.failures import Commands
from escrowmq.cli.flags import FewFlags
from escrowmq.cli.options import App
from escrowmq.errors import Code, error

app = App(
    "EscrowMQ: a message stays in escrow until the local transaction that it speaks of has decided.",
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
operations.register()

RUN, MESSAGES, INSPECT = "Run", "Messages", "Inspect"
OPERATE, VERIFY, DATABASES = "Operate", "Verify", "Databases"

_COMMANDS: tuple[tuple[str, str, Callable[..., Any] | typer.Typer, str], ...] = (
    (RUN, "serve", serve.serve, "Serve a data folder: the broker."),
    (RUN, "dev", dev.dev, "Broker, HTTP and console at once, to try or develop."),
    (RUN, "gateway", serve.gateway, "Serve HTTP over a broker."),
    (RUN, "rocketmq", rocketmq.rocketmq, "Serve RocketMQ 5 clients over a broker."),
    (RUN, "console", serve.console, "Serve the web console."),
    (RUN, "step-down", serve.step_down, "Make the leading broker hand over to a standby."),
    (RUN, "webhooks", serve.webhooks, "Webhooks for parked transactions and dead letters."),
    (RUN, "work", work.work, "Run the handlers of an app."),
    (RUN, "demo", jobs.demo, "Run a shop, kill its processes, audit the result."),
    (MESSAGES, "topics", topics.app, "Topics and their queues."),
    (MESSAGES, "send", messages.send, "Send plain messages."),
    (MESSAGES, "prepare", halves.prepare, "Send a half message: durable, invisible."),
    (MESSAGES, "commit", halves.commit, "Make the messages of a transaction visible."),
    (MESSAGES, "rollback", halves.rollback, "Drop the messages of a transaction."),
    (MESSAGES, "tail", messages.tail, "Show messages without consuming them."),
    (INSPECT, "status", overview.status, "The state of everything, and pending work."),
    (INSPECT, "find", overview.find, "The history of a message, and why it waits."),
    (INSPECT, "lookup", messages.lookup, "Messages by key or id, half messages too."),
    (INSPECT, "sql", sql.sql, "SQL over topics and system views."),
    (INSPECT, "whoami", rights.whoami, "Your principal, and its rights."),
    (INSPECT, "log", log.app, "The commit log of a data folder."),
    (OPERATE, "transactions", transactions.app, "Undecided transactions, and deciding them."),
    (OPERATE, "dead-letters", dead_letters.app, "Messages that failed too often."),
    (OPERATE, "groups", groups.app, "Consumer groups and producer groups."),
    (OPERATE, "writers", groups.writers, "Writers of numbered batches, such as Spark queries."),
    (OPERATE, "plan", plan.app, "Bulk operations: preview, dry-run, resumable steps."),
    (OPERATE, "acts", acts.app, "Operator actions: who did what, when and why."),
    (OPERATE, "backup", backup.backup, "Copy a broker's data while it works."),
    (OPERATE, "restore", backup.restore, "Make a data folder of a backup, or check one."),
    (OPERATE, "rights", rights.rights, "The rights file: who may do what."),
    (OPERATE, "tokens", rights.tokens, "Create and list tokens."),
    (OPERATE, "certs", rights.certs, "Certificates for development."),
    (VERIFY, "audit", jobs.audit, "Compare all sides of a run, message by message."),
    (VERIFY, "reconcile", reconcile.reconcile, "Compare the ids of two topics."),
    (VERIFY, "report", jobs.report, "Volumes, latency and what waits, as a page."),
    (DATABASES, "outbox", outbox.app, "The local message table and its relay."),
    (DATABASES, "inbox", outbox.inbox, "What consumers store in their database."),
    (DATABASES, "stuck", outbox.stuck, "Rows that disagree with the broker's decision."),
    (DATABASES, "compensate", compensate.app, "Repair announced messages that had no effect."),
    (DATABASES, "sweep", jobs.sweep, "Settle orders and freezes that are overdue."),
)
"""Panel, name, function, and line in the list of commands: short, so that the list fits on a screen."""

for _panel, _command, _does, _line in _COMMANDS:
    if isinstance(_does, typer.Typer):
        app.add_typer(_does, name=_command, rich_help_panel=_panel, short_help=_line)
    else:
        cls = FewFlags if _command == "serve" else None
        app.command(_command, cls=cls, rich_help_panel=_panel, short_help=_line)(_does)


def _register_moved(name: str) -> None:
    """Register a command that moved to the lab, with an error that says so."""

    @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def moved() -> None:
        hint = f"escrowmq-lab {name} ...; python -m pip install escrowmq-lab, or make setup in a source checkout"
        raise error(Code.MISSING_PACKAGE, f"{name} is a command of escrowmq-lab", hint)


for _moved in ("bench", "simulate", "chaos"):
    _register_moved(_moved)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"escrowmq {version('escrowmq')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """EscrowMQ: a message stays in escrow until its local transaction has decided."""


def main() -> None:
    """Run the command line and exit with its code (see :class:`escrowmq.cli.failures.Exit`)."""
    app(prog_name="escrowmq")
