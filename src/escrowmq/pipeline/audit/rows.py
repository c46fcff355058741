"""Groups the comparisons by source, so that each source is read only once per pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

NO_ID = "(no id)"

Cell = Callable[[str], Column]
"""Finds a column of a row by its name."""


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a side in one comparison: the expected side, or the side that is compared with it."""

    comparison: int
    expected: bool
    columns: tuple[str, ...]


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


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A frame that contains one or more sides, so that they are read in one pass. ``id`` is the id of a row, as text.
    ``made`` are expensive columns from which cells are made, such as parsed JSON; they are computed once per row, and
    only for the rows that are needed. ``slim`` has the same rows with only the columns that ``id`` and the speakers'
    ``where`` need."""

    frame: DataFrame
    id: Column
    speakers: tuple[Speaker, ...]
    made: Mapping[str, Column] = field(default_factory=dict)
    slim: DataFrame | None = None

    @property
    def comparisons(self) -> set[int]:
        """The comparisons in which a side of this frame has a role."""
        return set().union(*[speaker.comparisons for speaker in self.speakers])

    def open(self, frame: DataFrame) -> DataFrame:
        """Return ``frame``, some rows of this one, with the expensive columns of ``made`` added, such as parsed
        JSON."""
        return frame.withColumns(dict(self.made)) if self.made else frame

    @property
    def known_id(self) -> Column:
        """The id, or NO_ID for a null."""
        return f.coalesce(self.id, f.lit(NO_ID))

    def map_roles(self, what: Callable[[Role, Cell], Column]) -> Column:
        """Return an array of ``what`` for every role of a row; null for a row of no side. A row is read once, even for
        many comparisons."""
        return self.select_own([[what(role, speaker.cell) for role in speaker.roles] for speaker in self.speakers])

    def select_own(self, values: Sequence[Sequence[Column]]) -> Column:
        """Return an array of the values of a row's own speaker."""
        pairs = [(one.where, f.array(*its)) for one, its in zip(self.speakers, values, strict=True) if its]
        return f.coalesce(*[its if where is None else f.when(where, its) for where, its in pairs])


def digest(cells: Sequence[Column], *before: Column) -> Column:
    """Return a 64-bit digest of the content of ``cells`` (int64). Equal content has an equal digest on any machine.
    ``before`` is hashed first. ``xxhash64`` hashes cell by cell, so the borders between texts count. It skips nulls, so
    null flags are hashed as well."""
    if not cells and not before:
        return f.lit(0).cast("bigint")
    return f.xxhash64(*before, *cells, *[cell.isNull() for cell in cells])
