"""Claims of the log: a node sends a claim and reads all records before it.
A claim always succeeds, whichever other nodes live: the partition orders claims."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from escrowmq.errors import Code, error
from escrowmq.log.kafka import records
from escrowmq.log.kafka.channel import Channel, fenced_error
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
    on_record: Callable[[Taken], object] = lambda _: None,
    timeout: float = CLAIM_SECONDS,
    **options: Any,
) -> Channel:
    """Claim the log of ``partition`` and fold up to the claim; ``on_record`` gets each record read, the claim last.
    ``url``: address of this node; ``silence``: :attr:`Claim.silence`. ``seed``: shard and salt for a new log, random by
    default; if another node created it first, its own apply, in ``fold.standing``. ``options``: those of
    :class:`Channel`. Raises Unknown(TIMED_OUT), Corrupt(DAMAGED, NEWER_FORMAT, LOG_FAILED). After an error the
    partition must be closed: the claim may still arrive."""
    deadline = time.monotonic() + timeout
    seed = seed or (secrets.randbits(32) or 1, secrets.randbits(64))
    if not fold.standing.shard:  # the log's creator chose shard and salt; a claim with others would be void
        _, end = partition.ends(timeout)
        _follow(partition, fold, 0, end, on_record, deadline)
    while True:
        nonce = secrets.randbits(64) or 1
        known = fold.standing
        shard, salt = (known.shard, known.salt) if known.shard else seed
        request = Claim(salt=salt, url=url, version=version, silence=silence)
        partition.produce(0, records.pack_claim(request, shard=shard, nonce=nonce, sequence=known.sequence))
        reach("kafka.claim_sent")
        offset = _acknowledged(partition, deadline)
        if offset != UNKNOWN_OFFSET and offset < fold.standing.offset:
            message = f"it is the claim, but records up to {fold.standing.offset} were read: {partition.name} lost some"
            raise records.damage_error(offset, message)
        _follow(partition, fold, nonce, END if offset == UNKNOWN_OFFSET else offset + 1, on_record, deadline)
        if fold.standing.nonce == nonce:
            reach("kafka.claimed")
            return Channel(partition, fold.standing, **options)
        if known.shard:  # void only if another node chose the same number
            raise fenced_error(fold.standing.offset - 1, fold.standing.url)


def _acknowledged(partition: Partition, deadline: float) -> int:
    """Wait for the acknowledgement of the claim, the only record sent; return its offset."""
    while time.monotonic() < deadline:
        for _, offset in partition.acknowledged(_SLICE):
            return offset
    raise _timeout_error(partition)


def _follow(
    partition: Partition, fold: Fold, nonce: int, end: int, on_record: Callable[[Taken], object], deadline: float
) -> None:
    """Fold up to ``end``, or to the claim with that nonce if it is earlier."""
    while fold.standing.offset < end:
        found = partition.read(fold.standing.offset, end, _SLICE)
        if not found and time.monotonic() > deadline:
            raise _timeout_error(partition)
        for at, raw in found:
            taken = fold.take(at, raw)
            on_record(taken)
            if taken.header.nonce == nonce and taken.type == RecordType.CLAIM:
                return


def _timeout_error(partition: Partition) -> Exception:
    hint = "is Kafka up, and are enough replicas in sync?"
    return error(Code.TIMED_OUT, f"{partition.name} did not answer in time", hint)
