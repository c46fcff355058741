"""The columns that differ in altered ids, with sample values.

Only the first altered ids of each comparison are looked up, so a run without altered ids pays nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import reduce

import numpy as np
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from escrowmq.pipeline.audit.readings import show_cell
from escrowmq.pipeline.audit.rows import Cell, Role, Rows
from escrowmq.pipeline.audit.verdict import Differing, Pair
from escrowmq.pipeline.sql.canonical import AMOUNT, to_amount

EXAMINED = 1000
"""Maximum number of altered ids of a comparison that are read again."""
PAIRS = 3
_LETTERS = 200
"""Maximum length of a sample value."""


def find_differing(every: Sequence[Rows], labels: Mapping[int, str], wrong: DataFrame) -> tuple[Differing, ...]:
    """Find for each comparison with altered ids the column that differs most, with sample values; reads the first
    altered ids in ``every``, the sides of all comparisons. ``wrong``: their findings; ``labels``: their names, by
    number."""
    first = f.row_number().over(Window.partitionBy("comparison").orderBy("id")) <= EXAMINED
    altered = wrong.where("kind = 'altered'").withColumn("first", first).where("first").select("comparison", "id")
    ids: dict[int, list[str]] = {}
    for row in altered.collect():
        ids.setdefault(row["comparison"], []).append(row["id"])
    if not ids:
        return ()
    every = [rows for rows in every if rows.comparisons & ids.keys()]
    roles = {role.comparison: role for rows in every for speaker in rows.speakers for role in speaker.roles}
    cells = reduce(DataFrame.unionByName, [_read_cells(rows, ids) for rows in every])
    found: dict[int, Differing] = {}
    for row in _compare_cells(cells, roles).orderBy(f.desc("ids"), "place").collect():
        number = row["comparison"]
        kind, _, name = roles[number].columns[row["place"]].partition(" ")
        pairs = tuple(Pair(one["id"], _show(one["before"], kind), _show(one["after"], kind)) for one in row["pairs"])
        found.setdefault(number, Differing(labels[number], name, row["ids"], len(ids[number]), pairs))
    return tuple(found[number] for number in sorted(found))


def _read_cells(rows: Rows, ids: Mapping[int, Sequence[str]]) -> DataFrame:
    """Return the compared values of some ids (``ids``: by number of the comparison) → ``comparison, id, expected,
    place`` (number of the column), ``text, amount`` (decimal, if the column has a tolerance)."""

    def make_cells(role: Role, cell: Cell) -> Column:
        near = dict(role.near)
        amounts = [to_amount(cell(key), key.partition(" ")[0]) if key in near else f.lit(None) for key in role.columns]
        texts = [show_cell(key, cell) for key in role.columns]
        return f.struct(
            f.lit(role.comparison).alias("comparison"),
            f.lit(role.expected).alias("expected"),
            f.array(*texts).cast("array<string>").alias("texts"),
            f.array(*amounts).cast(f"array<{AMOUNT}>").alias("amounts"),
        )

    mine = {id for number in rows.comparisons & ids.keys() for id in ids[number]}
    said = rows.open(rows.select_ids(mine)).select(rows.known_id.alias("id"), f.explode(rows.map_roles(make_cells)))
    wanted = [(f.col("comparison") == number) & f.col("id").isin(list(its)) for number, its in ids.items()]
    chosen = said.select("id", "col.*").where(reduce(Column.__or__, wanted))
    pairs = f.posexplode(f.arrays_zip("texts", "amounts")).alias("place", "cell")
    names = ["comparison", "id", "expected"]
    parts = [f.col("cell.texts").alias("text"), f.col("cell.amounts").alias("amount")]
    return chosen.select(*names, pairs).select(*names, "place", *parts)


def _compare_cells(cells: DataFrame, roles: Mapping[int, Role]) -> DataFrame:
    """Convert cells → ``comparison, place, ids`` (the number of ids whose values differ in this column beyond its
    tolerance), ``pairs`` (the first of them, with both values)."""
    value = f.struct(f.col("text").isNull(), "text")
    before, after = f.min(f.when(f.col("expected"), value)), f.when(~f.col("expected"), value)
    by_id = cells.groupBy("comparison", "id", "place").agg(
        (f.min(value) != f.max(value)).alias("unequal"),
        (f.count("amount") == f.count("*")).alias("are_amounts"),
        (f.max("amount") - f.min("amount")).alias("distance"),
        before["text"].alias("before"),
        # of several rows one that differs from the expected one, if there is such
        f.when(f.max(after) != before, f.max(after)).otherwise(f.min(after))["text"].alias("after"),
    )
    limits = [
        f.when((f.col("comparison") == number) & (f.col("place") == role.columns.index(key)), f.lit(limit).cast(AMOUNT))
        for number, role in roles.items()
        for key, limit in role.near
    ]
    is_near = f.col("are_amounts") & (f.col("distance") <= f.coalesce(*limits)) if limits else f.lit(False)
    differ = by_id.where(f.col("unequal") & ~f.coalesce(is_near, f.lit(False)))
    short = [f.substring(name, 1, _LETTERS).alias(name) for name in ("before", "after")]
    pairs = f.slice(f.sort_array(f.collect_list(f.struct("id", *short))), 1, PAIRS)
    return differ.groupBy("comparison", "place").agg(f.count("*").alias("ids"), pairs.alias("pairs"))


def _show(text: str | None, kind: str) -> str | None:
    """Convert a canonical text to the usual form of its kind: ISO 8601 for a time, decimal for a float; others stay as
    they are."""
    with suppress(ValueError, OverflowError, struct.error):
        if text is not None and kind == "time":
            return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(text))).isoformat()
        if text is not None and kind in ("float", "float32"):
            [value] = struct.unpack("<d", struct.pack("<q", abs(int(text))))
            shown = value if kind == "float" else np.float32(value)
            return f"{'-' if text.startswith('-') else ''}{shown!s}"
    return text
