"""The acts of plans, and their kinds of rows: selection, current state, and acts on batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Misuse
from escrowmq.plans.subjects import databases, dead_letters, transactions
from escrowmq.plans.subjects.seam import Subject
from escrowmq.settings import nearest

Where: TypeAlias = Bus | Any
"""The place of a plan's rows: a bus, or the engine of a database."""

_KINDS: tuple[tuple[tuple[str, ...], Callable[..., Subject]], ...] = (
    (dead_letters.ACTS, dead_letters.DeadLetters),
    (transactions.ACTS, transactions.Transactions),
    (databases.ACTS, databases.DatabaseRows),
)
ACTS = tuple(act for acts, _ in _KINDS for act in acts)
"""All acts of plans."""


def open_subject(where: Where, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> Subject:
    """Open the rows of an act; ``patient``: wait for an unavailable broker. Raises Misuse(BAD_ARGUMENT) for an invalid
    act or selection."""
    for acts, kind in _KINDS:
        if act in acts:
            if isinstance(where, Bus) == is_of_database(act):
                wanted = "a database: give its engine" if is_of_database(act) else "a broker: give a bus"
                raise Misuse(Code.BAD_ARGUMENT, f"{act} acts on rows of {wanted}")
            return kind(where, act, selection, patient=patient)
    hint = nearest(act, list(ACTS)) or f"one of {', '.join(ACTS)}"
    raise Misuse(Code.BAD_ARGUMENT, f"{act!r:.50} is not an act of a plan", hint)


def is_of_database(act: str) -> bool:
    """Decide whether an act changes rows of a database."""
    return act in databases.ACTS
