"""The rule which records of the partition count, over numbers. Pure, and small enough to be explored to its end.

Everybody reads the same records in the same order, so everybody comes to the same verdicts. A claim always succeeds:
the epoch is how many have. Everything that an earlier owner sent and that lies behind the claim is void, whoever sent
it and whenever it arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Owner(NamedTuple):
    """The owner of the log, as far as records were read."""

    epoch: int = 0
    """How many claims counted so far."""
    nonce: int = 0
    """The random number of the last of them, which is in every record of its owner; 0 before the first."""
    number: int = 0
    """Of the owner's next record. Its claim is 0."""


class Verdict(Enum):
    """The verdict on a record, equal for all readers."""

    VOID = "void"
    """It never counts: it is of an earlier owner, or a repetition."""
    CLAIMS = "claims"
    """From here on its sender owns the log."""
    COUNTS = "counts"
    BREAKS = "breaks"
    """Records of the owner before it are missing: the partition lost what it had taken."""


def judge(owner: Owner, claims: bool, nonce: int, number: int) -> tuple[Verdict, Owner]:
    """Return the verdict on the next record of the partition, and the owner after it. ``claims``: it is a claim of
    this log."""
    if claims and nonce != owner.nonce:
        return Verdict.CLAIMS, Owner(owner.epoch + 1, nonce, 1)
    if nonce != owner.nonce or number < owner.number:
        return Verdict.VOID, owner
    if number > owner.number:
        return Verdict.BREAKS, owner
    return Verdict.COUNTS, Owner(owner.epoch, nonce, number + 1)


class Step(NamedTuple):
    """The proof by the acknowledgements so far, see :func:`prove`."""

    number: int
    """Every record of ours below this one counts: nothing lies between them that is not known."""
    offset: int
    """Behind the last of them: where the next record of ours lies if nobody else wrote."""
    unread: int | None
    """If the next record of ours is acknowledged, but not at ``offset``: the offset up to which the partition must be
    read to know what lies between; -1 if Kafka said that the record is stored and not where. None: wait for an
    acknowledgement."""


def prove(number: int, offset: int, acknowledged: Mapping[int, int]) -> Step:
    """Return how far acknowledgements, which come in any order, prove that our records count.

    Every record of ours below ``number`` counts, and the partition below ``offset`` is known. ``acknowledged``: offsets
    by number, -1 for one that is not known. A record at exactly the next offset needs no reading: offsets are given
    once and in order, so no claim lies between.
    """
    while (found := acknowledged.get(number)) is not None:
        if found != offset:
            return Step(number, offset, found)
        number += 1
        offset += 1
    return Step(number, offset, None)
