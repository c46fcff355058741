"""The books of all nodes read together: broken promises, pending effects, and the flow over time."""

from escrowmq_lab.chaos.check.compare import check, describe_ids
from escrowmq_lab.chaos.check.flow import Flow, read_flow
from escrowmq_lab.chaos.check.reading import Engines, rows_in
from escrowmq_lab.chaos.check.waiting import Waiting

__all__ = ["Engines", "Flow", "Waiting", "check", "describe_ids", "read_flow", "rows_in"]
