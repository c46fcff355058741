"""Decides when a standby claims the log. Pure: no clock, no thread; its caller passes events with times.

1. A standby follows while anything arrives from a leader. It claims after ``silence`` seconds without a record, its own
   setting or the leader's, whichever is longer, because a leader answers looks until half of its own has passed. To
   spread the claims of several standbys, each waits longer by its ``rank`` among the named replicas, or, if none are
   named, by a random part of ``SPREAD``. Two claims at once are harmless: one node follows again.
2. Before it claims it checks whether the log has more than it has followed. If so, it reads on. If the log's brokers do
   not answer, the silence is theirs, not the leader's: it starts again when they answer.
3. A released log is claimed at once, or after a part of ``RELEASED_SECONDS`` by rank or chance, with the same check.
4. A node that stepped down claims nothing for a while, so that another one can, or until another one leads.

A claim at a wrong moment loses nothing, because the log decides whose records count
(docs/decisions/0054-standby-and-failover.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from random import Random

RELEASED_SECONDS = 0.1
SPREAD = 0.25  # the part of the silence over which the claims of standbys are spread, at most
UNRANKED = 0.1  # the same for nodes without ranks
RANK_SECONDS = 0.15  # interval between the claims of two ranks: a few times what a claim takes to be read
FOLLOW_SECONDS = 0.05  # how long a standby that is behind reads before the next check
ASK_AGAIN_SECONDS = 0.5  # retry interval of a check without an answer


class Step(Enum):
    """The next step of a standby."""

    FOLLOW = "follow"
    ASK = "ask"  # whether the log has more than was followed, and pass that to Candidate.answered
    CLAIM = "claim"


def rank_of(url: str, replicas: Iterable[str], leader: str | None) -> int | None:
    """Return the index of the node at ``url`` among the named replicas without the leader, in the order of their URLs;
    None if it is not named."""
    following = sorted({one for one in replicas if one != leader})
    return following.index(url) if url in following else None


class Candidate:
    """A standby's decision, for one term of following. Times are seconds of a monotonic clock."""

    def __init__(self, silence: float, random: Random, now: float, holds_back: float = 0.0) -> None:
        self._silence = self._wait = silence
        self._chance = random.random()
        self._may_claim_at = now + holds_back
        self._counts_from = -math.inf  # the silence, after a check without an answer
        self._free_since: float | None = None  # when the log was first seen released
        self._asked = False  # and answered: there is nothing more
        self._was_away = False  # the log's brokers did not answer

    def next(
        self, silent_for: float, now: float, leaders_silence: float = 0.0, rank: int | None = None
    ) -> tuple[Step, float]:
        """Return the next step, and the seconds to follow at most. ``silent_for``: since the last record, infinity for
        a released log. ``leaders_silence``: the leader's setting, 0 if unknown. ``rank``: see :func:`rank_of`."""
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
        return Step.CLAIM if self._asked else Step.ASK, 0.0

    def another_leads(self) -> None:
        """Allow claims at once, also after stepping down, because another node leads now."""
        self._may_claim_at = -math.inf

    def answered(self, behind: bool | None, now: float) -> None:
        """Handle the answer to ``ASK`` at ``now``. ``behind``: whether the log has more than this node has followed;
        None: its brokers do not answer."""
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
