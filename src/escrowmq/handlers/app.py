"""The app: handlers, their dependencies, and how they run."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from escrowmq.client.consuming.consumer import GRACE_SECONDS
from escrowmq.errors import Code, Misuse
from escrowmq.handlers.available import handle_available, handle_available_blocking
from escrowmq.handlers.dependencies import Dependencies
from escrowmq.handlers.handler import Choices, Handler
from escrowmq.handlers.outcomes import Handled
from escrowmq.handlers.running import Running
from escrowmq.handlers.working import log_line

if TYPE_CHECKING:
    from escrowmq.client.aio import AsyncBus
    from escrowmq.client.bus import Bus

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_URL = "escrow://127.0.0.1:7700"


class ConsumerChoices(TypedDict, total=False):
    """Options of :meth:`escrowmq.Bus.consumer` that a handler passes on."""

    start: str | datetime | None
    lease: float | None
    max_attempts: int | None
    retry_backoff: float | None
    retry_backoff_max: float | None
    redelivery: str | Sequence[float] | None
    prefetch: int
    max_bytes: int
    timeout: float


class App:
    """Handlers of messages. ``url``: the broker of :meth:`lifespan` and of ``escrowmq work``, None: the variable
    ESCROWMQ_URL, else ``escrow://127.0.0.1:7700``."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self.handlers: list[Handler] = []
        self._dependencies = Dependencies()

    @property
    def url(self) -> str:
        """The URL of the broker."""
        return self._url or os.environ.get("ESCROWMQ_URL") or DEFAULT_URL

    def handler(
        self,
        *topics: str,
        group: str,
        tags: str | Sequence[str] | None = None,
        once: Any = None,
        concurrency: int = 1,
        ordered: bool = False,
        batch: bool | int = False,
        **consumer: Unpack[ConsumerChoices],
    ) -> Callable[[F], F]:
        """Register a plain or coroutine function for the messages that ``group`` receives of ``topics``. The function
        itself stays as it is.

        The annotation of its first parameter decides how the body is decoded: bytes, str, JSON of a dict, a dataclass,
        any type of msgspec, or a pydantic model. Other parameters are filled by their annotations: ``Received``, the
        session of ``once``, or a type of :meth:`dependency`. It returns: the message is acknowledged. It raises: the
        message is redelivered after the back-off of the group, and a dead letter after the last attempt; see
        :class:`Retry` and :class:`Discard`.

        ``once`` is an Engine, AsyncEngine or sessionmaker of the database that holds the effect, or an
        :class:`escrowmq.django.Database`: the function gets a Session or Connection, and its changes are committed
        together with the mark of the message in the receive log, so that they happen exactly once. ``concurrency``:
        messages at once, on threads or as tasks. ``ordered``: messages of one key in order, never side by side; at
        most as many at once as the topics have queues. ``batch``: the function gets a ``pyarrow.RecordBatch`` or
        ReceivedBatch, of up to that many messages (True: 1,000). ``consumer``: more options of
        :meth:`escrowmq.Bus.consumer`.

        Raises Misuse(BAD_ARGUMENT) for a function that cannot be called so.
        """
        choices = Choices(topics, group, tags, once, concurrency, ordered, batch, consumer)
        names = sys._getframe(1).f_locals

        def register(function: F) -> F:
            if any(known.group == group for known in self.handlers):
                text = f"the group {group!r} has a handler: consumers of one group share its messages"
                raise Misuse(Code.BAD_ARGUMENT, text, "name another group")
            self.handlers.append(Handler(function, choices, self._dependencies, names))
            return function

        return register

    def dependency(self, kind: Any) -> Callable[[F], F]:
        """Register what makes the values of parameters annotated with ``kind``: ``app.dependency(Mailer)(make)``.

        It is called for each message, without arguments. A context manager that it returns is entered, and left after
        the handler; so is a generator function that yields once, and asynchronous ones for coroutine functions. A later
        one replaces it, for example in a test.
        """

        def register(factory: F) -> F:
            self._dependencies.add(kind, factory)
            return factory

        return register

    def running(
        self,
        bus: Bus | AsyncBus,
        *,
        grace: float = GRACE_SECONDS,
        on_handled: Callable[[Handled], None] | None = None,
    ) -> Running:
        """Return the context manager that runs the handlers: ``with`` over a Bus, ``async with`` over an AsyncBus.

        Leaving it receives nothing more, gives back messages that were not started, and waits up to ``grace`` seconds
        for the handlers that run. ``on_handled`` is called with each result, on the thread of the handler; None: one
        line is logged for each.
        """
        if not self.handlers:
            raise Misuse(Code.BAD_ARGUMENT, "the app has no handlers", "decorate functions with @app.handler(...)")
        return Running(self.handlers, bus, grace, log_line if on_handled is None else on_handled)

    def run_available(self, bus: Bus) -> list[Handled]:
        """Handle what can be received now, in the calling thread, and what handlers send meanwhile.

        Returns what became of each message, in order. Messages that are redelivered later are left alone.
        """
        return handle_available_blocking(self.handlers, bus)

    async def arun_available(self, bus: AsyncBus) -> list[Handled]:
        """As :meth:`run_available`, to await."""
        return await handle_available(self.handlers, bus, is_loop=True)

    def asyncapi(self, title: str, version: str = "1.0.0") -> dict[str, Any]:
        """Return the AsyncAPI 3.0 document of the handlers: topics, and the schemas of bodies by their annotations."""
        from escrowmq.handlers.asyncapi import describe

        return describe(self.handlers, title, version)

    def lifespan(
        self, *, producer: str | None = None, relay: Any = None, url: str | None = None
    ) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
        """Return a lifespan for FastAPI or Starlette: ``FastAPI(lifespan=app.lifespan())``.

        It connects to ``url`` (None: that of the app) and runs the handlers. Requests find the bus as
        ``request.state.bus`` and, with ``producer=GROUP``, a producer as ``request.state.producer``. ``relay`` is the
        engine of a local message table, whose rows are sent to the same broker, or a Relay.
        """

        @asynccontextmanager
        async def run(_web: Any) -> AsyncIterator[dict[str, Any]]:
            from escrowmq.connecting import aconnect

            async with AsyncExitStack() as stack:
                at = url or self.url
                bus = await stack.enter_async_context(await aconnect(at))
                state: dict[str, Any] = {"bus": bus}
                if producer is not None:
                    state["producer"] = bus.producer(producer)
                if relay is not None:
                    await stack.enter_async_context(_relaying(relay, at))
                if self.handlers:
                    await stack.enter_async_context(self.running(bus))
                yield state

        return run


@asynccontextmanager
async def _relaying(relay: Any, url: str) -> AsyncIterator[None]:
    """Run a relay on its own threads."""
    import asyncio

    def make() -> Any:
        from escrowmq.outbox.relay import Relay
        from escrowmq.outbox.targets.opening import open_target

        return relay if isinstance(relay, Relay) else Relay(getattr(relay, "sync_engine", relay), open_target(url))

    running = await asyncio.to_thread(make)
    await asyncio.to_thread(running.start)
    try:
        yield
    finally:
        await asyncio.to_thread(running.stop)
