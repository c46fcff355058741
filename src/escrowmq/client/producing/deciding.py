"""What may answer the broker's questions: a function of one, or an object that takes a whole batch at once."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.producing.ending import outcome_column
from escrowmq.errors import Code, Misuse
from escrowmq.message.ids import records
from escrowmq.model import Check, CheckedMessage, Outcome, TransactionId

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Decide = Callable[[Check], Outcome | Awaitable[Outcome | None] | None]
"""A function of one question."""


class BatchChecker(Protocol):
    """An object that answers a whole batch of questions in one call: as many outcomes, in the same order."""

    def decide_batch(self, checks: Sequence[Check], /) -> Any:
        """``Sequence[Outcome | None]``, or what gives one when awaited. None is UNKNOWN."""
        ...


class IdChecker(Protocol):
    """An object that needs nothing but the ids, as columns: no Python object is made for a question.

    It is preferred to ``decide_batch`` where an object has both.
    """

    def decide_ids(self, ids: pa.FixedSizeBinaryArray, /) -> Any:
        """A uint8 array of :class:`~escrowmq.model.Outcome` for as many transaction ids (each once, 16 bytes, no nulls),
        or what gives one when awaited."""
        ...


AnyChecker = Decide | BatchChecker | IdChecker
"""What a producer takes as its checker."""


class Whole:
    """A batch or id checker as one call: a CHECKS batch in, an ENDING batch out."""

    def __init__(self, checker: AnyChecker) -> None:
        self._by_id = getattr(checker, "decide_ids", None)
        self._by_batch = getattr(checker, "decide_batch", None)
        self.is_async = inspect.iscoroutinefunction(self._by_id or self._by_batch)

    def ask(self, batch: pa.RecordBatch) -> Any:
        """The checker's answer as it gives it; for an async one, what is to be awaited."""
        if self._by_id is not None:
            return self._by_id(distinct_ids(batch))
        assert self._by_batch is not None  # see takes_batches
        return self._by_batch(list(checks_of(batch)))

    def answers(self, batch: pa.RecordBatch, given: Any) -> pa.RecordBatch:
        """The answers to a batch as decisions. Raises Misuse(BAD_ARGUMENT) if ``given`` is not one outcome per question."""
        ids = distinct_ids(batch)
        if not isinstance(given, np.ndarray | pa.Array | pa.ChunkedArray):
            given = [one if isinstance(one, Outcome) else Outcome.UNKNOWN for one in given]
        outcomes = pa.array(outcome_column(given, len(ids)))
        return pa.RecordBatch.from_arrays([ids, outcomes], schema=schemas.ENDING)

    def unknown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """UNKNOWN to every question of a batch: the broker asks again."""
        return self.answers(batch, np.zeros(len(distinct_ids(batch)), np.uint8))


def takes_batches(checker: AnyChecker) -> bool:
    """Whether it is an object for whole batches. Raises Misuse(BAD_ARGUMENT) for what is no checker at all."""
    if callable(getattr(checker, "decide_ids", None)) or callable(getattr(checker, "decide_batch", None)):
        return True
    if not callable(checker):
        hint = "a checker is a function, or an object with decide_batch(checks) or decide_ids(ids)"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(checker).__name__} is not a checker", hint)
    return False


def distinct_ids(batch: pa.RecordBatch) -> pa.FixedSizeBinaryArray:
    """The transactions of a CHECKS batch, each once: the rows of one stand next to each other."""
    ids = batch.column("transaction")
    raw = records(ids, np.dtype((np.uint64, 2)))
    first = np.flatnonzero(np.concatenate([[True], (raw[1:] != raw[:-1]).any(axis=1)])[: len(ids)])
    return ids if len(first) == len(ids) else ids.take(pa.array(first))


def checks_of(batch: pa.RecordBatch) -> Iterator[Check]:
    """The questions of a CHECKS batch, as objects."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    ids = columns["transaction"]
    start = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            messages = tuple(_message(columns, at) for at in range(start, row))
            yield Check(TransactionId.from_bytes(ids[start]), columns["attempt"][start], messages)
            start = row


def _message(columns: dict[str, list[Any]], row: int) -> CheckedMessage:
    return CheckedMessage(
        columns["topic"][row],
        columns["body"][row],
        columns["key"][row],
        columns["tag"][row],
        dict(columns["properties"][row] or ()),
        columns["message_id"][row],
        _EPOCH + timedelta(microseconds=columns["born_us"][row]),
    )
