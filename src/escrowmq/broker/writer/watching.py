"""Questions that wait: asked again whenever messages became visible, until they have an answer or their time is over.

So a reader without a group learns of a message as soon as it is durable, without asking over and over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from escrowmq.broker.writer.rounds import Request, Watch
from escrowmq.schemas import Kind

_MAKES_VISIBLE = frozenset({Kind.PLAIN, Kind.DECIDED, Kind.BATCH_DECIDED, Kind.RELEASED, Kind.TOPIC})


class Watchers:
    """The waiting questions of one engine. All but ``next_us`` and ``count`` run on its writer."""

    def __init__(self) -> None:
        self._parked: list[Watch] = []
        self._changed = False

    def on_event(self, kind: Kind) -> None:
        """An event was applied."""
        self._changed = self._changed or kind in _MAKES_VISIBLE

    def serve(
        self, fresh: Sequence[Watch], now_us: int, attempt: Callable[[Callable[[], Any]], Any]
    ) -> list[tuple[Request, Any]]:
        """Answers to new questions and, if anything became visible, to those that wait; ``attempt`` asks one."""
        pairs: list[tuple[Request, Any]] = []
        kept: list[Watch] = []
        changed, self._changed = self._changed, False
        for number, watch in enumerate([*self._parked, *fresh]):
            if watch.future.cancelled():
                continue
            answer = attempt(watch.look) if changed or number >= len(self._parked) else None
            if answer is not None or watch.until_us <= now_us:
                pairs.append((watch, answer))
            else:
                kept.append(watch)
        self._parked = kept
        return pairs

    def next_us(self) -> int | None:
        """When the first of them is to be answered in any case."""
        return min((watch.until_us for watch in self._parked), default=None)

    def end(self, answer: Callable[[], Any]) -> None:
        """Answer all of them, each with an answer of its own: the engine ends."""
        for watch in self._parked:
            watch.answer(answer())
        self._parked = []
