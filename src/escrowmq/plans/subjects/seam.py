"""The interface of a kind of rows. One implementation a kind; all of them are clients like any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, Misuse
from escrowmq.plans.outcomes import Outcomes
from escrowmq.settings import nearest


class Subject(Protocol):
    """The rows of one act. A batch has rows of one place (column ``place``), in the order in which :meth:`pages` gave
    them."""

    act: str
    schema: pa.Schema
    identity: Sequence[str]
    """The columns that name a row and guard it: the digest is over these."""
    most: int
    """Rows of one act at most."""
    counted: Sequence[str]
    """The columns of which a plan says how many rows have which value."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the act is done with, besides the rows; part of the digest."""
        ...

    @property
    def source(self) -> str:
        """Where the rows live, without passwords."""
        ...

    def missing(self) -> list[Missing]:
        """Return the places that do not answer now."""
        ...

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the chosen rows as they are now, of all places that answer; batches of one place, in bounded memory."""
        ...

    def not_found(self) -> list[str]:
        """After :meth:`pages`: the ids that were asked for and are not there."""
        ...

    def look(self, rows: pa.RecordBatch) -> Outcomes:
        """Return what would happen to each row now. Changes nothing."""
        ...

    def mark(self) -> dict[str, int]:
        """By place: where its record of acts ends now."""
        ...

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        """Do the act to a batch, as one act of the record. Raises NOT_APPLIED errors if surely nothing was done, others
        if nobody knows."""
        ...

    def became(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        """Return the recorded results of a batch whose ``why`` began with ``token``; NONE for rows to which surely
        nothing was done.

        Raises Unknown if it cannot tell yet.
        """
        ...

    def failed_again(self, rows: pa.RecordBatch) -> int:
        """Return how many of these rows, which were done, have failed anew since."""
        ...


def checked_selection(selection: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Check the fields of a selection, each of its type. Raises Misuse(BAD_ARGUMENT) for a name or a value that is
    none."""
    chosen: dict[str, Any] = {}
    for name, value in selection.items():
        if value is None:
            continue
        if name not in known:
            raise Misuse(Code.BAD_ARGUMENT, f"nothing is selected by {name!r:.50}", nearest(name, list(known)))
        if isinstance(value, bool) or not isinstance(value, known[name]):
            raise Misuse(Code.BAD_ARGUMENT, f"{value!r:.100} is nothing to select by {name!r}")
        chosen[name] = value
    return chosen


def checked_ids(given: Any) -> frozenset[str] | None:
    """Return the ids of a selection, as texts; None: it names none."""
    if given is None:
        return None
    if len(given) > MOST_IDS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(given):,} ids; a plan takes at most {MOST_IDS:,}", "make several plans")
    if wrong := [one for one in given if not isinstance(one, str)]:
        raise Misuse(Code.BAD_ARGUMENT, f"{wrong[0]!r:.100} is no id")
    return frozenset(given)


MOST_IDS = 1_000_000
"""Ids that a selection names one by one: they are held in memory while the plan is made."""
