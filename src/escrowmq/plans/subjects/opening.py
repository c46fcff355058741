"""The operations of plans, and the kind of rows of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Misuse
from escrowmq.plans.subjects import databases, dead_letters, transactions
from escrowmq.plans.subjects.seam import Subject
from escrowmq.settings import nearest

Where: TypeAlias = Bus | Any
"""Where the rows of a plan live: a bus, or the engine of a database."""

_KINDS: tuple[tuple[tuple[str, ...], Callable[..., Subject]], ...] = (
    (dead_letters.ACTS, dead_letters.DeadLetters),
    (transactions.ACTS, transactions.Transactions),
    (databases.ACTS, databases.DatabaseRows),
)
ACTS = tuple(act for acts, _ in _KINDS for act in acts)
"""The acts that a plan can have."""


def opened(where: Where, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> Subject:
    """Return the rows of an act; ``patient``: it waits by itself for a broker that is away. Raises
    Misuse(BAD_ARGUMENT) for an act or a selection
    that is none."""
    for acts, kind in _KINDS:
        if act in acts:
            if isinstance(where, Bus) == is_of_database(act):
                wanted = "a database: give its engine" if is_of_database(act) else "a broker: give a bus"
                raise Misuse(Code.BAD_ARGUMENT, f"{act} acts on rows of {wanted}")
            return kind(where, act, selection, patient=patient)
    hint = nearest(act, list(ACTS)) or f"one of {', '.join(ACTS)}"
    raise Misuse(Code.BAD_ARGUMENT, f"{act!r:.50} is no act of a plan", hint)


def is_of_database(act: str) -> bool:
    """Return whether an act is about rows of a database."""
    return act in databases.ACTS
