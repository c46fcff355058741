"""Bulk operations on a frozen selection: preview, dry run, then runs in resumable steps.

::

    from escrowmq.plans import Plans, Ramp

    plans = Plans()                                            # the operator's folder
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart", "cause": "timeout"}, why="the shop is back")
    plans.dry_run(plan.id, bus).by_outcome                     # {"done": 990, "already": 10}
    plans.run(plan.id, bus, ramp=Ramp((1, 10, 100), pause=30), rate=500, stop_after="5%").outcomes

See docs/plans.md.
"""

from escrowmq.plans.folder import Plans, default_folder
from escrowmq.plans.outcomes import Counts, Outcome, Sample
from escrowmq.plans.plan import Plan
from escrowmq.plans.ramp import Ramp, StopAfter
from escrowmq.plans.running import Report
from escrowmq.plans.subjects import ACTS, is_of_database

__all__ = [
    "ACTS",
    "Counts",
    "Outcome",
    "Plan",
    "Plans",
    "Ramp",
    "Report",
    "Sample",
    "StopAfter",
    "default_folder",
    "is_of_database",
]
