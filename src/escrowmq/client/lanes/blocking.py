"""Generates blocking methods from coroutines, each with its parameters, types and docstring.

The class of a blocking face (``Producer``) and the class whose coroutines it takes over (``AsyncProducer``) have one base with
all their state. The coroutine gets the blocking object as its ``self``, and everything it awaits blocks, because the state
was made with :class:`~escrowmq.client.lanes.waiting.Threads`. So a coroutine of a face awaits only what stands in the common
base or below, never a public method of its own class, which on the other face is no coroutine.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method that runs a coroutine to its end before it returns. Raises RuntimeError if the coroutine suspends."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> T:
        return finished(method(face, *args, **given))

    return call


def at_once(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The other way round: the coroutine function of a method that never waits."""

    @functools.wraps(method)
    async def call(face: Any, /, *args: P.args, **given: P.kwargs) -> T:
        return method(face, *args, **given)

    return call


def iterating(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The generator of what an async generator gives; each step as in :func:`blocking`."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> Iterator[T]:
        return _steps(method(face, *args, **given))

    return call


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends; raises RuntimeError if it does."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise _suspended(coroutine)


def _steps(iterator: Any) -> Iterator[Any]:
    step = iterator.__anext__
    try:
        while True:
            try:
                step().send(None)
            except StopIteration as done:
                value = done.value
            except StopAsyncIteration:
                return
            else:
                raise _suspended(iterator)
            yield value
    except GeneratorExit:  # the caller leaves early
        finished(iterator.aclose())
        raise


def _suspended(coroutine: Any) -> RuntimeError:
    return RuntimeError(f"{coroutine.__qualname__} waits for an event loop, and there is none on the blocking face")


class AsyncCloses:
    """``async with`` for a face to await: leaving the block closes it."""

    async def _close(self) -> None:
        """What closing means; the base of both faces says it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()


class Closes:
    """``with`` for a blocking face: leaving the block closes it."""

    def __enter__(self) -> Self:
        return self

    __exit__ = blocking(AsyncCloses.__aexit__)
