"""Thresholds for notices: pure rules, without a clock or network. A rule counts the events of one kind. When ``count``
of them occur within ``within`` seconds, a notice is due at once; a second notice at the end of that time covers the
rest. So a storm causes two notices in that time, however many events it has, and after the first notice no event is
left out of a count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.settings import SECONDS, nearest, parse_quantity

KINDS = ("parked", "dead", "full", "space", "stopped", "damaged", "refused", "opened", "recovered")
"""Event kinds for webhooks: the field ``event`` of log records; docs/logs.md has the meaning of each."""
WITHIN = 60.0
SAMPLES = 5
"""Events included in a notice; further ones are only counted."""
MOST_COUNT = 1_000_000_000
MOST_WITHIN = 86_400.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A threshold: notify after ``count`` events of ``kind`` within ``within`` seconds."""

    kind: str
    count: int = 1
    within: float = WITHIN

    @classmethod
    def read(cls, text: str) -> Rule:
        """Parse ``KIND[:COUNT[/TIME]]``: ``parked``, ``dead:10`` or ``dead:100/5min``. Raises Misuse(BAD_SETTING)."""
        matched = re.fullmatch(r"\s*([a-z]+)(?::([0-9]{1,10})(?:/([0-9a-z.]+))?)?\s*", text)
        if matched is None:
            raise Misuse(Code.BAD_SETTING, f"{text!r} is not KIND[:COUNT[/TIME]]", "such as parked or dead:10/1min")
        kind, count, within = matched[1], int(matched[2] or 1), WITHIN
        if kind not in KINDS:
            raise Misuse(Code.BAD_SETTING, f"there is no event {kind!r}", nearest(kind, list(KINDS)))
        if matched[3] is not None:
            try:
                within = parse_quantity(matched[3], SECONDS)
            except ValueError as problem:
                raise Misuse(Code.BAD_SETTING, f"{text!r}: {problem}") from None
        if not 1 <= count <= MOST_COUNT or not 0 < within <= MOST_WITHIN:
            raise Misuse(Code.BAD_SETTING, f"{text!r}: at least one event, and a time of up to a day")
        return cls(kind, count, within)


@dataclass(frozen=True, slots=True)
class Notice:
    """The content of a notice: the number of events of a kind in some seconds, and samples of them."""

    kind: str
    count: int
    seconds: float
    samples: tuple[Mapping[str, Any], ...]


@dataclass(slots=True)
class Window:
    """The events of one rule. Times are seconds of a monotonic clock."""

    rule: Rule
    _since: float | None = None
    _count: int = 0
    _notified: bool = False
    _samples: list[Mapping[str, Any]] = field(default_factory=list)

    def saw(self, now: float, count: int, facts: Mapping[str, Any]) -> Notice | None:
        """Add ``count`` events with the facts of the first. Returns a notice if one is due. Call :meth:`due` first."""
        if self._since is None:
            self._since = now
        self._count += count
        if len(self._samples) < SAMPLES:
            self._samples.append(facts)
        if self._notified or self._count < self.rule.count:
            return None
        self._notified = True
        return self._notice(now)

    def due(self, now: float) -> Notice | None:
        """End the window if its time is over. Returns the notice of the events after the first notice."""
        if self._since is None or now < self._since + self.rule.within:
            return None
        notice = self._notice(now) if self._notified and self._count else None
        self._since, self._notified = None, False
        self._count, self._samples = 0, []
        return notice

    @property
    def ends(self) -> float | None:
        """Time of the next call of :meth:`due`; None while there are no events."""
        return None if self._since is None else self._since + self.rule.within

    def _notice(self, now: float) -> Notice:
        made = Notice(self.rule.kind, self._count, now - (self._since or now), tuple(self._samples))
        self._count, self._samples = 0, []
        return made
