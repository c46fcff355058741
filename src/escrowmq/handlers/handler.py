"""A handler: a function, what it is subscribed to, and how its parameters are filled."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from escrowmq.client.consuming.options import DEFAULT_BATCH
from escrowmq.client.consuming.received import (
    AsyncReceived,
    AsyncReceivedBatch,
    LeasedRows,
    Received,
    ReceivedBase,
    ReceivedBatch,
)
from escrowmq.errors import Code, Misuse
from escrowmq.handlers.decoding import Decode, decoder_of
from escrowmq.handlers.dependencies import Dependencies, enter
from escrowmq.handlers.outcomes import Unavailable, Undecodable
from escrowmq.model import Message

if TYPE_CHECKING:
    from escrowmq.handlers.once import Once

_RECEIVED = (Received, AsyncReceived, ReceivedBase)
_BATCHES = (ReceivedBatch, AsyncReceivedBatch)
MAX_CONCURRENCY = 1024


@dataclass(frozen=True, slots=True)
class Choices:
    """The subscription of a handler, and its options; see :meth:`App.handler`."""

    topics: tuple[str, ...]
    group: str
    tags: str | Sequence[str] | None = None
    once: Any = None
    concurrency: int = 1
    ordered: bool = False
    batch: bool | int = False
    consumer: Mapping[str, Any] = field(default_factory=dict)
    """Further options of :meth:`escrowmq.Bus.consumer`."""

    @property
    def receive(self) -> int:
        """Messages of a batch that is handed to the function."""
        return DEFAULT_BATCH if self.batch is True else int(self.batch)


class Handler:
    """A decorated function. ``awaits``: it is a coroutine function; ``body_type``: what its first parameter is."""

    once: Once | None = None

    def __init__(
        self, function: Callable[..., Any], choices: Choices, dependencies: Dependencies, names: Mapping[str, Any]
    ) -> None:
        """``names`` are the local names where the function is defined. Raises Misuse(BAD_ARGUMENT)."""
        self.name = getattr(function, "__qualname__", repr(function)).rpartition(".<locals>.")[2]
        self.function, self.choices, self._dependencies = function, choices, dependencies
        self.awaits = inspect.iscoroutinefunction(function)
        self.group = choices.group
        self._check_choices()
        (first, *others), hints = self._parameters(names)
        self.body_type = hints[first.name]
        self._decode: Decode | None = None
        if not self._is_received(self.body_type):
            self._decode = decoder_of(self.body_type, self.name)
        wanted = {each.name: hints.get(each.name, Any) for each in others}
        if choices.once is not None:
            from escrowmq.handlers.once import Once

            self.once = Once(choices.once, list(wanted.values()), self.awaits, self.name)
        self._others = {each.name: wanted[each.name] for each in others if self._is_wanted(each, wanted[each.name])}
        self._is_simple = self.once is None and all(kind in _RECEIVED for kind in self._others.values())

    @property
    def decodes(self) -> bool:
        """Return whether the function gets a body of ``body_type``; otherwise it gets what was received."""
        return self._decode is not None

    def _check_choices(self) -> None:
        """Reject a function and choices that no consumer could serve."""
        choices = self.choices
        for wrong, text, hint in (
            (not callable(self.function), f"{self.function!r} is no function", "decorate a function"),
            (
                inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function),
                f"{self.name} is a generator function",
                "return in place of yield",
            ),
            (not choices.topics, f"{self.name} has no topic", '@app.handler("orders", group="cart")'),
            (
                not isinstance(choices.concurrency, int) or not 1 <= choices.concurrency <= MAX_CONCURRENCY,
                f"{self.name}: concurrency = {choices.concurrency!r}",
                f"messages at once, 1 to {MAX_CONCURRENCY}",
            ),
            (
                not isinstance(choices.batch, int) or choices.batch < 0,
                f"{self.name}: batch = {choices.batch!r}",
                "True, or the messages of a batch",
            ),
        ):
            if wrong:
                raise Misuse(Code.BAD_ARGUMENT, text, hint)

    def _parameters(self, names: Mapping[str, Any]) -> tuple[list[inspect.Parameter], dict[str, Any]]:
        """Return the parameters that can be filled, at least one, and their types by name."""
        try:
            hints = typing.get_type_hints(self.function, localns=dict(names))
        except NameError as problem:
            hint = "import it, not under TYPE_CHECKING alone, and define it above the handler"
            raise Misuse(Code.BAD_ARGUMENT, f"{self.name}: an annotation is not known: {problem}", hint) from problem
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = [each for each in inspect.signature(self.function).parameters.values() if each.kind in kinds]
        if not found or found[0].kind is inspect.Parameter.KEYWORD_ONLY or found[0].name not in hints:
            hint = f"def {self.name}(body: bytes) -> None: the annotation says how the body is decoded"
            raise Misuse(Code.BAD_ARGUMENT, f"{self.name}: its first parameter has no annotation", hint)
        return found, hints

    def _is_received(self, kind: Any) -> bool:
        """Return whether the first parameter gets what was received, undecoded; with ``batch`` it must."""
        if kind is pa.RecordBatch or kind in _BATCHES:
            if not self.choices.batch:
                raise Misuse(Code.BAD_ARGUMENT, f"{self.name}: {kind.__name__} is for batches", "add batch=True")
            return True
        if self.choices.batch:
            hint = "with batch=True the first parameter is a pyarrow.RecordBatch or a ReceivedBatch"
            raise Misuse(Code.BAD_ARGUMENT, f"{self.name}: {kind!r} is not for batches", hint)
        return kind in _RECEIVED or kind is Message

    def _is_wanted(self, parameter: inspect.Parameter, kind: Any) -> bool:
        """Return whether a parameter is filled; those that nothing fills must have a default."""
        of_message = kind in _BATCHES if self.choices.batch else kind in _RECEIVED or kind is Message
        if of_message or (self.once is not None and kind is self.once.kind) or kind in self._dependencies:
            return True
        if parameter.default is not inspect.Parameter.empty:
            return False
        what = "has no annotation" if kind is Any else f"is a {getattr(kind, '__name__', kind)}, which nothing provides"
        hint = "a Received, with once= a session, or register it above the handler: app.dependency(TYPE)(FACTORY)"
        raise Misuse(Code.BAD_ARGUMENT, f"{self.name}: the parameter {parameter.name!r} {what}", hint)

    async def call(self, received: Any) -> None:
        """Call the function with a received message or batch. Raises what it raises, Undecodable, or Unavailable."""
        if self._is_simple:
            given = dict.fromkeys(self._others, received) if self._others else {}
            result = self.function(self._body(received), **given)
            if self.awaits:
                await result
            return
        async with AsyncExitStack() as stack:
            session = None
            if self.once is not None:
                session, received = await self._begin(self.once, received, stack)
                if received is None:
                    return  # every effect of it has happened
            body = self._body(received)
            given = {}
            for name, kind in self._others.items():
                given[name] = await self._provide(kind, received, session, stack)
            result = self.function(body, **given)
            if self.awaits:
                await result

    async def _begin(self, once: Once, received: Any, stack: AsyncExitStack) -> tuple[Any, Any]:
        """Begin the transaction and claim. Returns it and what was not handled before: None, or of a batch those."""
        try:
            session = await enter(once.begin(), stack, self.awaits)
            messages = [received[row] for row in range(len(received))] if self.choices.batch else [received]
            new = await once.claim(session, messages, self.group)
        except Exception as problem:
            raise Unavailable(str(problem)) from problem
        if all(new):
            return session, received
        if not any(new):
            return session, None
        rows: LeasedRows = received._rows
        return session, type(received)(LeasedRows(rows.number, rows.batch.filter(pa.array(new)), rows.consumption))

    def _body(self, received: Any) -> Any:
        if self._decode is None:
            return self._choose_received(self.body_type, received)
        try:
            return self._decode(received.body)
        except Exception as problem:
            kind = getattr(self.body_type, "__name__", self.body_type)
            raise Undecodable(f"the body is no {kind}: {problem}") from problem

    async def _provide(self, kind: Any, received: Any, session: Any, stack: AsyncExitStack) -> Any:
        if kind in self._dependencies:
            return await self._dependencies.provide(kind, stack, self.awaits)
        return session if self.once is not None and kind is self.once.kind else self._choose_received(kind, received)

    @staticmethod
    def _choose_received(kind: Any, received: Any) -> Any:
        if kind is pa.RecordBatch:
            return received.arrow
        if kind is not Message:
            return received
        names = ("topic", "body", "key", "tag", "properties", "queue", "message_id")
        return Message(**{name: getattr(received, name) for name in names})
