"""Comparison of large data sets: first by hash windows of ids, then row by row in windows that may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit import frames, windows
from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.rows import Cell, Role, Rows, Speaker, once
from escrowmq.pipeline.audit.windows import WINDOWS
from escrowmq.settings import nearest

KEPT_ROWS = 100_000
"""Up to this many rows of windows that differ are kept, so that naming what differs need not read the sides again."""


@dataclass(frozen=True, slots=True)
class Tallied:
    """The result of a pass over all sides. ``proven``: for each comparison, rows (and ids) of its equal windows.
    ``tallies``: those of all other ids, see :func:`escrowmq.pipeline.audit.frames.tally`. ``rows``: the sides with at
    least all rows of these ids."""

    proven: dict[int, int]
    tallies: DataFrame
    rows: Sequence[Rows]


@contextmanager
def tally_sides(
    every: Sequence[Rows], count: int = WINDOWS, tied: Sequence[int] = (), *, keep: bool = False
) -> Iterator[Tallied]:
    """Context manager: compare all sides; yield how many rows are proven equal, and a tally of each other id, kept
    until the block ends. ``count`` is the number of windows whose checksums are compared first; 0 compares row by row
    at once, which is cheaper for a small run. ``tied`` lists comparisons, by number, that share their suspects: a
    window that is suspect in one is suspect in all of them. ``keep``: the caller reads ``rows`` of the result, too, so
    they are kept if they are few."""
    proven: dict[int, int] = {}
    limits = frames.find_limits(every)
    width = max(map(len, limits.values()), default=0)
    with ExitStack() as stack:
        if count:
            sums = windows.compare_windows(every, count)
            proven, suspects, left = _prove(sums.collect(), every, count, tied)
            portable = windows.is_portable(every)
            every = [_select_suspects(rows, suspects, count, portable) for rows in every if _find_some(rows, suspects)]
            if keep and 0 < left <= KEPT_ROWS:
                for rows in every:
                    stack.callback(rows.frame.persist().unpersist)
            witnesses = [_find_suspects(rows, suspects, count, width) for rows in every]
            witnesses = witnesses or [frames.make_no_witnesses(sums.sparkSession)]
        else:
            witnesses = [frames.find_witnesses(rows, rows.frame, width) for rows in every]
        tallies = frames.tally(witnesses, limits).persist()
        stack.callback(tallies.unpersist)
        yield Tallied(proven, tallies, every)


def _prove(
    lines: Sequence[Row], every: Sequence[Rows], count: int, tied: Sequence[int]
) -> tuple[dict[int, int], dict[int, set[int]], int]:
    """Judge the checksums of ``count`` windows (``lines``, one per window and comparison). Returns, by number of the
    comparison, how many rows are proven equal, and the windows that are not proven; and how many rows these have in all
    comparisons."""
    numbers = set().union(*[rows.comparisons for rows in every])
    equal = {number: set(range(count)) for number in numbers}
    for row in lines:
        if not row["equal"]:
            equal[row["comparison"]].discard(row["window"])
    suspects = windows.find_suspects(every, equal, count)
    suspects |= dict.fromkeys(tied, set().union(*[suspects[number] for number in tied]))
    proven, left = dict.fromkeys(numbers, 0), 0
    for row in lines:
        if row["window"] not in suspects[row["comparison"]]:
            proven[row["comparison"]] += row["expected"]
        else:
            left += row["expected"] + row["found"]
    return proven, suspects, left


def _select_suspects(rows: Rows, suspects: Mapping[int, set[int]], count: int, portable: bool) -> Rows:
    """Return the rows that are in windows not proven equal (``suspects``, by comparison), with ``_window``, and with
    the columns of ``made``. ``portable`` as in :func:`windows.window`."""
    some = _find_some(rows, suspects)
    number = windows.window(rows.known_id, count, portable)
    if rows.select_windows is not None:
        few = rows.select_windows(some, count, portable)
    else:
        few = rows.frame.where(windows.is_among(number, some, count))
    opened = rows.open(few).withColumn("_window", number)
    return replace(rows, read=lambda: opened, made=(), select_windows=None)


def _find_some(rows: Rows, suspects: Mapping[int, set[int]]) -> set[int]:
    """Return the windows that are suspect in a comparison of ``rows``."""
    return set().union(*[suspects[number] for number in rows.comparisons])


def _find_suspects(rows: Rows, suspects: Mapping[int, set[int]], count: int, width: int) -> DataFrame:
    """Return the witnesses of ``rows`` of :func:`_select_suspects`. ``width`` as in :func:`frames.make_witness`."""
    some = _find_some(rows, suspects)

    def make_witness(role: Role, cell: Cell) -> Column:
        said, mine = frames.make_witness(role, cell, width), suspects[role.comparison]
        return said if mine == some else f.when(windows.is_among(f.col("_window"), mine, count), said)

    return frames.witnesses(rows.frame, rows.id, rows.map_roles(make_witness)).where("comparison IS NOT NULL")


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The result of a comparison of two sides. ``findings`` has one row per finding: ``kind, id, expected, found``
    (rows of the id on either side). It is kept in memory or on disk until :meth:`close`. ``ids`` counts the distinct
    ids of both sides together, ``wrong_ids`` those with a finding, and ``kinds`` those of each kind."""

    findings: DataFrame
    ids: int
    expected_rows: int
    found_rows: int
    wrong_ids: int
    kinds: dict[str, int]

    @property
    def agrees(self) -> bool:
        """Return whether both sides hold the same ids with the same content."""
        return not self.wrong_ids

    def close(self) -> None:
        """Release the memory and disk space of the findings."""
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
    """Compare two frames by the column ``id`` and the content of ``columns`` (None: all columns of the expected side).

    Each side is read at most twice, and only rows of windows that differ are shuffled (see
    :mod:`escrowmq.pipeline.audit.windows`; ``windows=0`` compares row by row at once). ``unique`` is ``"expected"`` or
    ``"found"`` if that side cannot contain an id twice, for example because it is a primary key; otherwise the ids of
    the expected side are also checked for repeats. ``kinds`` are the kinds to report. Raises Misuse(BAD_ARGUMENT) for
    columns that a side lacks, or whose types differ.
    """
    names = tuple(name for name in expected.columns if name != id) if columns is None else tuple(columns)
    _check(expected, found, id, names, kinds, unique)
    sides = [
        Rows(once(frame), f.col(id).cast("string"), (Speaker((Role(0, is_expected, names),), unique=unique == name),))
        for frame, is_expected, name in ((expected, True, "expected"), (found, False, "found"))
    ]
    with tally_sides(sides, windows) as done:
        wrong = frames.findings(done.tallies, [kinds]).select("kind", "id", "expected", "found").persist()
        counted = frames.count_ids(wrong, "kind")
        proven = done.proven.get(0, 0)
        row = next(iter(frames.count_sides(done.tallies).collect()), None)
        ids, before, after = (row["ids"], row["expected"], row["found"]) if row else (0, 0, 0)
        wrong_ids, kinds_found = wrong.select("id").distinct().count(), {kind: counted.get(kind, 0) for kind in KINDS}
        return Compared(wrong, proven + ids, proven + before, proven + after, wrong_ids, kinds_found)


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
            text = f"column {name!r} is {one} on the expected side, {other} on the other"
            raise Misuse(Code.BAD_ARGUMENT, text, "cast")
        if "map<" in one:
            text = f"column {name!r} is a map, which has no order"
            raise Misuse(Code.BAD_ARGUMENT, text, "array_sort(map_entries(...))")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise Misuse(Code.BAD_ARGUMENT, f"no kind {unknown[0]!r}", nearest(unknown[0], list(KINDS)) or ", ".join(KINDS))
    if unique not in (None, "expected", "found"):
        raise Misuse(Code.BAD_ARGUMENT, f"unique = {unique!r}", '"expected", "found" or None')
