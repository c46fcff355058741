"""Argument checks of all set stores, so that all reject the same calls with the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from escrowmq.compensation.sets.seam import MAX_IDS
from escrowmq.errors import Code, Misuse
from escrowmq.message.names import check_name
from escrowmq.platform.times import to_us

ID_BYTES = 16
MAX_US = 1 << 53
"""Upper bound of times (the year 2255): up to here a Redis score, a double, distinguishes microseconds."""
MAX_LEASE = 86_400.0
"""Maximum lease (s): with a longer one, the run of a crashed scheduler would be blocked for days."""


def check_store_name(name: object) -> str:
    """Return the name of a pair of sets, which is valid as a group name. Raises Rejected or Misuse (BAD_GROUP_NAME)."""
    return check_name(name, Code.BAD_GROUP_NAME)


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


def check_halves(ids: Sequence[bytes], announced_us: Sequence[int]) -> dict[bytes, int]:
    """Return announcements by id, ordered by id, each with its earliest time. Raises Misuse(BAD_ARGUMENT)."""
    check_ids(ids)
    if len(ids) != len(announced_us):
        raise Misuse(Code.BAD_ARGUMENT, f"{len(ids)} ids and {len(announced_us)} times")
    earliest: dict[bytes, int] = {}
    for identity, time_us in zip(ids, announced_us, strict=True):
        check_time(time_us)
        earliest[identity] = min(time_us, earliest.get(identity, time_us))
    return dict(sorted(earliest.items()))


def check_limit(limit: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an invalid number of ids."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"limit {limit!r:.100}", f"1 to {MAX_IDS} ids")


def lease_us(lease: float) -> int:
    """Convert a lease to microseconds. Raises Misuse(BAD_ARGUMENT) if it is invalid."""
    if not isinstance(lease, int | float) or not math.isfinite(lease) or not 0 < lease <= MAX_LEASE:
        raise Misuse(Code.BAD_ARGUMENT, f"a lease of {lease!r:.100} seconds", f"more than 0, at most {MAX_LEASE:.0f}")
    return max(1, to_us(lease))
