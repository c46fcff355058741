"""The checker of examples/cart/compensated finds each way in which a run can be wrong."""

from __future__ import annotations

import compensated_check as check
import pytest

PLACED = {"o-1": "ann", "o-2": "bob"}


def effects(*orders: str, made_by: str = "message") -> list[check.Effect]:
    return [check.Effect(order, PLACED.get(order, "eve"), made_by) for order in orders]


def test_one_effect_for_each_order_is_right_whoever_made_it() -> None:
    assert check.wrong(PLACED, [*effects("o-2"), *effects("o-1", made_by="scheduler")]) == []


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (effects("o-1"), "order o-2 is placed and has no effect"),
        (effects("o-1", "o-2", "o-1"), "order o-1 has its effect 2 times"),
        (effects("o-1", "o-2", "o-3"), "order o-3 was never placed and has an effect"),
        ([*effects("o-1"), check.Effect("o-2", "eve", "message")], "order o-2 of bob has the effect of eve"),
    ],
    ids=["lost", "repeated", "leaked", "altered"],
)
def test_each_anomaly_is_named(seen: list[check.Effect], problem: str) -> None:
    assert check.wrong(PLACED, seen) == [problem]


def test_a_lost_and_a_repeated_one_do_not_cancel_out() -> None:
    assert check.wrong(PLACED, effects("o-1", "o-1")) == [
        "order o-1 has its effect 2 times",
        "order o-2 is placed and has no effect",
    ]
