"""Shrinking of a failing run: leaves out faults and operations while the same kind of violation remains."""

from __future__ import annotations

from collections.abc import Callable

from escrowmq_lab.simulation.plan import Plan
from escrowmq_lab.simulation.run import Result, Run

MOST_RUNS = 200


def shrink(
    plan: Plan, result: Result, on_progress: Callable[[str], None] = lambda line: None, most: int = MOST_RUNS
) -> set[str]:
    """Return the names that can be left out of a plan whose run gave ``result``. Runs it at most ``most`` times. It
    tries halves, then quarters, and so on down to single parts; omitted parts stay omitted."""
    wanted = {violation.what for violation in result.violations}
    left_out: set[str] = set()
    runs = 0

    def fails(names: set[str]) -> bool:
        found = Run(plan.without(names)).result()
        return bool(wanted & {violation.what for violation in found.violations})

    size = len(plan.names())
    while size >= 1 and runs < most:
        smaller = False
        names = [name for name in plan.names() if name not in left_out]
        for start in range(0, len(names), size):
            if runs >= most:
                break
            part = set(names[start : start + size])
            runs += 1
            if part and fails(left_out | part):
                left_out |= part
                smaller = True
                on_progress(f"{len(plan.names()) - len(left_out)} of {len(plan.names())} things are left")
        if not smaller or size > 1:
            size //= 2
    return left_out
