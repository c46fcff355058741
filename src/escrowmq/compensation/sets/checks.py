"""What all set stores share: checks of arguments, with the same texts, and the repetition of a take."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from escrowmq.compensation.sets.seam import MAX_IDS, Run
from escrowmq.errors import Code, Misuse
from escrowmq.message.names import check_name
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

ID_BYTES = 16
MAX_US = 1 << 53
"""Upper bound of times (the year 2255): up to here a Redis score, a double, distinguishes microseconds."""
MAX_LEASE = 86_400.0
"""Maximum lease (s): with a longer one, the run of a crashed scheduler would be blocked for days."""
STEP_IDS = 1_000
"""Ids per atomic step of ``take``, which limits how long the store serves no other client."""
PATIENT_PART = 4
"""Divisor of the lease: after this part of it ``take`` returns the ids that it has."""


class CheckedSets(ABC):
    """Base of :class:`escrowmq.compensation.sets.seam.SetStore` implementations: checks arguments, then calls the
    private method of the same name. Raises Rejected or Misuse (BAD_GROUP_NAME) for a name that no group can have."""

    def __init__(self, name: str) -> None:
        self._name = check_name(name, Code.BAD_GROUP_NAME)
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def add_halves(self, ids: Sequence[bytes], announced_us: Sequence[int]) -> None:
        check_ids(ids)
        if len(ids) != len(announced_us):
            raise Misuse(Code.BAD_ARGUMENT, f"{len(ids)} ids and {len(announced_us)} times")
        earliest: dict[bytes, int] = {}
        for identity, time_us in zip(ids, announced_us, strict=True):
            check_time(time_us)
            earliest[identity] = min(time_us, earliest.get(identity, time_us))
        if earliest:
            self._add_halves(dict(sorted(earliest.items())))
            reach("sets.halves-added")

    def add_commits(self, ids: Sequence[bytes], now_us: int) -> None:
        check_ids(ids)
        check_time(now_us)
        if ids:
            self._add_commits(ids, now_us)
            reach("sets.commits-added")

    def take(self, before_us: int, limit: int, lease: float) -> Run | None:
        check_time(before_us)
        check_limit(limit)
        duration_us, begun, run = lease_us(lease), time.monotonic(), secrets.token_hex(8)
        ids: list[bytes] = []
        more = True
        while more and len(ids) * 2 < limit and not (ids and (time.monotonic() - begun) * PATIENT_PART > lease):
            most = min(STEP_IDS, limit - len(ids))
            seen, kept = self._take(run, before_us, most, duration_us)
            reach("sets.taken")
            ids += kept
            more = seen == most
        if ids:
            return Run(run, tuple(ids))
        self._drop(run)
        return None

    def adopt(self, lease: float, limit: int) -> Run | None:
        check_limit(limit)
        run = self._adopt(lease_us(lease), limit)
        reach("sets.adopted")
        return run

    def left(self, run: str, limit: int) -> tuple[bytes, ...]:
        check_limit(limit)
        return self._left(run, limit)

    def renew(self, run: str, lease: float) -> bool:
        return self._renew(run, lease_us(lease))

    def settle(self, run: str, ids: Sequence[bytes]) -> None:
        check_ids(ids)
        if ids:
            self._settle(run, ids)

    def forget_commits(self, before_us: int) -> int:
        check_time(before_us)
        return self._forget_commits(before_us)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse(Code.BAD_ARGUMENT, "the set store is closed")

    @abstractmethod
    def _add_halves(self, earliest: dict[bytes, int]) -> None:
        """Record announcements: the earliest time of each id, in the order of the ids."""

    @abstractmethod
    def _add_commits(self, ids: Sequence[bytes], now_us: int) -> None: ...

    @abstractmethod
    def _take(self, run: str, before_us: int, most: int, duration_us: int) -> tuple[int, list[bytes]]:
        """Do one step; return the number of ids found in the half set, and those that entered the run."""

    @abstractmethod
    def _drop(self, run: str) -> None:
        """Remove whatever the steps of a run without ids have left."""

    @abstractmethod
    def _adopt(self, duration_us: int, limit: int) -> Run | None: ...

    @abstractmethod
    def _left(self, run: str, limit: int) -> tuple[bytes, ...]: ...

    @abstractmethod
    def _renew(self, run: str, duration_us: int) -> bool: ...

    @abstractmethod
    def _settle(self, run: str, ids: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _forget_commits(self, before_us: int) -> int: ...


def check_ids(ids: Sequence[bytes]) -> None:
    """Raise Misuse(BAD_ARGUMENT) for too many or invalid ids."""
    if len(ids) > MAX_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(ids)} ids in one call", f"at most {MAX_IDS}: split them into parts")
    for identity in ids:
        if not isinstance(identity, bytes) or len(identity) != ID_BYTES:
            raise Misuse(Code.BAD_ARGUMENT, f"{identity!r:.100} is not a message id", f"{ID_BYTES} bytes")


def check_time(time_us: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an invalid time in microseconds."""
    if not isinstance(time_us, int) or isinstance(time_us, bool) or not 0 <= time_us < MAX_US:
        raise Misuse(Code.BAD_ARGUMENT, f"{time_us!r:.100} is not a time", "whole microseconds since 1970")


def check_limit(limit: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an invalid number of ids."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"limit {limit!r:.100}", f"1 to {MAX_IDS} ids")


def lease_us(lease: float) -> int:
    """Convert a lease to microseconds. Raises Misuse(BAD_ARGUMENT) if it is invalid."""
    if not isinstance(lease, int | float) or not math.isfinite(lease) or not 0 < lease <= MAX_LEASE:
        raise Misuse(Code.BAD_ARGUMENT, f"a lease of {lease!r:.100} seconds", f"more than 0, at most {MAX_LEASE:.0f}")
    return max(1, to_us(lease))
