"""Groups the comparisons by source, so that each source is read only once per pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.pipeline.sql.id_windows import NO_ID, find_window
from escrowmq.pipeline.sql.summing import SUMS

_PARTS = 1024
"""Windows by which a database finds the rows of some ids."""
Cell = Callable[[str], Column]
"""Finds a column of a row by its name."""


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a side in one comparison: the expected side, or the side that is compared with it. ``near`` are the
    columns whose values may differ, and by how much (times: in microseconds)."""

    comparison: int
    expected: bool
    columns: tuple[str, ...]
    near: tuple[tuple[str, Decimal], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """One side and its roles. ``where`` selects its rows of the frame (None: all). ``unique``: the caller has checked
    that no id occurs twice."""

    roles: tuple[Role, ...]
    cell: Cell = f.col
    where: Column | None = None
    unique: bool = False

    @property
    def comparisons(self) -> set[int]:
        return {role.comparison for role in self.roles}


SETTLED = "_settled"
"""The column that states whether a row of :class:`Grown` cannot change any more."""
Sums = dict[tuple[int, bool, int], tuple[int, int, int]]
"""By comparison, side (whether it is the expected one) and window: the number of rows, and both sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """A side to which rows are only added. ``read`` returns its rows after the offsets of its topic partitions, with
    their places."""

    sources: tuple[str, ...]
    read: Callable[[Mapping[str, int]], DataFrame]


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """A side whose first rows were summed by an earlier audit (``before``). ``read_fresh`` returns the others, with
    SETTLED. ``keep`` is called with the sums of all settled rows."""

    read_fresh: Callable[[], DataFrame]
    before: Sums
    keep: Callable[[Sums], None]

    def add(self, lines: DataFrame) -> DataFrame:
        """Add to the sums of the fresh rows (``lines``, by SETTLED) those of ``before``; return the sums of all rows,
        in the columns SUMS. Passes the sums of all settled rows to ``keep``."""
        every, settled = dict(self.before), dict(self.before)
        for row in lines.collect():
            at = (row["comparison"], bool(row["expected"]), row["window"])
            for sums in (every, settled) if row[SETTLED] else (every,):
                rows, low, high = sums.get(at, (0, 0, 0))
                sums[at] = (rows + row["rows"], low + row["sum0"], high + row["sum1"])
        self.keep(settled)
        flat = [(number, window, int(side), *values) for (number, side, window), values in every.items()]
        return lines.sparkSession.createDataFrame(flat, SUMS)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A frame that contains one or more sides, so that they are read in one pass. ``read`` returns it, always the same
    one: it is called only if the frame is needed, because Spark plans every source in processes of its own. ``id`` is
    the id of a row, as text.
    ``made`` are expensive columns from which cells are made, such as parsed JSON; they are computed once per row, and
    only for the rows that are needed. ``read_slim`` returns the same rows with only the columns that ``id`` and the
    speakers' ``where`` need.

    The process that reads, or the database, selects the rows of some windows: ``select_windows`` returns them for
    these, their number and kind (portable or not). It also computes the sums of windows for the comparisons in
    ``summed``: ``sum_windows`` returns them for a number and kind of windows, in the columns of
    :func:`escrowmq.pipeline.audit.windows.compare_windows`. Spark computes all others. ``served``: a server computes
    all sums, so hashes must be portable. ``growth`` and ``grown``: see :mod:`escrowmq.pipeline.audit.parts.state`.
    """

    read: Callable[[], DataFrame]
    id: Column
    speakers: tuple[Speaker, ...]
    made: Sequence[Mapping[str, Column]] = ()
    read_slim: Callable[[], DataFrame] | None = None
    sum_windows: Callable[..., DataFrame] | None = None
    summed: Collection[int] = ()
    served: bool = False
    select_windows: Callable[[set[int], int, bool], DataFrame] | None = None
    growth: Growth | None = None
    grown: Grown | None = None

    @property
    def frame(self) -> DataFrame:
        """The rows of all sides."""
        return self.read()

    @property
    def comparisons(self) -> set[int]:
        """The numbers of the comparisons in which a side of this frame has a role."""
        return set().union(*[speaker.comparisons for speaker in self.speakers])

    def open(self, frame: DataFrame) -> DataFrame:
        """Return ``frame``, some rows of this one, with the expensive columns of ``made`` added, such as parsed
        JSON."""
        return reduce(lambda made, columns: made.withColumns(dict(columns)), self.made, frame)

    def select_ids(self, ids: Collection[str]) -> DataFrame:
        """Return the rows of the frame that have one of these ids. A source that selects windows reads only those of
        the ids."""
        frame = self.frame
        if self.select_windows is not None:
            some = {find_window(id, _PARTS, self.served) for id in ids}  # the other hash is cheaper
            frame = self.select_windows(some, _PARTS, self.served)
        return frame.where(self.known_id.isin(list(ids)))

    @property
    def known_id(self) -> Column:
        """The id, or NO_ID for a null."""
        return f.coalesce(self.id, f.lit(NO_ID))

    def map_roles(self, what: Callable[[Role, Cell], Column]) -> Column:
        """Call ``what(role, cell)`` for every role of each speaker; return, for a row, the array of its own speaker's
        columns (null for a row of no speaker). A row is read once, even for many comparisons."""
        return self.select_own([[what(role, speaker.cell) for role in speaker.roles] for speaker in self.speakers])

    def select_own(self, values: Sequence[Sequence[Column]]) -> Column:
        """Return, for a row, the array of the ``values`` of its own speaker. ``values``: for each speaker, in order;
        those without values are left out."""
        pairs = [(one.where, f.array(*its)) for one, its in zip(self.speakers, values, strict=True) if its]
        return f.coalesce(*[its if where is None else f.when(where, its) for where, its in pairs])


def once(frame: DataFrame) -> Callable[[], DataFrame]:
    """Return a function that returns a frame, for the field ``read`` of Rows."""
    return lambda: frame


def digest(cells: Sequence[Column], *before: Column) -> Column:
    """Return a 64-bit digest of the content of ``cells`` (int64). Equal content has an equal digest on any machine.
    ``before`` is hashed first. ``xxhash64`` hashes cell by cell, so the borders between texts count. It skips nulls, so
    null flags are hashed as well."""
    if not cells and not before:
        return f.lit(0).cast("bigint")
    return f.xxhash64(*before, *cells, *[cell.isNull() for cell in cells])


def portable_digest(id: Column, cells: Sequence[Column]) -> Column:
    """Return the 64-bit digest of a row that SQL can compute, too: see :func:`escrowmq.pipeline.sql.texts.digest`."""
    marked = [
        f.coalesce(f.concat(f.octet_length(text).cast("string"), f.lit(":"), text.cast("string")), f.lit("N"))
        for text in (id, *cells)
    ]
    return f.conv(f.substring(f.md5(f.concat(*marked)), 1, 16), 16, -10).cast("bigint")


def portable_hash(id: Column) -> Column:
    """Return the hash of an id that SQL can compute, too: see :func:`escrowmq.pipeline.sql.texts.window`."""
    return f.conv(f.substring(f.md5(id), 1, 15), 16, 10).cast("bigint")
