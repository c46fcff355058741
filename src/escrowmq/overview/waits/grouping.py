"""Groups pending things by their cause, with a count, the oldest time, and samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from escrowmq.overview.words import quote

MOST_SAMPLES = 5
MOST_GROUPS = 50
"""Maximum number of causes of one kind; all others are counted as one."""
OTHERS = "other causes"
_ID = re.compile(r"\b(?:0x)?[0-9a-fA-F]*\d[0-9a-fA-F-]{7,}\b")
_NUMBER = re.compile(r"\d+")

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Alike:
    """Things that wait for the same cause."""

    count: int = 0
    oldest_us: int | None = None
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, since_us: int | None, sample: Mapping[str, Any], count: int = 1) -> None:
        """Count ``count`` more things, with a sample."""
        self.count += count
        if since_us is not None:
            self.oldest_us = since_us if self.oldest_us is None else min(self.oldest_us, since_us)
        if len(self.samples) < MOST_SAMPLES:
            self.samples.append(sample)


class Grouped(dict[K, Alike], Generic[K]):
    """Things by their cause. ``others`` returns the key for things that exceed MOST_GROUPS."""

    def __init__(self, others: Callable[[K], K]) -> None:
        super().__init__()
        self._others = others

    def of(self, key: K) -> Alike:
        """Return the group of a cause."""
        if key not in self and len(self) >= MOST_GROUPS:
            key = self._others(key)
        return self.setdefault(key, Alike())


def mask(text: str | None) -> str:
    """Return the first line of a cause, with ids and numbers replaced by ``#``, so that equal causes compare equal."""
    return _NUMBER.sub("#", _ID.sub("#", quote(text)))
