"""Interface of a kind of rows for plans, with one implementation per kind; all are ordinary clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, Misuse
from escrowmq.plans.outcomes import Outcomes
from escrowmq.settings import nearest


class Subject(Protocol):
    """The rows of one act. A batch has rows of one place (column ``place``), in the order of :meth:`pages`."""

    act: str
    schema: pa.Schema
    identity: Sequence[str]
    """Columns that identify a row and guard it against changes: the digest covers these."""
    most: int
    """Maximum number of rows of one act."""
    counted: Sequence[str]
    """Columns whose values a plan counts."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Arguments of the act besides the rows; part of the digest."""

    @property
    def source(self) -> str:
        """Addresses of the rows, without passwords."""

    def missing(self) -> list[Missing]:
        """Return the places that do not respond now."""

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that match now, of all responding places, in batches of one place and in bounded memory."""

    def not_found(self) -> list[str]:
        """Return the requested ids without a row; call it after :meth:`pages`."""

    def preview(self, rows: pa.RecordBatch) -> Outcomes:
        """Predict the outcome of each row. Changes nothing."""

    def mark(self) -> dict[str, int]:
        """Return the number of the last recorded act by place."""

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        """Apply the act to a batch, as one recorded act. Raises NOT_APPLIED errors if nothing was done, else it is
        unknown."""

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        """Return the recorded outcomes of a batch whose ``why`` began with ``token``; NONE for rows certainly not done.
        Raises Unknown while that cannot be determined."""

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        """Return the number of these rows, all done, that have failed again since."""


def check_selection(selection: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the given fields of a selection. Raises Misuse(BAD_ARGUMENT) for an invalid name or type."""
    chosen: dict[str, Any] = {}
    for name, value in selection.items():
        if value is None:
            continue
        if name not in known:
            raise Misuse(Code.BAD_ARGUMENT, f"unknown selection field {name!r:.50}", nearest(name, list(known)))
        if isinstance(value, bool) or not isinstance(value, known[name]):
            raise Misuse(Code.BAD_ARGUMENT, f"{value!r:.100} is not a value for {name!r}")
        chosen[name] = value
    return chosen


def check_ids(given: Any) -> frozenset[str] | None:
    """Return the ids of a selection as texts; None if it has none."""
    if given is None:
        return None
    if len(given) > MOST_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(given):,} ids; a plan takes at most {MOST_IDS:,}", "make several plans")
    if wrong := [one for one in given if not isinstance(one, str)]:
        raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]!r:.100} is not an id")
    return frozenset(given)


MOST_IDS = 1_000_000
"""Maximum number of ids in a selection; they are held in memory while the plan is made."""
