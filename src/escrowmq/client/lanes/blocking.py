"""Generates blocking methods from coroutines, each with its parameters, types and docstring.

The class of a blocking face (``Producer``) and the class whose coroutines it takes over (``AsyncProducer``) have one
base with all their state. The coroutine gets the blocking object as its ``self``, and everything it awaits blocks,
because the state was made with :class:`~escrowmq.client.lanes.waiting.Threads`. So a coroutine of a face awaits only
what stands in the common base or below, never a public method of its own class, which on the other face is no
coroutine.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Make a blocking method of a coroutine function: it runs the coroutine to its end and returns the result. Raises
    RuntimeError if the coroutine suspends."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> T:
        return finished(method(face, *args, **given))

    return call


def at_once(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make a coroutine function of a method that never waits. The method runs when it is called: a forgotten ``await``
    loses nothing."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> Coroutine[Any, Any, T]:
        return Done(method(face, *args, **given))

    return call


def begun(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Wrap a coroutine function so that the call itself runs it until it first waits: its request leaves even if the
    ``await`` is forgotten. What it raises until then is raised by the call."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> Coroutine[Any, Any, T]:
        coroutine = method(face, *args, **given)
        try:
            waits_for = coroutine.send(None)
        except StopIteration as done:
            return Done(done.value)
        return Rest(coroutine, waits_for)

    return call


class Rest(Coroutine[Any, Any, T]):
    """A coroutine that has begun to wait for something before it is awaited; the first step gives that again."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = [waits_for]

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            try:
                step = partial(self.send, (yield waits_for))
            except BaseException as problem:  # a cancellation
                step = partial(self.throw, problem)

    def send(self, value: Any) -> Any:
        return self._waits_for.pop() if self._waits_for else self._coroutine.send(value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        self._waits_for.clear()
        return self._coroutine.throw(kind if value is None else value)

    def close(self) -> None:
        self._coroutine.close()


class Done(Coroutine[Any, Any, T]):
    """A coroutine that has ended before it is awaited, with ``value``."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, T]:
        return self.value
        yield  # makes it a generator

    def send(self, value: Any) -> Any:
        raise StopIteration(self.value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        raise kind if value is None else value

    def close(self) -> None: ...


def iterating(method: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Make a generator function of an async generator function; each step as in :func:`blocking`."""

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **given: P.kwargs) -> Iterator[T]:
        return _steps(method(face, *args, **given))

    return call


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result. Raises RuntimeError if it suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise _suspension_error(coroutine)


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
                raise _suspension_error(iterator)
            yield value
    except GeneratorExit:  # the caller leaves early
        finished(iterator.aclose())
        raise


def _suspension_error(coroutine: Any) -> RuntimeError:
    return RuntimeError(f"{coroutine.__qualname__} waits for an event loop, and there is none on the blocking face")


class AsyncCloses:
    """``async with`` for a face to await: leaving the block closes it."""

    async def _close(self) -> object:
        """Close the producer, consumer, reader or bus; its base class defines how."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()


class Closes:
    """``with`` for a blocking face: leaving the block closes it."""

    def __enter__(self) -> Self:
        return self

    __exit__ = blocking(AsyncCloses.__aexit__)
