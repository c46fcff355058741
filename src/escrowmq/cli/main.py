"""The command ``escrowmq``: its name, its commands, and what happens when one fails."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from escrowmq.cli import (
    acts,
    backup,
    compensate,
    console,
    dead_letters,
    find,
    groups,
    inbox,
    jobs,
    log,
    messages,
    outbox,
    plan,
    serve,
    status,
    step_down,
    stuck,
    topics,
    transactions,
    writers,
)
from escrowmq.cli.failures import Commands
from escrowmq.cli.flags import takes_settings
from escrowmq.errors import Code, error

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="EscrowMQ: a message stays in escrow until the local transaction that it speaks of has decided.",
)

app.command("serve")(takes_settings(serve.serve))
app.command("step-down")(step_down.step_down)
app.command("gateway")(serve.gateway)
app.add_typer(serve.webhooks, name="webhooks")
app.command("console")(console.console)
app.command("demo")(jobs.demo)
app.add_typer(topics.app, name="topics")
app.command("send")(messages.send)
app.command("tail")(messages.tail)
app.add_typer(transactions.app, name="transactions")
app.add_typer(dead_letters.app, name="dead-letters")
app.command("lookup")(messages.lookup)
app.command("find")(find.find)
app.command("status")(status.status)
app.add_typer(groups.app, name="groups")
app.add_typer(writers.app, name="writers")
app.add_typer(plan.app, name="plan")
app.add_typer(acts.app, name="acts")
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.add_typer(outbox.app, name="outbox")
app.add_typer(inbox.app, name="inbox")
app.add_typer(stuck.app, name="stuck")
app.add_typer(compensate.app, name="compensate")
app.command("audit")(jobs.audit)
app.command("report")(jobs.report)
app.command("reconcile")(jobs.reconcile)
app.command("sweep")(jobs.sweep)
app.add_typer(log.app, name="log")


def _moved(name: str) -> None:
    """Have a command that went to the lab say so."""

    @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def moved() -> None:
        hint = f"escrowmq-lab {name} ...; python -m pip install escrowmq-lab, or make setup in a source checkout"
        raise error(Code.MISSING_PACKAGE, f"{name} is a command of escrowmq-lab", hint)


for _name in ("bench", "simulate", "chaos"):
    _moved(_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"escrowmq {version('escrowmq')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """EscrowMQ: a message stays in escrow until the local transaction that it speaks of has decided."""


def main() -> None:
    """Run the command line and exit with its code (see :class:`escrowmq.cli.failures.Exit`)."""
    app(prog_name="escrowmq")
