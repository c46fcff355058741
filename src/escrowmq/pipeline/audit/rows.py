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
    """The role of a side in one comparison: what must be there (``expected``), or where it must be."""

    comparison: int
    expected: bool
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """One side and its roles. ``where``: the rows of the frame that are of this side (None: all). ``unique``: no id is
    twice in it, which the caller has checked."""

    roles: tuple[Role, ...]
    cell: Cell = f.col
    where: Column | None = None
    unique: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A frame that is read once for all the sides that are in it; ``id`` is the id of a row, as text.

    ``made``: columns that cells are made of and that cost something, such as parsed JSON; they are computed once per
    row, and only for rows that are looked at. ``slim``: the same rows with nothing but what ``id`` and the speakers'
    ``where`` need.
    """

    frame: DataFrame
    id: Column
    speakers: tuple[Speaker, ...]
    made: Mapping[str, Column] = field(default_factory=dict)
    slim: DataFrame | None = None

    def opened(self, frame: DataFrame) -> DataFrame:
        """Return some rows of the frame, with what their cells are made of."""
        return frame.withColumns(dict(self.made)) if self.made else frame

    @property
    def known_id(self) -> Column:
        """The id, with a word for none."""
        return f.coalesce(self.id, f.lit(NO_ID))

    def each(self, what: Callable[[Role, Cell], Column]) -> Column:
        """Return an array of ``what`` for every role that a row is in; null for a row of no side. A row is read once,
        however many
        comparisons it takes part in."""
        return self.of([[what(role, speaker.cell) for role in speaker.roles] for speaker in self.speakers])

    def of(self, values: Sequence[Sequence[Column]]) -> Column:
        """Return an array of the values of a row's own speaker."""
        pairs = zip(self.speakers, values, strict=True)
        arrays = [
            f.array(*its) if speaker.where is None else f.when(speaker.where, f.array(*its))
            for speaker, its in pairs
            if its
        ]
        return f.coalesce(*arrays)


def digest(cells: Sequence[Column], *before: Column) -> Column:
    """64 bits of the content of ``cells`` (int64): equal content, equal digest, on any machine. ``before`` is hashed
    first.

    ``xxhash64`` hashes cell after cell, so borders between texts count; it passes over nulls, so those are hashed as
    flags of their own.
    """
    if not cells and not before:
        return f.lit(0).cast("bigint")
    return f.xxhash64(*before, *cells, *[cell.isNull() for cell in cells])
