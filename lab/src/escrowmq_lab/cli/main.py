"""The command ``escrowmq-lab``: simulate, chaos and bench."""

from __future__ import annotations

import typer

from escrowmq.cli.failures import Commands
from escrowmq_lab.cli import bench, chaos, simulate

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The laboratory of EscrowMQ: what proves it, and measures it.",
)

app.command("simulate")(simulate.simulate)
app.command("chaos")(chaos.chaos)
app.command("bench")(bench.bench)


def main() -> None:
    """Run the command line and exit with its code (see :class:`escrowmq.cli.failures.Exit`)."""
    app(prog_name="escrowmq-lab")
