"""``escrowmq log``: look into a stored log."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="The commit log of a data folder.")
