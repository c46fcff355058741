"""Flags of ``escrowmq serve``: one for each entry of the settings table."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from escrowmq import settings
from escrowmq.cli.printing import duration, size
from escrowmq.settings import BrokerSettings

_METAVARS = {
    settings.SECONDS: "TIME",
    settings.BYTES: "SIZE",
    settings.COUNT: "N",
    settings.FLAG: "on|off",
    settings.TEXT: "TEXT",
}
_TEXTS: dict[str, Callable[[Any], str]] = {settings.SECONDS: duration, settings.BYTES: size}


MOST_USED = frozenset(
    {
        "folder",
        "listen",
        "socket",
        "tls_cert",
        "tls_key",
        "rights",
        "log",
        "metrics",
        "http",
        "console",
        "config",
        "_help_all",
        "help",
    }
)
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
        with hide_options(
            self, set() if ctx.meta.get("every flag") else {str(param.name) for param in self.params} - MOST_USED
        ):
            super().format_help(ctx, formatter)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta["every flag"] = True
        print(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all flags, with those of the settings."),
]


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


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` one flag per setting; its argument ``overrides`` receives the given values (a dict). Flags are
    parsed as text, like the environment and TOML, so that ``--check-interval 500ms`` works and a wrong value gives the
    same error."""
    table = lines()
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "overrides"]
    flags = [
        inspect.Parameter(
            line.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    "--" + line.name.replace("_", "-"),
                    help=f"{line.reason} \\[default: {line.default_text}]",
                    metavar="|".join(line.choices) or _METAVARS[line.unit],
                    rich_help_panel="Settings (also from the environment, ESCROWMQ_NAME, and from --config)",
                    show_default=False,
                ),
            ],
        )
        for line in table
    ]

    def wrapper(**values: Any) -> None:
        overrides = {line.name: values.pop(line.name) for line in table}
        command(**values, overrides={name: value for name, value in overrides.items() if value is not None})

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    return wrapper
