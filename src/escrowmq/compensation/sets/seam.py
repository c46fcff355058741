"""Interface of a set store: two sets of message ids, and the atomic step that takes their difference.

A store has a name, and for this name it contains (all entries are ids of 16 bytes):

- the **half set**: announced ids, each with the time of its announcement,
- the **commit set**: ids whose message had its effect, each with the time of the entry,
- **runs**: ids that a scheduler has taken and not yet settled, each run leased to its scheduler.

Guarantees of a store, checked by its conformance suite:

1. ``take`` is one atomic step: each id in the half set that was announced before a given time leaves the half set. If
   the commit set lacks it, it enters the run; otherwise it leaves the commit set. No id is ever in two runs or in none
   of the three, with any concurrent calls and crashes.
2. An entry exists when the call that adds it has returned. Adding it again changes nothing (the earlier time of a half
   stays).
3. A run with an expired lease is adopted by one scheduler only. The previous owner may continue without knowing: it
   settles nothing that is not there, and repeated work is de-duplicated by id in the business tables.
4. ``epoch()`` changes whenever entries may have been lost: another server, a restart of one that is not durable, an
   emptied one.
5. Every error is an :class:`escrowmq.errors.EscrowError`: ``Unknown(DISCONNECTED | TIMED_OUT)`` no response, it may
   have been applied; ``Overloaded(DISK_FULL)`` the store is full, nothing was applied; ``Overloaded(QUEUE_FULL)``
   temporarily unavailable (loading its data, a replica, locked), nothing was applied; ``Misuse(BAD_SETTING)`` the
   store's names are used by data of another kind, or the server does not keep its data; ``Denied(DENIED)``;
   ``Misuse(BAD_ARGUMENT)`` for an invalid id, time or limit. All of them leave existing entries unchanged.

Times are microseconds since 1970. A store's methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_IDS = 10_000
"""Ids per call; more are a Misuse(BAD_ARGUMENT): callers split their work into such parts."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one ``take``, or the unsettled rest of it when it was adopted."""

    name: str
    """Unique in its store."""
    ids: tuple[bytes, ...]
    """At most the requested number; an adopted run may have more: ``SetStore.left`` returns the next ones."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of entries in a store."""

    half: int
    commits: int
    taken: int
    """Ids of all runs."""
    runs: int
    oldest_us: int | None
    """Earliest announcement of an id in the half set or in a run; None if there is none."""


class SetStore(Protocol):
    """One pair of sets, with its runs."""

    @property
    def name(self) -> str:
        """Name of the pair: 1 to 127 characters, like a group name."""
        ...

    def epoch(self) -> str:
        """Return a text (at most 127 characters) that stays equal while no entry can be lost; created on the first
        call."""
        ...

    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        """Record announcements; for an existing id the earlier time stays."""
        ...

    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        """Record ids whose message had its effect."""
        ...

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        """Do the step of guarantee 1 for at most ``limit`` ids, earliest first, announced before ``before_us``. The run
        is leased for ``lease`` seconds by the store's clock. Returns None if no id is left for it (ids in both sets
        have left them nevertheless). A store may split a large half set into several atomic steps, all into one run,
        and may return fewer ids than exist: call again until it is None. An id that is announced again while it is in a
        run leaves the half set, and stays in its run."""
        ...

    def adopt(self, lease: float, limit: int) -> Run | None:
        """Lease a run with an expired lease to the caller; return at most ``limit`` of its ids. None without one."""
        ...

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        """Return unsettled ids of a run; empty if it is complete or gone."""
        ...

    def renew(self, run: str, lease: float) -> bool:
        """Extend a run's lease to ``lease`` seconds from now. Returns False if the run is complete or gone."""
        ...

    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        """Remove processed ids of a run; a run without ids is removed. Unknown ids are ignored."""
        ...

    def forget_commits(self, before_us: int) -> int:
        """Remove commit-set entries made before then whose announcement never arrived; return their number."""
        ...

    def sizes(self) -> Sizes: ...

    def close(self) -> None:
        """Close connections. Idempotent."""
        ...
