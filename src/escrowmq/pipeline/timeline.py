"""Transactions over time: their totals, and the counts for the charts of reports.

A frame of transactions has one column, ``packed``: each value holds many transactions as three lists of 64-bit numbers.
So Spark moves a few large values instead of a row per transaction, and NumPy counts them. The numbers of a transaction
are the time of its first half message (microseconds since 1970), how often it was checked, and its *end*: the first
decision as one number, made of its time and two codes, so that the smallest is the earliest; NO_END while undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_type

from escrowmq.model import DecidedBy, TransactionState

LATENCY_STEPS = 8
"""Bars of a latency histogram per factor of ten."""

STATES = [state.name.lower() for state in TransactionState]
DECIDERS = [by.name.lower() for by in DecidedBy]
UNDECIDED = ("open", "parked")
"""States of half messages that can still change."""
NO_END = -1

_CODES = 8
"""At least the number of states, and of deciders."""
_ENDED = ("committed", "rolled_back", "expired")
_SUMS = ("transactions", *_ENDED, "undecided", "asked", "asked_about")
_TIMES = ("first_us", "last_us", "oldest_us")
_TOTALS = pa.struct([(name, pa.int64()) for name in (*_SUMS, *_TIMES)])
_OVER_TIME, _LATENCY = 0, 1
_COUNT = pa.struct([("chart", pa.int32()), ("name", pa.utf8()), ("number", pa.int64()), ("count", pa.int64())])
_ROW = pa.struct(
    [
        *[("stored_us", pa.int64()), ("checks", pa.int64()), ("state", pa.utf8())],
        *[("decided_us", pa.int64()), ("decided_by", pa.utf8())],
    ]
)
Counts = dict[str, dict[int, int]]
"""By name and number (of a bucket or step), in order of both."""


def make_ends(decided_us: np.ndarray, states: np.ndarray, deciders: np.ndarray) -> np.ndarray:
    """Return the ends of transactions from the times of their decisions and from places in STATES and DECIDERS."""
    ends: np.ndarray = (decided_us * _CODES + states) * _CODES + deciders
    return ends


def pack(stored_us: np.ndarray, checks: np.ndarray, ends: np.ndarray) -> bytes:
    """Return transactions as one value of a frame of transactions."""
    return np.stack([stored_us, checks, ends]).astype(np.int64).tobytes()


def unpack(transactions: DataFrame) -> DataFrame:
    """Convert a frame of transactions to rows → ``stored_us, checks, state, decided_us, decided_by`` (the last three
    null while undecided)."""
    rows = f.explode(make_udf(_list_rows, pa.list_(_ROW))("packed")).alias("row")
    return transactions.select(rows).select("row.*")


def count_totals(transactions: DataFrame) -> dict[str, int | None]:
    """Return ``transactions, committed, rolled_back, expired, undecided, asked`` (check-backs), ``asked_about``
    (transactions), ``first_us, last_us, oldest_us`` (oldest undecided). The last three are None if there are none."""
    totals = transactions.select(make_udf(_sum_values, _TOTALS)("packed").alias("of")).select("of.*")
    sums = [f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in _SUMS]
    times = [(f.max if name == "last_us" else f.min)(name).alias(name) for name in _TIMES]
    found: dict[str, int | None] = totals.agg(*sums, *times).collect()[0].asDict()
    return found


def count_charts(
    transactions: DataFrame, start_us: int, bucket_us: int, *, ended_by: str, latency_by: str
) -> tuple[Counts, Counts]:
    """Return how many transactions began (name ``prepared``) and ended in each bucket of ``bucket_us`` microseconds,
    numbered from ``start_us`` on; and how many decisions took how long. Step s holds latencies from
    10^(s / LATENCY_STEPS) microseconds to the next. ``ended_by`` and ``latency_by`` say by what they are counted:
    ``state`` or ``decided_by``."""

    def count(values: pa.Array) -> pa.Array:
        lines = [_count_value(*one, start_us, bucket_us, ended_by, latency_by) for one in _open(values)]
        return pa.array(lines, pa.list_(_COUNT))

    lines = transactions.select(f.explode(make_udf(count, pa.list_(_COUNT))("packed")).alias("of")).select("of.*")
    charts: tuple[Counts, Counts] = ({}, {})
    counts = lines.groupBy("chart", "name", "number").agg(f.sum("count").alias("number_of"))
    for chart, name, number, found in sorted(map(tuple, counts.collect())):
        charts[chart].setdefault(name, {})[number] = found
    return charts


def make_udf(function: Callable[[pa.Array], Any], kind: pa.DataType) -> Any:
    """Return a function for columns that calls ``function`` in Spark's Python processes. It returns an array of this
    kind for one of values; or, if it is not annotated so, a single value for a group."""
    make: Any = arrow_udf
    return make(function, from_arrow_type(kind))


def _open(values: pa.Array) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the three lists of each packed value."""
    for value in values:
        stored_us, checks, ends = np.frombuffer(value.as_buffer(), np.int64).reshape(3, -1)
        yield stored_us, checks, ends


def _find_names(ends: np.ndarray, by: str) -> tuple[np.ndarray, list[str]]:
    """Return the places of the states or deciders in their list, and that list."""
    return (ends // _CODES % _CODES, STATES) if by == "state" else (ends % _CODES, DECIDERS)


def _list_rows(values: pa.Array) -> pa.Array:
    sizes, rows = [0], []
    for stored_us, checks, ends in _open(values):
        is_open = ends == NO_END
        words = [
            pa.array(every, pa.utf8()).take(pa.array(np.where(is_open, 0, places), mask=is_open))
            for places, every in (_find_names(ends, "state"), _find_names(ends, "decided_by"))
        ]
        decided_us = pa.array(ends // _CODES**2, mask=is_open)
        columns = [pa.array(stored_us), pa.array(checks), words[0], decided_us, words[1]]
        rows.append(pa.StructArray.from_arrays(columns, fields=list(_ROW)))
        sizes.append(len(ends))
    every_row = pa.concat_arrays(rows) if rows else pa.nulls(0, _ROW)
    return pa.ListArray.from_arrays(pa.array(np.cumsum(sizes), pa.int32()), every_row)


def _sum_values(values: pa.Array) -> pa.Array:
    return pa.array([_sum_value(*one) for one in _open(values)], _TOTALS)


def _sum_value(stored_us: np.ndarray, checks: np.ndarray, ends: np.ndarray) -> dict[str, int | None]:
    is_open = ends == NO_END
    by_state = np.bincount(_find_names(ends[~is_open], "state")[0], minlength=len(STATES))
    return {
        "transactions": len(ends),
        **{name: int(by_state[STATES.index(name)]) for name in _ENDED},
        "undecided": int(is_open.sum()),
        "asked": int(checks.sum()),
        "asked_about": int((checks > 0).sum()),
        "first_us": int(stored_us.min()),
        "last_us": int(max(stored_us.max(), ends.max() // _CODES**2)),
        "oldest_us": int(stored_us[is_open].min()) if is_open.any() else None,
    }


def _count_value(
    stored_us: np.ndarray,
    checks: np.ndarray,
    ends: np.ndarray,
    start_us: int,
    bucket_us: int,
    ended_by: str,
    latency_by: str,
) -> list[tuple[int, str, int, int]]:
    ended, began_us = ends[ends != NO_END], stored_us[ends != NO_END]
    decided_us = ended // _CODES**2
    steps = np.floor(np.log10(np.maximum(decided_us - began_us, 1)) * LATENCY_STEPS).astype(np.int64)
    series = [
        (_OVER_TIME, np.zeros_like(stored_us), ["prepared"], (stored_us - start_us) // bucket_us),
        (_OVER_TIME, *_find_names(ended, ended_by), (decided_us - start_us) // bucket_us),
        (_LATENCY, *_find_names(ended, latency_by), steps),
    ]
    lines = []
    for chart, places, names, numbers in series:
        keys, counts = np.unique(numbers * _CODES + places, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            number, place = divmod(key, _CODES)
            lines.append((chart, names[place], number, count))
    return lines


def collect_counts(counts: DataFrame) -> Counts:
    """Collect a frame of three columns: a name, a number (such as a bucket or step) and a count. Returns the counts by
    name and number, in order of both."""
    found: Counts = {}
    for name, number, count in sorted(map(tuple, counts.collect())):
        found.setdefault(name, {})[number] = count
    return found


def make_series(counts: Mapping[str, Mapping[int, int]], size: int) -> dict[str, list[int]]:
    """Convert counts by name and bucket to lists of ``size`` values by name, with 0 for empty buckets."""
    return {name: [by.get(bucket, 0) for bucket in range(size)] for name, by in counts.items()}
