"""The rule that decides which records of the partition count: pure, small enough for exhaustive exploration.

All readers read the same records in the same order, so they reach the same verdicts. A claim always succeeds: the epoch
is the number of claims. Every record of an earlier owner after the claim is void, whenever it arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Owner(NamedTuple):
    """The owner of the log, as far as the records were read."""

    epoch: int = 0  # number of claims that counted so far
    nonce: int = 0  # random number of the last claim, in every record of its owner; 0 before the first
    number: int = 0  # number of the owner's next record. Its claim is 0.


class Verdict(Enum):
    """The meaning of a record, the same for all readers."""

    VOID = "void"  # it never counts: it is of an earlier owner, or a repetition
    CLAIMS = "claims"  # from here on its sender owns the log
    COUNTS = "counts"
    BREAKS = "breaks"  # earlier records of the owner are missing: the partition lost acknowledged records


def judge(owner: Owner, claims: bool, nonce: int, number: int) -> tuple[Verdict, Owner]:
    """Return the verdict on the next record of the partition, which has this nonce and number, and the owner after it.
    ``claims``: it is a claim of this log."""
    if claims and nonce != owner.nonce:
        return Verdict.CLAIMS, Owner(owner.epoch + 1, nonce, 1)
    if nonce != owner.nonce or number < owner.number:
        return Verdict.VOID, owner
    if number > owner.number:
        return Verdict.BREAKS, owner
    return Verdict.COUNTS, Owner(owner.epoch, nonce, number + 1)


class Step(NamedTuple):
    """The result of :func:`prove` for the acknowledgements so far."""

    number: int  # every record of ours below this one counts: no unknown record lies between them
    offset: int  # offset after the last of them: that of our next record if no other node wrote
    unread: int | None
    """Offset up to which the partition must be read, if our next record is acknowledged at another offset than
    ``offset``; -1 if Kafka acknowledged it without an offset. None: wait for an acknowledgement."""


def prove(number: int, offset: int, acknowledged: Mapping[int, int]) -> Step:
    """Determine how far acknowledgements (offsets by number, -1 if unknown), in any order, prove that our records
    count. Those below ``number`` count, and the partition below ``offset`` is known. A record at exactly the next
    offset needs no reading: offsets are assigned once and in order, so no claim lies between."""
    while (found := acknowledged.get(number)) is not None:
        if found != offset:
            return Step(number, offset, found)
        number += 1
        offset += 1
    return Step(number, offset, None)
