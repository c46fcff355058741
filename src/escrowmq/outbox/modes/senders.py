"""Sends ordinary messages, each to its assigned broker, through an EscrowMQ producer or a relay target.

A sender chooses the broker when a message is stored, and never another one afterwards. It answers codes, one per row,
as :mod:`escrowmq.outbox.targets.seam` reads them; it raises only Misuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox.modes.journal import Int64s
from escrowmq.outbox.targets.seam import Codes, Target


@runtime_checkable
class Sender(Protocol):
    """One way out."""

    def place(self, keys: pa.Array) -> Int64s:
        """Return the shard that each row belongs to from now on; -1 where there is one place only. Raises Unknown
        if it cannot tell."""
        ...

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        """Send every row to its shard; one code per row."""
        ...


class ProducerSender:
    """Plain messages of an EscrowMQ producer, each pinned to its shard."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def place(self, keys: pa.Array) -> Int64s:
        """By key, else by turns."""
        return self._producer.place(keys).astype(np.int64)

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        """One request per shard."""
        return by_shard(batch, shards, lambda piece, shard: self._producer.send_batch(piece, shard=shard).codes)


class TargetSender:
    """Any target of the relay; the cluster behind it is one place."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def place(self, keys: pa.Array) -> Int64s:
        """-1: there is no choice."""
        return np.full(len(keys), -1, np.int64)

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        """One call."""
        return np.array(self._target.send(batch), np.uint8)


def sender_of(way: Producer | Target | Sender) -> Sender:
    """Return the sender for a producer, a target, or a sender of your own."""
    if isinstance(way, Producer):
        return ProducerSender(way)
    if isinstance(way, Sender):
        return way
    if hasattr(way, "promise"):
        return TargetSender(way)
    raise Misuse(Code.BAD_ARGUMENT, f"{type(way).__name__} is neither a producer nor a target")


def by_shard(batch: pa.RecordBatch, shards: Int64s, send: Callable[[pa.RecordBatch, int], Codes]) -> Codes:
    """``send(rows, shard)`` for each shard; a shard that cannot be reached gives its rows that error's code."""
    codes = np.zeros(batch.num_rows, np.uint8)
    for shard in np.unique(shards).tolist():
        rows = np.flatnonzero(shards == shard)
        piece = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
        try:
            codes[rows] = send(piece, shard)
        except Misuse:
            raise
        except EscrowError as problem:
            codes[rows] = int(problem.code)
    return codes
