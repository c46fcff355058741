"""Splits a batch into single messages for clients that need it, and keeps the order of messages per key.

A target that may refuse any one message of a stream is sent *waves*: the first message of every key at once, then the
second of every key, and so on, so that a key's next message leaves only after the previous one is known to be stored.
A target whose server stops at a key's first failure by itself gets everything at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import schemas
from escrowmq.errors import Code, Misuse
from escrowmq.message.limits import byte_lengths
from escrowmq.outbox.targets.seam import KEY_HEADER, MESSAGE_ID_HEADER, TAG_HEADER, Codes

RESERVED = "escrowmq-"
"""Prefix of our headers; a property of such a name is refused."""

Flags = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Headers = list[tuple[str, str]]


class Rows:
    """The rows of one batch (schema OUTGOING), as Python values; raises Misuse(BAD_ARGUMENT) for another schema."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        check_schema(batch)
        self.count = batch.num_rows
        self.topics: list[str] = batch.column("topic").to_pylist()
        self.keys: list[str | None] = batch.column("key").to_pylist()
        self.tags: list[str | None] = batch.column("tag").to_pylist()
        self.properties: list[Headers | None] = batch.column("properties").to_pylist()
        self.bodies: list[bytes] = batch.column("body").to_pylist()
        self.ids = [raw.hex() for raw in batch.column("message_id").to_pylist()]
        self.queues: list[int] = batch.column("queue").to_pylist()
        self.body_bytes = byte_lengths(batch.column("body"))
        self.key_numbers = number_keys(batch.column("key"))
        self._delays = batch.column("delay_us").to_numpy()

    def headers(self, row: int, *, key: bool) -> Headers:
        """Return the headers of a row as pairs: id, tag, properties, and with ``key`` also its key, for a target that
        has no other place for it."""
        found: Headers = [(MESSAGE_ID_HEADER, self.ids[row])]
        own_key, tag = self.keys[row], self.tags[row]
        if key and own_key is not None:
            found.append((KEY_HEADER, own_key))
        if tag is not None:
            found.append((TAG_HEADER, tag))
        return found + (self.properties[row] or [])

    def refused(self, *, max_body_bytes: int | None, queues: bool) -> Codes:
        """Check the rows without the server; return one code per row, OK if it may be sent. ``max_body_bytes``: None if
        unlimited. ``queues``: rows may name a queue."""
        codes = np.zeros(self.count, np.uint8)
        if not queues:
            codes[np.array(self.queues, np.int64) > 0] = Code.BAD_QUEUE
        for row, properties in enumerate(self.properties):
            if properties and any(name.startswith(RESERVED) for name, _ in properties):
                codes[row] = Code.BAD_REQUEST
        if max_body_bytes is not None:
            codes[self.body_bytes > max_body_bytes] = Code.BODY_TOO_LARGE
        codes[self._delays > 0] = Code.BAD_DELAY
        return codes


def check_schema(batch: pa.RecordBatch) -> None:
    """Raise Misuse(BAD_ARGUMENT) unless ``batch`` has the schema OUTGOING."""
    if not batch.schema.equals(schemas.OUTGOING):
        raise Misuse(Code.BAD_ARGUMENT, "a target takes batches of the schema OUTGOING", "see escrowmq.schemas")


def number_keys(keys: pa.Array) -> Int64s:
    """Return one number per row, equal for equal keys. A row without a key has a number of its own."""
    numbers = pc.fill_null(keys.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False)
    numbers = np.where(numbers < 0, len(keys) + np.arange(len(keys)), numbers)
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def waves(numbers: Int64s) -> Iterator[Int64s]:
    """Yield arrays of row numbers: the first row of every key, then the second of every key, and so on. ``numbers``: of
    the keys, as of :func:`number_keys`."""
    order = np.argsort(numbers, kind="stable")
    rank = np.empty(len(numbers), np.int64)
    rank[order] = np.arange(len(numbers)) - np.searchsorted(numbers[order], numbers[order])
    for wave in range(rank.max(initial=-1) + 1):
        yield np.flatnonzero(rank == wave)


def behind_failures(codes: Codes, numbers: Int64s) -> Flags:
    """Return a mask of the rows that follow a row of their key whose code is not OK. ``numbers``: of the keys, as of
    :func:`number_keys`."""
    first = np.full(len(numbers), len(numbers))  # by key number, which is less than the number of rows
    failed = np.flatnonzero(codes)
    np.minimum.at(first, numbers[failed], failed)
    behind: Flags = np.arange(len(numbers)) > first[numbers]
    return behind


def hold_back(codes: Codes, numbers: Int64s) -> None:
    """Set every row behind a failure of its key to QUEUE_FULL, "not tried", in place."""
    codes[behind_failures(codes, numbers)] = Code.QUEUE_FULL
