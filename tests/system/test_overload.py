"""More than a broker can take of everything at once: it keeps to its bounds, says so, and serves who is polite."""

from __future__ import annotations

from typing import Any

import pytest
from overload import Load, overload

SHORT = Load(
    seconds=2.0,
    crowd=300,
    readers=12,
    hoarders=2,
    flooders=((3, 8, 16 << 10), (1, 64, 16 << 10)),
    pause=0.02,
    stall=250.0,
    settings={
        **Load().settings,
        "max_held_bytes": 64 << 20,
        "max_waiting_bytes": 32 << 20,
        "max_connections": 128,
    },
)
ROUNDS = 8
"""Rounds of the writer that a polite send sees: two that have begun, its own, those that the questions before and after
it take, and a margin; in order of arrival it would be the rounds of all that waits before it, dozens.
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One short run."""
    return overload(SHORT, tmp_path_factory.mktemp("overload"))


def test_under_overload_nothing_acknowledged_is_lost_and_nothing_refused_is_stored(seen: dict[str, Any]) -> None:
    """I35, by id, drained by a healthy consumer afterwards."""
    assert seen["acknowledged"] > 0
    wrong = {name: seen[name] for name in ("lost", "refused and stored", "stored twice", "polite lost", "exit")}
    assert not any(wrong.values()), wrong


def test_under_overload_every_refusal_is_overloaded(seen: dict[str, Any]) -> None:
    """I35"""
    assert "Overloaded.QUEUE_FULL" in seen["codes"], "it was no overload"
    assert {code.partition(".")[0] for code in seen["codes"]} <= {"Done", "Overloaded"}


def test_under_overload_who_is_polite_is_served_within_a_few_rounds(seen: dict[str, Any]) -> None:
    """I35: sends, decisions, acknowledgements, check-backs and questions go on; none is refused."""
    assert seen["polite problems"] == {}
    assert seen["asked"]["count"] > 1
    assert min(seen["polite"][what]["count"] for what in ("send", "prepare", "commit", "ack", "health")) > 0
    assert seen["rounds of a send"]["median"] <= ROUNDS


def test_under_overload_memory_and_descriptors_stay_within_their_bounds(seen: dict[str, Any]) -> None:
    """I35: see docs/bounds.md."""
    assert seen["most memory"] - seen["memory"] <= SHORT.memory
    assert seen["most descriptors"] <= SHORT.descriptors
    assert seen["crowd"]["closed"] > 0
