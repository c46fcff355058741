"""Handlers in Django apps: the ``App`` objects in the module ``handlers`` of each installed app."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import close_old_connections
from django.utils.module_loading import autodiscover_modules

from escrowmq.errors import Code, Misuse
from escrowmq.handlers import App
from escrowmq.hooks import Call


def find_apps() -> list[App]:
    """Import the module ``handlers`` of each installed app and return the apps with handlers that they define.

    Raises Misuse(BAD_ARGUMENT) if two handlers have one group, and the errors of these modules.
    """
    autodiscover_modules("handlers")
    modules = [sys.modules.get(f"{config.name}.handlers") for config in apps.get_app_configs()]
    values = [value for module in modules if module is not None for value in vars(module).values()]
    found = list({id(value): value for value in values if isinstance(value, App) and value.handlers}.values())
    groups = [handler.group for app in found for handler in app.handlers]
    if repeated := sorted({group for group in groups if groups.count(group) > 1}):
        text = f"two handlers have the group {repeated[0]!r}: consumers of one group share its messages"
        raise Misuse(Code.BAD_ARGUMENT, text, "name another group")
    for handler in (handler for app in found for handler in app.handlers if handler.awaits):
        handler.function = _renewing(handler.function)
    return found


@contextmanager
def renew_connections(call: Call) -> Iterator[None]:
    """Close Django's obsolete connections of this thread before and after each handler (a hook)."""
    if call.operation != "handle":
        yield
        return
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


def _renewing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function that does the same where Django's asynchronous ORM has its connections."""
    renew = sync_to_async(close_old_connections)

    @wraps(function)
    async def call(*given: Any, **more: Any) -> None:
        await renew()
        try:
            await function(*given, **more)
        finally:
            await renew()

    return call
