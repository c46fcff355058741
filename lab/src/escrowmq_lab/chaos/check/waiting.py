"""Business rows without an effect, polled while a run settles; each poll reads only the missing ids."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from escrowmq_lab.chaos.books import business, effects
from escrowmq_lab.chaos.check.reading import STRINGS, Engines, ids_in, known, rows_in, without
from escrowmq_lab.chaos.modes import Mode
from escrowmq_lab.databases import snapshot

FEW = 4_000
"""Maximum number of missing ids of a mode that are searched one by one; for more, all effects of the mode are read."""


class Waiting:
    """Business rows without an effect, by id. Not thread-safe; errors are SQLAlchemy's. Effects are searched by id and
    not from the last row number on: numbers are assigned before a transaction commits, so a lower one can appear
    later."""

    def __init__(self, producers: Engines, consumers: Engines, modes: Iterable[type[Mode]]) -> None:
        self._producers, self._consumers = producers, consumers
        self._missing = {mode.name: pa.chunked_array([], STRINGS) for mode in modes}
        self._business = -1

    def look(self) -> dict[str, int]:
        """Return the number of business rows of each mode without an effect."""
        rows = 0
        for engine in self._producers.values():
            with snapshot(engine) as connection:
                rows += rows_in(connection, business)
        for mode, missing in self._missing.items():
            if rows != self._business:  # rows are only ever added
                missing = ids_in(self._producers, business, mode)
                self._missing[mode] = without(missing, ids_in(self._consumers, effects, mode))
            elif len(missing) > FEW:
                self._missing[mode] = without(missing, ids_in(self._consumers, effects, mode))
            elif len(missing):
                found = known(self._consumers, effects, missing.to_pylist(), "id", "mode")
                found_ids = {row.id for _, row in found if row.mode == mode}
                self._missing[mode] = without(missing, pa.chunked_array([sorted(found_ids)], STRINGS))
        self._business = rows
        return {mode: len(missing) for mode, missing in self._missing.items()}

    def named(self, mode: str, most: int = 10) -> list[str]:
        """Return some ids that were missing at the last poll."""
        ids: list[str] = self._missing[mode].slice(0, most).to_pylist()
        return ids
