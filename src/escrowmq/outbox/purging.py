"""Deletes old rows in the order of their time, a bounded number per transaction."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.session import explain
from escrowmq.platform.times import to_us


def age_of(older_than: object) -> float:
    """Return an age (a number of seconds, or a timedelta) in seconds. Raises Misuse(BAD_ARGUMENT) for anything else."""
    age = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
    if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < 1e12:
        raise Misuse(Code.BAD_ARGUMENT, f"older_than = {older_than!r}", "seconds, or a timedelta")
    return age


def delete_older(
    engine: sa.Engine, moment: sa.Column[int], age: float, chunk: int, *only: sa.ColumnElement[bool]
) -> int:
    """Delete rows whose column ``moment`` (microseconds, indexed) is more than ``age`` seconds ago. Returns how many.

    About ``chunk`` rows per transaction: rows of one moment are deleted together. ``only``: further conditions.
    """
    deleted, start_us = 0, -1
    before_us: int | None = None
    while True:
        try:
            with engine.begin() as connection:
                if before_us is None:
                    before_us = database_now_us(connection) - to_us(age)
                window = [start_us < moment, before_us > moment, *only]
                last = sa.select(moment).where(*window).order_by(moment).offset(chunk - 1).limit(1)
                end_us = connection.scalar(last)
                if end_us is not None:
                    window[1] = end_us >= moment
                deleted += connection.execute(sa.delete(moment.table).where(*window)).rowcount
        except DBAPIError as problem:
            raise explain(problem) from problem.__cause__
        if end_us is None:
            return deleted
        start_us = end_us
