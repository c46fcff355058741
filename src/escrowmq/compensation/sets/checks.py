"""Checks of arguments that every set store makes, so that all refuse the same calls with the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from escrowmq.compensation.sets.seam import MAX_IDS
from escrowmq.errors import Code, Misuse
from escrowmq.message.names import check_name
from escrowmq.platform.times import to_us

ID_BYTES = 16
MAX_US = 1 << 53
"""Times are below this (the year 2255): so far a score of Redis, which is a double, tells every microsecond from the
next.
"""
MAX_LEASE = 86_400.0
"""Seconds: what is leased for longer would wait for days for a scheduler that died."""


def check_store_name(name: object) -> str:
    """Return the name of a pair of sets: as that of a group. Raises Rejected or Misuse (BAD_GROUP_NAME)."""
    return check_name(name, Code.BAD_GROUP_NAME)


def check_ids(ids: Sequence[bytes]) -> None:
    """Raise Misuse(BAD_ARGUMENT) for too many ids, or values that are no ids."""
    if len(ids) > MAX_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(ids)} ids in one call", f"at most {MAX_IDS}: cut them into parts")
    for identity in ids:
        if not isinstance(identity, bytes) or len(identity) != ID_BYTES:
            raise Misuse(Code.BAD_ARGUMENT, f"{identity!r:.100} is no message id", f"{ID_BYTES} bytes")


def check_time(time_us: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a value that is no time in microseconds."""
    if not isinstance(time_us, int) or isinstance(time_us, bool) or not 0 <= time_us < MAX_US:
        raise Misuse(Code.BAD_ARGUMENT, f"{time_us!r:.100} is no time", "whole microseconds since 1970")


def check_halves(ids: Sequence[bytes], announced_us: Sequence[int]) -> dict[bytes, int]:
    """Announcements by id in the order of the ids, each with its earliest time. Raises Misuse(BAD_ARGUMENT)."""
    check_ids(ids)
    if len(ids) != len(announced_us):
        raise Misuse(Code.BAD_ARGUMENT, f"{len(ids)} ids and {len(announced_us)} times")
    earliest: dict[bytes, int] = {}
    for identity, time_us in zip(ids, announced_us, strict=True):
        check_time(time_us)
        earliest[identity] = min(time_us, earliest.get(identity, time_us))
    return dict(sorted(earliest.items()))


def check_limit(limit: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a value that is no number of ids."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"limit {limit!r:.100}", f"1 to {MAX_IDS} ids")


def lease_us(lease: float) -> int:
    """Return a lease in microseconds; raises Misuse(BAD_ARGUMENT) for what is none."""
    if not isinstance(lease, int | float) or not math.isfinite(lease) or not 0 < lease <= MAX_LEASE:
        raise Misuse(Code.BAD_ARGUMENT, f"a lease of {lease!r:.100} seconds", f"more than 0, at most {MAX_LEASE:.0f}")
    return max(1, to_us(lease))
