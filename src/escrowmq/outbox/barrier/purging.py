"""Deleting old marks, a bounded piece at a time."""

from __future__ import annotations

import pyarrow as pa
import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.tables import trans_barrier

_TIME = trans_barrier.c.decided_us


def check_age(age: object, retention: float, chunk: int) -> None:
    """Raise Misuse(BAD_ARGUMENT) for an age at which the broker may still ask."""
    if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < 1e12:
        raise Misuse(Code.BAD_ARGUMENT, f"older_than = {age!r}: seconds, or a timedelta")
    if age < retention:
        raise Misuse(
            Code.BAD_ARGUMENT,
            f"marks younger than the broker's retention ({retention:g} s) are still needed",
            "asked about a transaction without a mark, the barrier answers ROLLBACK, also where it had committed; purge later, "
            "or pass the retention that your brokers really have",
        )
    if not isinstance(chunk, int) or chunk < 1:
        raise Misuse(Code.BAD_ARGUMENT, f"chunk = {chunk!r}: at least 1")


def purge(engine: sa.Engine, before_us: int, keep: pa.Array, chunk: int) -> int:
    """Delete the marks of before a time, but those of ``keep``; how many.

    In the order of time, by its index. Marks of one moment are deleted together.
    """
    kept = trans_barrier.c.transaction_id.not_in([one for one in keep.to_pylist() if one is not None])
    deleted, start_us = 0, -1
    while True:
        window = [start_us < _TIME, before_us > _TIME]
        with engine.begin() as connection:
            last = sa.select(_TIME).where(*window).order_by(_TIME).offset(chunk - 1).limit(1)
            end_us = connection.scalar(last)
            if end_us is not None:
                window[1] = end_us >= _TIME
            deleted += connection.execute(sa.delete(trans_barrier).where(*window, kept)).rowcount
        if end_us is None:
            return deleted
        start_us = end_us
