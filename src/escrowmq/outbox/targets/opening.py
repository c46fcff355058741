"""Opens a target by its URL. The package of each broker's client is imported only when its URL is given."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.seam import Target
from escrowmq.platform.extras import missing_package
from escrowmq.platform.listening import shown_address

_TARGETS = {
    "escrow": ("escrow", "EscrowTarget", "outbox"),
    "escrows": ("escrow", "EscrowTarget", "outbox"),
    "escrow+unix": ("escrow", "EscrowTarget", "outbox"),
    "file": ("escrow", "EscrowTarget", "outbox"),
    "kafka": ("kafka", "KafkaTarget", "kafka"),
    "amqp": ("rabbitmq", "RabbitMqTarget", "rabbitmq"),
    "amqps": ("rabbitmq", "RabbitMqTarget", "rabbitmq"),
    "redis": ("redis", "RedisTarget", "redis"),
    "rediss": ("redis", "RedisTarget", "redis"),
}
"""By scheme: module, class, and the extra with its packages."""
GROUP = "escrowmq.targets"
"""The entry point group of targets of other packages, each under the scheme of its URLs."""


def open_target(url: str, **options: Any) -> Target:
    """Return the target of a URL: ``escrow://HOST:PORT[,HOST:PORT...]``, ``kafka://HOST:PORT[,HOST:PORT...]``,
    ``amqp://...``, ``redis://...``, ``file:FOLDER``. ``options`` are those of its class.

    Raises Misuse(BAD_URL), Misuse(MISSING_PACKAGE) naming the extra, Misuse(BAD_SETTING) for an unknown option.
    """
    target: Target = _class_of(url, options)(url, **options)
    return target


def read_options(url: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert the options of a target (``texts``: by name, from a command line) to the types of their defaults. Raises
    as :func:`open_target`."""
    parameters = inspect.signature(_class_of(url, texts)).parameters
    return {name: _value(name, text, parameters[name].default) for name, text in texts.items()}


def _class_of(url: str, options: Mapping[str, Any]) -> Any:
    found = _load_class(url)
    known = [name for name, p in inspect.signature(found).parameters.items() if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in options if name not in known]:
        hint = f"one of {', '.join(known)}"
        raise Misuse(Code.BAD_SETTING, f"{found.__name__} has no option {unknown[0]!r}", hint)
    return found


def _load_class(url: str) -> Any:
    scheme = url.partition(":")[0] if isinstance(url, str) else ""
    if scheme not in _TARGETS:
        others = {entry.name: entry for entry in entry_points(group=GROUP)}
        if scheme in others:
            return others[scheme].load()
        known = ", ".join([*_TARGETS, *sorted(others)])
        raise Misuse(Code.BAD_URL, f"{shown_address(str(url))!r} is not the URL of a target", f"one of {known}")
    module, name, extra = _TARGETS[scheme]
    try:
        return getattr(importlib.import_module(f"escrowmq.outbox.targets.{module}"), name)
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("escrowmq"):
            raise
        raise missing_package(problem.name or "", f"{scheme}:", extra) from problem


def _value(name: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int | float):
            return type(default)(text)
    except (KeyError, ValueError):
        raise Misuse(Code.BAD_SETTING, f"{name} = {text!r}", f"such as {default}") from None
    return text
