"""Long polls that wait on the writer: receives without messages yet, and state queries without an answer yet.

1. Waiting times are measured by broker time, from the round that took the request.
2. Waiting requests are served again when something changed that can bring them a message, and receives also when a
   retry is due; otherwise they cost a round nothing. ``wake_us`` is a lower bound of the next timeout.
3. Receives of a group are served in the order of their requests, so that a member with several under way gets its
   messages in that order (I20).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from escrowmq.broker.columns import releasing
from escrowmq.broker.writer.rounds import Pairs, WaitingLook, WaitingReceive
from escrowmq.broker.writer.shard import Shard
from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Settle, nothing_leased
from escrowmq.schemas import Kind

_MAKES_VISIBLE = frozenset({Kind.PLAIN, Kind.DECIDED, Kind.BATCH_DECIDED, Kind.RELEASED, Kind.TOPIC})
_ADDS_TO_VIEWS = {Kind.HALF, Kind.ACKED, Kind.DEAD, Kind.BURIED, Kind.DEAD_SETTLED, Kind.EDITED, Kind.GROUP_RESET}
# events by which no message becomes available to a consumer group
_OF_PRODUCERS = {Kind.HALF, Kind.CHECKED, Kind.PARKED, Kind.REOPENED, Kind.SESSION, Kind.OWNED, Kind.PRODUCERS}
_OF_LEASES = {Kind.LEASED, Kind.HANDED, Kind.EXTENDED, Kind.KEYED, Kind.FAILED}
_BRINGS_NOTHING = frozenset({Kind.FORGOTTEN, Kind.TOPIC, Kind.TOPIC_ALTERED, Kind.GROUP} | _OF_PRODUCERS | _OF_LEASES)

logger = logging.getLogger(__name__)


class WaitingReceives:
    """The receives of one shard that wait, by consumer group. Runs on the writer, ``count`` on any thread."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._lines: dict[str, deque[WaitingReceive]] = {}
        self._changed = False
        self._until_us = NEVER_US

    def count(self, group: str | None = None) -> int:
        """Return how many receives wait for messages, of one group or of all."""
        lines = list(self._lines.values()) if group is None else [self._lines.get(group, deque())]
        return sum(not receive.future.cancelled() for line in lines for receive in line.copy())

    @property
    def wake_us(self) -> int:
        """The broker time before which :meth:`serve` has nothing to do, unless something changes."""
        return 0 if self._changed else self._until_us

    def on_event(self, kind: Kind) -> None:
        if self._lines and kind not in _BRINGS_NOTHING:
            self._changed = True

    def serve(self, fresh: Sequence[WaitingReceive], now_us: int, due: bool) -> Pairs:
        """Lease messages for new receives, and for waiting ones if an event may have brought messages or ``due`` (work
        by the clock was due). Returns the receives that are answered, also those whose time is over; the others wait
        on."""
        for receive in fresh:
            receive.until_us = now_us + receive.wait_us
            self._lines.setdefault(receive.command.group, deque()).append(receive)
        if due or self._changed or now_us >= self._until_us:
            groups = list(self._lines)
            self._changed, self._until_us = False, NEVER_US
        else:
            groups = list({receive.command.group for receive in fresh})
        new = set(map(id, fresh))
        return [pair for group in groups for pair in self._serve_line(group, new, now_us)]

    def _serve_line(self, group: str, new: set[int], now_us: int) -> Pairs:
        pairs: Pairs = []
        kept: deque[WaitingReceive] = deque()
        shard = self._shard
        ready: bool | None = None  # None: unknown, the last lease may have taken all
        for receive in self._lines[group]:
            if receive.future.cancelled():
                continue
            if ready is None:
                ready = shard.failure is None and shard.ledger.groups.has_work(group, shard.ledger.topics, now_us)
            if ready or id(receive) in new:
                answer = self._lease(receive)
                if isinstance(answer, EscrowError) or len(answer.leases):
                    if receive.future.set_running_or_notify_cancel():
                        pairs.append((receive, answer))
                    else:
                        self._release(receive, answer)  # cancelled at this moment
                    ready = None
                    continue
                if not shard.ledger.groups.has_named_members(group):
                    ready = False  # the others would get nothing either
            if receive.until_us <= now_us:
                pairs.append((receive, nothing_leased()))
            else:
                kept.append(receive)
                self._until_us = min(self._until_us, receive.until_us)
        if kept:
            self._lines[group] = kept
        else:
            del self._lines[group]
        return pairs

    def _lease(self, receive: WaitingReceive) -> Any:
        before = self._shard.ledger.next_position
        answer = self._shard.attempt(lambda: self._shard.execute(receive.command))
        if not isinstance(answer, EscrowError) and not len(answer.leases):
            # It passed over as many messages with other tags as one receive may: continue behind them.
            self._changed = self._changed or self._shard.ledger.next_position != before
        return answer

    def _release(self, receive: WaitingReceive, leased: Any) -> None:
        """Release the messages that were leased for a receive that was cancelled at this moment."""
        if isinstance(leased, EscrowError):
            return
        try:
            self._shard.execute(Settle(receive.command.group, releasing(leased)))
        except EscrowError as problem:
            logger.warning("the lease of a cancelled receive is not released, and expires: %s", problem)

    def end(self, answer: Callable[[], Any]) -> None:
        """Answer all waiting receives, each with a call of ``answer``, because the engine ends."""
        for line in self._lines.values():
            for receive in line:
                receive.answer(answer())
        self._lines.clear()


class WaitingLooks:
    """The looks of one shard that wait, so that readers need not poll for messages. Runs on the writer."""

    def __init__(self) -> None:
        self._waiting: list[WaitingLook] = []
        self._changed = False
        self.wake_us = NEVER_US

    def on_event(self, kind: Kind) -> None:
        self._changed = self._changed or kind in _MAKES_VISIBLE or kind in _ADDS_TO_VIEWS

    def serve(self, fresh: Sequence[WaitingLook], now_us: int, attempt: Callable[[Callable[[], Any]], Any]) -> Pairs:
        """Run new looks and, if an event may have changed their result, waiting ones. Returns those that are answered:
        with a result other than None, or None after their time. ``attempt`` runs one look."""
        changed, self._changed = self._changed, False
        if not fresh and now_us < self.wake_us and not (changed and self._waiting):
            return []
        for look in fresh:
            look.until_us = now_us + look.wait_us
        pairs: Pairs = []
        kept: list[WaitingLook] = []
        for number, look in enumerate([*self._waiting, *fresh]):
            if look.future.cancelled():
                continue
            answer = attempt(look.look) if changed or number >= len(self._waiting) else None
            if answer is not None or look.until_us <= now_us:
                pairs.append((look, answer))
            else:
                kept.append(look)
        self._waiting = kept
        self.wake_us = min((look.until_us for look in kept), default=NEVER_US)
        return pairs

    def end(self, answer: Callable[[], Any]) -> None:
        """Answer all waiting looks, each with a call of ``answer``, because the engine ends."""
        for look in self._waiting:
            look.answer(answer())
        self._waiting = []
