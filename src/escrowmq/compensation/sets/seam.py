"""The contract of a set store: two sets of message ids, and the atomic step that takes their difference.

A store has a name, of which it holds (all entries are ids of 16 bytes):

- the **half set**: ids that were announced, each with the time of its announcement,
- the **commit set**: ids whose message had its effect, each with the time of the entry,
- **runs**: what a scheduler has taken and not yet settled, each run leased to its scheduler.

What a store promises, and its conformance suite checks:

1. ``take`` is one atomic step: each id that it finds in the half set, announced before a given time, leaves the half
   set; it stands in the run if the commit set lacks it, and leaves the commit set if it is there. No id is ever in two
   runs or in none of the three, whoever calls at once and wherever a process dies.
2. An entry is there when the call that makes it has returned. Making it again changes nothing (the earlier time of a
   half stays).
3. A run whose lease has ended is adopted by one scheduler only. Whoever lost it may continue unknowingly: it settles
   nothing that is not there, and what is done twice is de-duplicated by id in the business tables.
4. ``epoch()`` changes whenever entries may have been lost: another server, a restart of one that is not durable, an
   emptied one.
5. Whatever goes wrong is an :class:`escrowmq.errors.EscrowError`: ``Unknown(DISCONNECTED | TIMED_OUT)`` no answer, it
   may have been done; ``Overloaded(DISK_FULL)`` the store is full and nothing was done; ``Overloaded(QUEUE_FULL)`` it
   takes nothing at this moment (it loads its data, is a replica, is locked) and nothing was done;
   ``Misuse(BAD_SETTING)`` what stands under the store's names is of another kind, or the server does not keep what it
   is given; ``Denied(DENIED)``; ``Misuse(BAD_ARGUMENT)`` for what is no id, no time, no limit. All of them leave what
   was there before.

Times are microseconds since 1970. A store's methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_IDS = 10_000
"""Ids of one call; more are a Misuse(BAD_ARGUMENT): callers cut their work into such parts."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one ``take``, or the rest of an adopted one."""

    name: str
    """Unique in its store."""
    ids: tuple[bytes, ...]
    """At most as many as were asked for; of an adopted run there may be more: ``SetStore.left`` has the next ones."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a store holds."""

    half: int
    commits: int
    taken: int
    """Ids of all runs."""
    runs: int
    oldest_us: int | None
    """The earliest announcement of an id in the half set or in a run; None: there is none."""


class SetStore(Protocol):
    """One pair of sets, with its runs."""

    @property
    def name(self) -> str:
        """Of the pair: 1 to 127 characters, as the names of groups."""
        ...

    def epoch(self) -> str:
        """Equal as long as nothing that was recorded can have been lost; at most 127 characters. The first call on a
        store makes one."""
        ...

    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        """Record announcements; of an id that is there the earlier time stays."""
        ...

    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        """Record ids whose message had its effect."""
        ...

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        """Promise 1, for at most ``limit`` ids (the earliest first) announced before ``before_us``; the run is leased
        for ``lease`` seconds by the store's clock. None: nothing is left over (what is in both sets has left them
        nevertheless). A store may cut a large half set into several atomic steps, all into one run, and may give fewer
        ids than there are: call again until it is None. An id that is announced again while it is in a run leaves the
        half set, and stays where it is."""
        ...

    def adopt(self, lease: float, limit: int) -> Run | None:
        """Return a run whose lease has ended, with at most ``limit`` of its ids; None: there is none."""
        ...

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        """Return ids of a run that are not settled; empty: it is done, or gone."""
        ...

    def renew(self, run: str, lease: float) -> bool:
        """Hold a run for ``lease`` seconds from now; False: it is gone, or done."""
        ...

    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        """Forget ids of a run that were dealt with, and a run without ids; unknown ids are ignored."""
        ...

    def forget_commits(self, before_us: int) -> int:
        """Drop entries of the commit set made before then, whose announcement never came; how many."""
        ...

    def sizes(self) -> Sizes: ...

    def close(self) -> None:
        """Let connections go. Idempotent."""
        ...
