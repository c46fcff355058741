"""Proves windows (ids grouped by hash) equal by row counts and content hashes, without comparing their rows.

A *window* is all ids with the same hash modulo some number, so an id is in one window on every side. The rows of each
window and side are counted, and the hashes of (id, content) summed. Sums do not depend on the order, and are computed
where the rows are, so only one line per window is shuffled. Two windows are *equal* if their counts and both sums (of
the upper and the lower half of the hash) are equal: they hold the same rows, as often.

That is not enough: an id may occur twice on both sides. So one side of each comparison must be *unique* by id in that
window: its database has a unique index, or its ids were scanned, or its window is equal to that of a side that is
unique there. Windows that are equal and unique are *proven*.

PostgreSQL, MariaDB and MySQL compute the sums of their tables themselves, so no row is transferred. Hashes are then
made of MD5, which every database has: windows of all sides, and digests of the comparisons with such a table. The
processes that read SQLite and the log compute most other sums, so no row goes to Java (see
:mod:`escrowmq.pipeline.log_rows`); Spark computes the rest.

(Not xor: a pair of equal rows would cancel. Not one sum of whole hashes: it would overflow.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.pipeline.audit.rows import SETTLED, Rows, Speaker, digest, portable_digest, portable_hash

WINDOWS = 1024
"""Number of windows. More windows shuffle more lines; fewer windows leave more rows to compare after a difference."""

_LOW = 0xFFFF_FFFF


def window(id: Column, count: int, portable: bool = False) -> Column:
    """Return the window of an id: its hash modulo ``count``, 0 .. ``count``-1. ``portable``: by a hash that SQL can
    compute, too, else by Spark's own."""
    return _in_window(_hash_id(id, portable), count)


def is_portable(every: Iterable[Rows]) -> bool:
    """Return whether a database computes sums, so that all sides must use hashes that it knows."""
    return any(rows.served for rows in every)


def _hash_id(id: Column, portable: bool) -> Column:
    return portable_hash(id) if portable else f.xxhash64(id)


def _in_window(hashed: Column, count: int) -> Column:
    return f.pmod(hashed, f.lit(count)).cast("int")


def compare_windows(every: Sequence[Rows], count: int) -> DataFrame:
    """Sum the rows of all sides by window; return ``comparison, window, expected, found`` (numbers of rows), ``equal``
    (bool: same numbers and checksums), one line per comparison and window that has rows."""
    served = {number for rows in every if rows.served for number in rows.comparisons}
    together = reduce(DataFrame.unionByName, [_sum_side(rows, count, served) for rows in every])
    sign = 2 * f.col("expected") - 1
    sums = together.groupBy("comparison", "window").agg(
        f.sum(f.col("rows") * f.col("expected")).alias("expected"),
        f.sum(f.col("rows") * (1 - f.col("expected"))).alias("found"),
        *[f.sum(sign * f.col(name)).alias(name) for name in ("sum0", "sum1")],
    )
    equal = (f.col("expected") == f.col("found")) & (f.col("sum0") == 0) & (f.col("sum1") == 0)
    return sums.select("comparison", "window", "expected", "found", equal.alias("equal"))


def _sum_side(rows: Rows, count: int, served: Collection[int]) -> DataFrame:
    lines = [] if rows.sum_windows is None else [rows.sum_windows(count, bool(served))]
    if not rows.comparisons <= set(rows.summed):
        frame, by = (rows.frame, ()) if rows.grown is None else (rows.grown.read_fresh(), (SETTLED,))
        lines.append(_sum_windows(rows, frame, count, served, *by))
    together = reduce(DataFrame.unionByName, lines)
    return together if rows.grown is None else rows.grown.add(together)


def _sum_windows(rows: Rows, frame: DataFrame, count: int, served: Collection[int], *by: str) -> DataFrame:
    """Return ``window, comparison, expected, rows, sum0, sum1`` and ``by``: one line for every role and window. A row
    becomes one digest per role, null for roles that it is not in. Digests are summed at once, so a row is never
    exploded into several. ``served``: comparisons in which a database makes the digests of the other side. Leaves out
    the comparisons in ``rows.summed``."""
    every = [(speaker, role) for speaker in rows.speakers for role in speaker.roles]
    roles = [(speaker, role) for speaker, role in every if role.comparison not in rows.summed]
    hashed = rows.open(frame).withColumn("_hashed", _hash_id(rows.known_id, bool(served)))
    said = []
    for n, (speaker, role) in enumerate(roles):
        cells = [speaker.cell(name) for name in role.columns]
        by_sql = role.comparison in served
        mark = portable_digest(rows.known_id, cells) if by_sql else digest(cells, f.col("_hashed"))
        said.append((mark if speaker.where is None else f.when(speaker.where, mark)).alias(f"d{n}"))
    marked = hashed.select(_in_window(f.col("_hashed"), count).alias("window"), *by, *said)
    sums = []
    for n in range(len(roles)):
        sums.append(f.count(f"d{n}").alias(f"d{n}_rows"))
        sums += [_sum_half(half).alias(f"d{n}_{m}") for m, half in enumerate(_split(f.col(f"d{n}")))]
    lines = [
        f.struct(
            f.lit(role.comparison).alias("comparison"),
            f.lit(int(role.expected)).cast("bigint").alias("expected"),
            f.col(f"d{n}_rows").alias("rows"),
            *[f.coalesce(f"d{n}_{m}", f.lit(0)).cast("bigint").alias(f"sum{m}") for m in (0, 1)],
        )
        for n, (_, role) in enumerate(roles)
    ]
    exploded = marked.groupBy("window", *by).agg(*sums).select("window", *by, f.explode(f.array(*lines)).alias("line"))
    return exploded.select("window", *by, "line.*")


def _sum_half(half: Column) -> Column:
    return f.sum(half)  # 32 bits each: 2^31 rows fit


def _split(hashed: Column) -> tuple[Column, Column]:
    return hashed.bitwiseAND(f.lit(_LOW)), f.shiftrightunsigned(hashed, 32)


def find_suspects(every: Sequence[Rows], equal: Mapping[int, set[int]], count: int) -> dict[int, set[int]]:
    """Return by comparison the windows that are not proven equal, because their sums differ or an id may repeat on both
    sides. ``equal``: its windows that are empty, or have equal counts and sums."""
    speakers = [speaker for rows in every for speaker in rows.speakers]
    chosen = _choose_sides_to_scan(speakers)
    everywhere = set(range(count))
    unique = {id(speaker): set(everywhere) if speaker.unique else set() for speaker in speakers}
    for n, twice in _find_repeats(every, chosen, count).items():
        unique[id(chosen[n])] = everywhere - twice
    sides = {number: [unique[id(s)] for s in speakers if number in s.comparisons] for number in equal}
    proven: dict[int, set[int]] = {}
    grown = True
    while grown:
        grown = False
        for number, windows in equal.items():
            proven[number] = windows & set().union(*sides[number])
            for side in sides[number]:
                grown |= not proven[number] <= side
                side |= proven[number]
    return {number: everywhere - windows for number, windows in proven.items()}


def _find_repeats(every: Sequence[Rows], chosen: Sequence[Speaker], count: int) -> dict[int, set[int]]:
    """Read the ids of the chosen sides; return, by place in ``chosen``, the windows in which an id may occur twice."""
    frames = []
    for rows in every:
        values = [[f.lit(chosen.index(speaker))] if speaker in chosen else [] for speaker in rows.speakers]
        if any(values):
            frame = rows.frame if rows.read_slim is None else rows.read_slim()
            own, hashed = rows.select_own(values)[0], _hash_id(rows.known_id, is_portable(every))
            frames.append(frame.select(own.alias("speaker"), hashed.alias("hashed")))
    found: dict[int, set[int]] = {n: set() for n in range(len(chosen))}
    if frames:
        ids = reduce(DataFrame.unionByName, frames).where(f.col("speaker").isNotNull())
        twice = ids.groupBy("speaker", "hashed").agg(f.count("*").alias("rows")).where("rows > 1")
        for row in twice.select("speaker", _in_window(f.col("hashed"), count).alias("window")).distinct().collect():
            found[row["speaker"]].add(row["window"])
    return found


def _choose_sides_to_scan(speakers: Sequence[Speaker]) -> list[Speaker]:
    """Return a small set of sides whose ids must be scanned for repeats, so that uniqueness can be shown in every
    comparison without a side that is known to be unique."""
    left = {number for speaker in speakers for number in speaker.comparisons}
    left -= _find_reached(speakers, [speaker for speaker in speakers if speaker.unique])
    chosen: list[Speaker] = []
    while left:
        best = max(speakers, key=lambda speaker: len(speaker.comparisons & left))
        chosen.append(best)
        left -= _find_reached(speakers, [best])
    return chosen


def _find_reached(speakers: Sequence[Speaker], first: Iterable[Speaker]) -> set[int]:
    """Return the comparisons of these sides, and those that are connected with them through other sides."""
    reached = {number for speaker in first for number in speaker.comparisons}
    while True:
        more = {n for speaker in speakers if speaker.comparisons & reached for n in speaker.comparisons}
        if more <= reached:
            return reached
        reached |= more


def is_among(number: Column, windows: Iterable[int], count: int) -> Column:
    """Return the condition that column ``number`` is one of these windows, of ``count`` in all. Each of the ``count``
    windows costs one byte of a constant."""
    chosen = set(windows)
    flags = bytes(number in chosen for number in range(count))
    return f.substring(f.lit(flags), number + 1, f.lit(1)) == f.lit(b"\x01")
