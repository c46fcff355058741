"""Windows of ids that are proven equal without laying row beside row: what is left over is compared row by row.

A *window* is all ids with the same hash modulo some number, so an id is in one window on every side. Of each window and side
the rows are counted and the hashes of (id, content) summed: sums do not care for order, and are made where the rows
are, so that only one line a window is sent around. Two windows are *equal* when the counts and all four sums (both halves
of two hashes with different seeds) are: they hold the same rows, as often.

The same rows as often is not yet right: an id may be twice on both sides. So one side of each comparison must be
*unique* by id, because its database has an index that says so, or because its ids have been looked through: then a window
where a hash of an id comes twice is suspected, too.

(Not xor: a pair of equal rows would cancel. Not one sum of whole hashes: it would overflow.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.pipeline.audit.rows import Cell, Role, Rows, Speaker, digest

WINDOWS = 1024
"""More would make more lines to send around, fewer more rows to look at where something is wrong."""

_SEED = 0x5EED
_LOW = 0xFFFF_FFFF


def window(id: Column, count: int) -> Column:
    """The window of an id: 0 .. ``count``-1."""
    return _in_window(f.xxhash64(id), count)


def _in_window(hashed: Column, count: int) -> Column:
    return f.pmod(hashed, f.lit(count)).cast("int")


def balances(every: Sequence[Rows], count: int) -> DataFrame:
    """All sides → ``comparison, window, expected, found`` (rows), ``equal``: one line for each window of each comparison."""
    together = reduce(DataFrame.unionByName, [_marked(rows, count) for rows in every])
    sign = 2 * f.col("expected") - 1
    halves = [half for name in ("first", "second") for half in _halves(f.col(name))]
    sums = together.groupBy("comparison", "window").agg(
        f.sum("expected").alias("expected"),
        f.sum(1 - f.col("expected")).alias("found"),
        *[_together(sign, half).alias(f"sum{n}") for n, half in enumerate(halves)],
    )
    equal = f.col("expected") == f.col("found")
    for n in range(len(halves)):
        equal &= f.col(f"sum{n}") == 0
    return sums.select("comparison", "window", "expected", "found", equal.alias("equal"))


def _marked(rows: Rows, count: int) -> DataFrame:
    """``window, comparison, expected, first, second``: a row for every role of every row."""

    def mark(role: Role, cell: Cell) -> Column:
        cells = [cell(name) for name in role.columns]
        return f.struct(
            f.lit(role.comparison).alias("comparison"),
            f.lit(int(role.expected)).cast("bigint").alias("expected"),
            digest(cells, rows.known_id).alias("first"),
            digest(cells, f.lit(_SEED), rows.known_id).alias("second"),
        )

    place = window(rows.known_id, count).alias("window")
    [speaker, *others] = rows.speakers
    if not others and speaker.where is None and len(speaker.roles) == 1:
        return rows.frame.select(place, mark(speaker.roles[0], speaker.cell).alias("mark")).select("window", "mark.*")
    return rows.frame.select(place, f.explode(rows.each(mark)).alias("mark")).select("window", "mark.*")


def _together(sign: Column, half: Column) -> Column:
    return f.sum(sign * half)  # 32 bits each: two thousand million rows fit


def _halves(hashed: Column) -> tuple[Column, Column]:
    return hashed.bitwiseAND(f.lit(_LOW)), f.shiftrightunsigned(hashed, 32)


def repeated(every: Sequence[Rows], count: int) -> DataFrame | None:
    """Windows in which an id may come twice → ``comparison, window``; None if every comparison has a unique side."""
    chosen = _to_look_through([speaker for rows in every for speaker in rows.speakers])
    frames = []
    for rows in every:
        values = [[f.lit(chosen.index(speaker))] if speaker in chosen else [] for speaker in rows.speakers]
        if any(values):
            hashed = f.xxhash64(rows.known_id).alias("hashed")
            frames.append(rows.frame.select(rows.of(values)[0].alias("speaker"), hashed))
    if not frames:
        return None
    ids = reduce(DataFrame.unionByName, frames).where(f.col("speaker").isNotNull())
    twice = ids.groupBy("speaker", "hashed").agg(f.count("*").alias("rows")).where("rows > 1")
    comparisons = f.coalesce(
        *[
            f.when(f.col("speaker") == n, f.array(*[f.lit(role.comparison) for role in speaker.roles]))
            for n, speaker in enumerate(chosen)
        ]
    )
    places = twice.select("speaker", _in_window(f.col("hashed"), count).alias("window")).distinct()
    return places.select(f.explode(comparisons).alias("comparison"), "window")


def _to_look_through(speakers: Sequence[Speaker]) -> list[Speaker]:
    """The fewest sides, about, that make every comparison have one that is unique or looked through."""
    safe = {role.comparison for speaker in speakers if speaker.unique for role in speaker.roles}
    left = {role.comparison for speaker in speakers for role in speaker.roles} - safe
    chosen: list[Speaker] = []
    while left:
        best = max(speakers, key=lambda speaker: len({role.comparison for role in speaker.roles} & left))
        chosen.append(best)
        left -= {role.comparison for role in best.roles}
    return chosen
