"""The user's own dependencies of handlers: a factory for each type, entered and left around each message."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from escrowmq.errors import Code, Misuse

F = TypeVar("F", bound=Callable[..., Any])


class Dependencies:
    """Factories by type. A factory takes no parameters; what it returns is entered if it is a context manager, a
    generator function is one, and a coroutine function is awaited."""

    def __init__(self) -> None:
        self._factories: dict[Any, Callable[..., Any]] = {}

    def __contains__(self, kind: Any) -> bool:
        return kind in self._factories

    def add(self, kind: Any, factory: Callable[..., Any]) -> None:
        """Use ``factory`` for parameters annotated with ``kind``, in place of an earlier one."""
        if not callable(factory):
            raise Misuse(Code.BAD_ARGUMENT, f"the dependency {_name(kind)}: {factory!r} is no function")
        if inspect.isgeneratorfunction(factory):
            factory = contextmanager(factory)
        elif inspect.isasyncgenfunction(factory):
            factory = asynccontextmanager(factory)
        self._factories[kind] = factory

    async def provide(self, kind: Any, stack: AsyncExitStack, awaits: bool) -> Any:
        """Return a value of type ``kind``, which ``stack`` leaves. A plain function (``awaits`` false) cannot wait for
        an asynchronous one: Misuse(BAD_ARGUMENT)."""
        value = self._factories[kind]()
        is_async = inspect.isawaitable(value) or (hasattr(value, "__aenter__") and not hasattr(value, "__enter__"))
        if is_async and not awaits:
            if inspect.iscoroutine(value):
                value.close()
            text = f"the dependency {_name(kind)} is asynchronous, and the handler a plain function"
            raise Misuse(Code.BAD_ARGUMENT, text, "write the handler as async def, or a plain factory")
        if inspect.isawaitable(value):
            value = await value
        return await enter(value, stack, awaits)


async def enter(value: Any, stack: AsyncExitStack, awaits: bool) -> Any:
    """Enter a context manager and return what it gives; return any other value as it is."""
    if awaits and hasattr(value, "__aenter__"):
        return await stack.enter_async_context(value)
    return stack.enter_context(value) if hasattr(value, "__enter__") else value


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
