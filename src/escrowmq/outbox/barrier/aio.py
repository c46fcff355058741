"""The barrier as a checker over asynchronous engines."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.awaiting import awaited
from escrowmq.outbox.barrier.checking import Barrier


def _barrier_of(barrier: AsyncBarrier) -> Barrier:
    return barrier._barrier


class AsyncBarrier:
    """As :class:`~escrowmq.outbox.Barrier`, over asynchronous engines, for a producer of :func:`escrowmq.aconnect`."""

    def __init__(self, *engines: AsyncEngine, branch: str = "", wait: float = 0.5) -> None:
        if wrong := [type(engine).__name__ for engine in engines if not isinstance(engine, AsyncEngine)]:
            hint = "a SQLAlchemy AsyncEngine; for an Engine outbox.Barrier, which serves asynchronous producers too"
            raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]} is not an asynchronous engine", hint)
        self._barrier = Barrier(*(engine.sync_engine for engine in engines), branch=branch, wait=wait)

    decide_ids = awaited(Barrier.decide_ids, _barrier_of)
    decide = awaited(Barrier.decide, _barrier_of)
    __call__ = awaited(Barrier.__call__, _barrier_of)
    purge = awaited(Barrier.purge, _barrier_of)
