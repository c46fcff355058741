"""The decision when a standby claims the log. Pure: no clock, no thread; its caller passes events with times.

Rules:

1. While anything comes from a leader it follows. It claims after ``silence`` seconds in which nothing came, its own or
   the leader's, whichever is longer: until half of its own has passed a leader answers looks. Of several standbys one
   is first, and the others read its claim: each waits longer by its ``rank`` among those that were named, or, where
   none were, by a random part of ``SPREAD``. Two at once are harmless: one of them follows again.
2. Before it claims it asks those who keep the log whether there is more than it has followed. If there is, it is
   behind: it reads on. If they do not answer, the silence is theirs, not the leader's: it waits, and the silence counts
   from when they answer again.
3. A log that was released is claimed at once, or after a part of ``RELEASED_SECONDS`` by rank or chance, asked in the
   same way.
4. A node that stepped down claims nothing for a while, so that another one can; when another one leads, that is over.

A claim at a wrong moment loses nothing, because the log decides whose records count: it only makes another leader than
was needed. So these are rules of when, and none is needed for safety (docs/decisions/0054-standby-and-failover.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from random import Random

RELEASED_SECONDS = 0.1
SPREAD = 0.25  # the part of the silence in which the standbys of a shard claim, at most
UNRANKED = 0.1  # the same where nobody has a rank
RANK_SECONDS = 0.15  # interval between the claims of two ranks: a few times what a claim takes to be read
FOLLOW_SECONDS = 0.05  # how long a standby that is behind reads before it asks again
ASK_AGAIN_SECONDS = 0.5  # between two questions to those who keep the log, when they did not answer


class Step(Enum):
    """The next step of a standby."""

    FOLLOW = "follow"
    ASK = "ask"  # whether there is more than was followed; and tell `Candidate.answered`
    CLAIM = "claim"


def rank_of(url: str, replicas: Iterable[str], leader: str | None) -> int | None:
    """Return the place of the node at ``url`` among those that follow, 0 for the first; None where it is not named."""
    following = sorted({one for one in replicas if one != leader})
    return following.index(url) if url in following else None


class Candidate:
    """A standby's decision, for one time of following. Times are seconds of a clock that only goes forward."""

    def __init__(self, silence: float, random: Random, now: float, holds_back: float = 0.0) -> None:
        self._silence = self._wait = silence
        self._chance = random.random()
        self._may_claim_at = now + holds_back
        self._counts_from = -math.inf  # the silence, after a question that had no answer
        self._free_since: float | None = None  # when the log was first seen released
        self._asked = False  # and answered: nothing more is there
        self._was_away = False  # those who keep the log did not answer

    def next(
        self, silent_for: float, now: float, leaders_silence: float = 0.0, rank: int | None = None
    ) -> tuple[Step, float]:
        """Return the next step, and for how many seconds at most to follow if it is to follow. ``silent_for``: since
        anything was received, infinity of a released log.
        ``leaders_silence``: what the leader goes by, 0 if it did not say. ``rank``: see :func:`rank_of`."""
        if rank is None:
            later, released = UNRANKED * self._silence * self._chance, RELEASED_SECONDS * self._chance
        else:
            later = min(rank * RANK_SECONDS, SPREAD * self._silence)
            released = min(rank * RELEASED_SECONDS / 2, RELEASED_SECONDS)
        self._wait = max(self._silence, leaders_silence) + later
        if math.isinf(silent_for):
            if self._free_since is None:
                self._free_since = now
            due = self._free_since + released
        else:
            self._free_since = None
            due = now - silent_for + self._wait
        due = max(due, self._may_claim_at, self._counts_from)
        if now < due:
            self._asked = False
            return Step.FOLLOW, due - now
        if self._asked:
            return Step.CLAIM, 0.0
        return Step.ASK, 0.0

    def another_leads(self) -> None:
        """Another node has the log: nothing is held back for it any more."""
        self._may_claim_at = -math.inf

    def answered(self, behind: bool | None, now: float) -> None:
        """Handle the answer to ``ASK``, which arrived at ``now``."""
        self._asked = behind is False
        if behind is None:
            self._was_away = True
            self._counts_from = now + ASK_AGAIN_SECONDS
        elif behind:
            self._counts_from = now + FOLLOW_SECONDS
        elif self._was_away:
            self._was_away = False
            if self._free_since is None:
                self._asked = False
                self._counts_from = now + self._wait
