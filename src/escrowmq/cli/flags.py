"""Generates one flag of ``escrowmq serve`` for each entry of the settings table."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

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


class Line(NamedTuple):
    """One line of the settings table, ready to be shown."""

    name: str
    unit: str
    reason: str
    default: Any
    least: float
    choices: tuple[str, ...]

    @property
    def default_text(self) -> str:
        """The default with its unit, as a person says it; it can be typed back in."""
        if self.unit == settings.FLAG:
            return "on" if self.default else "off"
        return _TEXTS.get(self.unit, str)(self.default)


def lines() -> list[Line]:
    """The settings table, in its order."""
    return [Line(field.name, default=field.default, **field.metadata) for field in dataclasses.fields(BrokerSettings)]


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` one flag per setting; the values that were given are its argument ``overrides`` (a dict).

    Flags are read as text, in the same way as the environment and TOML, so that ``--check-interval 500ms`` works and
    a wrong value gives the same error.
    """
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
