"""Comparisons at volume: windows first, then the rows of those windows that are not proven equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit import frames, windows
from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.rows import Role, Rows, Speaker
from escrowmq.pipeline.audit.windows import WINDOWS
from escrowmq.settings import nearest


@dataclass(frozen=True, slots=True)
class Tallied:
    """What a pass over all sides came to.

    ``proven``: for each comparison, rows (and ids) of its equal windows. ``tallies``: those of all other ids, see
    :func:`escrowmq.pipeline.audit.frames.tally`.
    """

    proven: dict[int, int]
    tallies: DataFrame


@contextmanager
def tallied(every: Sequence[Rows], count: int = WINDOWS, tied: Sequence[int] = ()) -> Iterator[Tallied]:
    """Lay all sides beside each other. ``count``: number of windows; 0 compares row by row at once, which costs a small run less.
    ``tied``: comparisons that are looked at together, a window that is suspected in one is so in all of them.

    The tallies are kept (in memory, or on disk) as long as the block runs.
    """
    if not count:
        tallies = frames.tally([_witnesses(rows) for rows in every]).persist()
        try:
            yield Tallied({}, tallies)
        finally:
            tallies.unpersist()
        return
    lines = windows.balances(every, count).persist()
    suspects = _suspects(every, lines, count, tied).persist()
    kept: list[DataFrame] = [lines, suspects]
    try:
        proven = lines.join(f.broadcast(suspects), ["comparison", "window"], "left_anti")
        counted = proven.groupBy("comparison").agg(f.sum("expected").alias("rows")).collect()
        tallies = frames.tally([_witnesses(rows, suspects, count) for rows in _still(every, suspects)]).persist()
        kept.append(tallies)
        yield Tallied({row["comparison"]: row["rows"] for row in counted}, tallies)
    finally:
        for frame in kept:
            frame.unpersist()


def _suspects(every: Sequence[Rows], lines: DataFrame, count: int, tied: Sequence[int]) -> DataFrame:
    """``comparison, window`` of the windows that are not proven equal."""
    unequal = lines.where(~f.col("equal")).select("comparison", "window")
    twice = windows.repeated(every, count)
    found = unequal if twice is None else unequal.unionByName(twice)
    if len(tied) > 1:
        all_of_them = f.array(*[f.lit(number) for number in tied])
        same = f.when(f.col("comparison").isin(*tied), all_of_them).otherwise(f.array("comparison"))
        found = found.select(f.explode(same).alias("comparison"), "window")
    return found.distinct()


def _still(every: Sequence[Rows], suspects: DataFrame) -> Sequence[Rows]:
    """The sides, or nothing at all if there are no suspects: then nothing is read again."""
    if not suspects.isEmpty():
        return every
    return [Rows(rows.frame.limit(0), rows.id, rows.speakers) for rows in every]


def _witnesses(rows: Rows, suspects: DataFrame | None = None, count: int = 0) -> DataFrame:
    if suspects is None:
        return frames.witnesses(rows.frame, rows.id, rows.each(frames.say))
    place = windows.window(rows.known_id, count)
    there = f.broadcast(suspects.select("window").distinct())
    few = rows.frame.withColumn("_window", place).join(there, f.col("_window") == there["window"], "left_semi")
    said = few.select(rows.known_id.alias("id"), "_window", f.explode(rows.each(frames.say)).alias("said"))
    told = said.select("said.comparison", "id", "said.expected", "said.digest", f.col("_window").alias("window"))
    return told.join(f.broadcast(suspects), ["comparison", "window"], "left_semi").drop("window")


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Two sides, compared. ``findings``: ``kind, id, expected, found`` (rows of the id on either side), one row a finding; kept in
    memory, or on disk, until :meth:`close`.

    ``ids`` are distinct ids of both sides together; ``wrong_ids`` those with a finding. ``kinds`` counts distinct ids by kind.
    """

    findings: DataFrame
    ids: int
    expected_rows: int
    found_rows: int
    wrong_ids: int
    kinds: dict[str, int]

    @property
    def agrees(self) -> bool:
        """Whether both sides hold the same ids with the same content."""
        return not self.wrong_ids

    def close(self) -> None:
        """Let go of the findings."""
        self.findings.unpersist()


def compare(
    expected: DataFrame,
    found: DataFrame,
    *,
    id: str,
    columns: Sequence[str] | None = None,
    kinds: Sequence[str] = KINDS,
    unique: str | None = None,
    windows: int = WINDOWS,
) -> Compared:
    """Compare two frames by the column ``id`` and the content of ``columns`` (None: all that the expected side has).

    Each side is read twice at most, and only rows of windows that differ are sent around (see
    :mod:`escrowmq.pipeline.audit.windows`; ``windows=0`` compares row by row at once). ``unique``: ``"expected"`` or ``"found"`` if no id
    can be twice on that side, a primary key for example; else the ids of the expected side are looked through as well. ``kinds``:
    what to report. Raises Misuse(BAD_ARGUMENT) for columns that a side lacks, or that have different types.
    """
    names = tuple(name for name in expected.columns if name != id) if columns is None else tuple(columns)
    _check(expected, found, id, names, kinds, unique)
    sides = [
        Rows(frame, f.col(id).cast("string"), (Speaker((Role(0, is_expected, names),), unique=unique == name),))
        for frame, is_expected, name in ((expected, True, "expected"), (found, False, "found"))
    ]
    with tallied(sides, windows) as done:
        wrong = frames.findings(done.tallies, [kinds]).select("kind", "id", "expected", "found").persist()
        counted = {row["kind"]: row["ids"] for row in frames.ids_by_kind(wrong).collect()}
        proven = done.proven.get(0, 0)
        row = next(iter(frames.sides(done.tallies).collect()), None)
        ids, before, after = (row["ids"], row["expected"], row["found"]) if row else (0, 0, 0)
        return Compared(
            wrong,
            proven + ids,
            proven + before,
            proven + after,
            wrong.select("id").distinct().count(),
            {kind: counted.get(kind, 0) for kind in KINDS},
        )


def _check(
    expected: DataFrame, found: DataFrame, id: str, columns: Sequence[str], kinds: Sequence[str], unique: str | None
) -> None:
    for side, frame in (("expected", expected), ("found", found)):
        for name in (id, *columns):
            if name not in frame.columns:
                hint = nearest(name, frame.columns) or f"there are {', '.join(frame.columns)}"
                raise Misuse(Code.BAD_ARGUMENT, f"the {side} side has no column {name!r}", hint)
    for name in columns:
        one, other = (frame.schema[name].dataType.simpleString() for frame in (expected, found))
        if one != other:
            raise Misuse(
                Code.BAD_ARGUMENT, f"column {name!r} is {one} on the expected side, {other} on the other", "cast"
            )
        if "map<" in one:
            raise Misuse(
                Code.BAD_ARGUMENT, f"column {name!r} is a map, which has no order", "array_sort(map_entries(...))"
            )
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise Misuse(Code.BAD_ARGUMENT, f"no kind {unknown[0]!r}", nearest(unknown[0], list(KINDS)) or ", ".join(KINDS))
    if unique not in (None, "expected", "found"):
        raise Misuse(Code.BAD_ARGUMENT, f"unique = {unique!r}", '"expected", "found" or None')
