"""Becoming the owner of the log: a claim is sent, and everything before it read. It always succeeds, whoever else
lives: the partition puts claims in their order.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from escrowmq.errors import Code, error
from escrowmq.log.kafka import records
from escrowmq.log.kafka.channel import Channel, fenced
from escrowmq.log.kafka.fold import Fold, Taken
from escrowmq.log.kafka.partition import END, UNKNOWN_OFFSET, Partition
from escrowmq.log.kafka.records import Claim, RecordType
from escrowmq.platform.failpoints import reach

CLAIM_SECONDS = 30.0
_SLICE = 0.1


def claim(
    partition: Partition,
    fold: Fold,
    *,
    url: str,
    version: str = "",
    silence: float = 0.0,
    seed: tuple[int, int] | None = None,
    took: Callable[[Taken], object] = lambda _: None,
    timeout: float = CLAIM_SECONDS,
    **options: Any,
) -> Channel:
    """Claim the log of ``partition`` and fold up to the claim; ``took`` gets each record on the way, the claim the
    last.

    ``url``: where this node answers; ``silence``: :attr:`Claim.silence`. ``seed``: shard and salt of a log that does
    not exist yet, random otherwise; if another made it first, its own count, and ``fold.standing`` has them.
    ``options``: those of :class:`Channel`. Raises Unknown(TIMED_OUT), Corrupt(DAMAGED, NEWER_FORMAT, LOG_FAILED). After
    an error the partition must be closed: the claim may still arrive.
    """
    deadline = time.monotonic() + timeout
    if seed is None:
        seed = (secrets.randbits(32) or 1, secrets.randbits(64))
    if not fold.standing.shard:  # whoever made the log chose its shard and salt: a claim for another would be void
        _, end = partition.ends(timeout)
        _follow(partition, fold, 0, end, took, deadline)
    while True:
        nonce = secrets.randbits(64) or 1
        known = fold.standing
        shard, salt = (known.shard, known.salt) if known.shard else seed
        made = Claim(salt=salt, url=url, version=version, silence=silence)
        partition.produce(0, records.pack_claim(made, shard=shard, nonce=nonce, sequence=known.sequence))
        reach("kafka.claim_sent")
        offset = _await_claim(partition, deadline)
        if offset != UNKNOWN_OFFSET and offset < fold.standing.offset:
            what = (
                f"the claim lies there, and records up to {fold.standing.offset} were read: {partition.name} lost some"
            )
            raise records.damaged(offset, what)
        _follow(partition, fold, nonce, END if offset == UNKNOWN_OFFSET else offset + 1, took, deadline)
        if fold.standing.nonce == nonce:
            reach("kafka.claimed")
            return Channel(partition, fold.standing, **options)
        if known.shard:  # it cannot be void, unless somebody else chose the same number
            raise fenced(fold.standing.offset - 1, fold.standing.url)


def _await_claim(partition: Partition, deadline: float) -> int:
    """Return the offset of the claim, the only record that was sent."""
    while time.monotonic() < deadline:
        for _, offset in partition.acknowledged(_SLICE):
            return offset
    raise _late(partition)


def _follow(
    partition: Partition, fold: Fold, nonce: int, end: int, took: Callable[[Taken], object], deadline: float
) -> None:
    """Fold up to ``end``, or to the claim of that nonce if it comes first."""
    while fold.standing.offset < end:
        found = partition.read(fold.standing.offset, end, _SLICE)
        if not found and time.monotonic() > deadline:
            raise _late(partition)
        for at, raw in found:
            taken = fold.take(at, raw)
            took(taken)
            if taken.header.nonce == nonce and taken.type == RecordType.CLAIM:
                return


def _late(partition: Partition) -> Exception:
    return error(
        Code.TIMED_OUT, f"{partition.name} did not answer in time", "is Kafka up, and are enough replicas in sync?"
    )
