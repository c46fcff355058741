"""Sends ordinary messages, each to its assigned broker, through an EscrowMQ producer or a relay target.

A sender chooses the broker when a message is stored, and never another one afterwards. It returns one code per row, as
:mod:`escrowmq.outbox.targets.seam` defines them, and raises only Misuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox.modes.journal import ONLY_PLACE, Int64s
from escrowmq.outbox.targets.seam import Codes, Target


@runtime_checkable
class Sender(Protocol):
    """A connection to one or several brokers."""

    def place(self, keys: pa.Array) -> Int64s:
        """Return the shard of each row, chosen by its key and never changed afterwards; -1 where there is one
        destination only. Raises Unknown if the shard cannot be determined."""

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        """Send every row to its shard. Returns one code per row."""


class ProducerSender:
    """Plain messages of an EscrowMQ producer, each pinned to its shard."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def place(self, keys: pa.Array) -> Int64s:
        return self._producer.place(keys)

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        return by_shard(batch, shards, lambda piece, shard: self._producer.send_batch(piece, shard=shard).codes)


class TargetSender:
    """A target of the relay; the cluster behind it is one destination."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def place(self, keys: pa.Array) -> Int64s:
        return np.full(len(keys), ONLY_PLACE, np.int64)

    def send(self, batch: pa.RecordBatch, shards: Int64s) -> Codes:
        return np.array(self._target.send(batch), np.uint8)


Way = Producer | Target | Sender


def sender_of(way: Way) -> Sender:
    """Return the sender for a producer or a target; a sender of your own as it is. Raises Misuse(BAD_ARGUMENT) for
    another object."""
    if isinstance(way, Producer):
        return ProducerSender(way)
    if isinstance(way, Sender):
        return way
    if hasattr(way, "promise"):
        return TargetSender(way)
    raise Misuse(Code.BAD_ARGUMENT, f"{type(way).__name__} is neither a producer nor a target")


def by_shard(batch: pa.RecordBatch, shards: Int64s, send: Callable[[pa.RecordBatch, int], Codes]) -> Codes:
    """Call ``send(rows, shard)`` for each shard; return the codes in the order of ``batch``. If a call raises an
    EscrowError, the rows of its shard get the error's code, and the other shards continue. Raises Misuse at once."""
    codes = np.zeros(batch.num_rows, np.uint8)
    for shard in np.unique(shards).tolist():
        rows = shards == shard
        try:
            codes[rows] = send(batch if rows.all() else batch.filter(pa.array(rows)), shard)
        except Misuse:
            raise
        except EscrowError as problem:
            codes[rows] = int(problem.code)
    return codes
