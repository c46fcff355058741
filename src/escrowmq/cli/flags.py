"""Flags of ``escrowmq serve``: one for each entry of the settings table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from escrowmq import settings
from escrowmq.cli.printing import duration, size
from escrowmq.settings import BrokerSettings

_METAVARS = {
    **{settings.SECONDS: "TIME", settings.BYTES: "SIZE", settings.COUNT: "N"},
    **{settings.FLAG: "on|off", settings.TEXT: "TEXT"},
}
_TEXTS: dict[str, Callable[[Any], str]] = {settings.SECONDS: duration, settings.BYTES: size}

MOST_USED = {
    "folder", "listen", "socket", "tls_cert", "tls_key", "rights", "log", "metrics", "http", "console", "config",
    "help_all", "help",
}  # fmt: skip
"""Parameters shown by ``serve --help``; ``--help-all`` shows all."""


@contextmanager
def hide_options(command: Any, names: Set[str]) -> Iterator[None]:
    """Hide these options from a command's help within the block."""
    hidden = [param for param in command.params if param.name in names and not getattr(param, "hidden", True)]
    for param in hidden:
        param.hidden = True
    try:
        yield
    finally:
        for param in hidden:
            param.hidden = False


class FewFlags(TyperCommand):
    """A command with more flags than fit on a screen: ``--help`` shows the most used ones."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the help; complete if the context requests it."""
        names = {str(param.name) for param in self.params}
        with hide_options(self, set() if ctx.meta.get("every flag") else names - MOST_USED):
            super().format_help(ctx, formatter)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Show the complete help, and exit; the callback of ``--help-all``."""
    if wanted:
        ctx.meta["every flag"] = True
        print(ctx.get_help())
        raise typer.Exit


class Line(NamedTuple):
    """A row of the settings table, ready for display."""

    name: str
    unit: str
    reason: str
    default: Any
    least: float
    choices: tuple[str, ...]

    @property
    def default_text(self) -> str:
        """The default with its unit; accepted as input."""
        if self.unit == settings.FLAG:
            return "on" if self.default else "off"
        return _TEXTS.get(self.unit, str)(self.default)


def lines() -> list[Line]:
    """Return the settings table, in its order."""
    return [Line(field.name, default=field.default, **field.metadata) for field in dataclasses.fields(BrokerSettings)]


def _flag(line: Line) -> Any:
    """Return the option of a setting. Its value is a text, like that of the environment and TOML, so that
    ``--check-interval 500ms`` works and a wrong value gives the same error."""
    return typer.Option(
        None,
        help=f"{line.reason} \\[default: {line.default_text}]",
        metavar="|".join(line.choices) or _METAVARS[line.unit],
        rich_help_panel="Settings (also from the environment, ESCROWMQ_NAME, and from --config)",
        show_default=False,
    )


Overrides: Any = dataclasses.make_dataclass("Overrides", [(line.name, str | None, _flag(line)) for line in lines()])
"""One option per setting, as parameters of a command; None if it is not given."""
