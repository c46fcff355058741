"""The books of all nodes, read together: what was broken, what still waits, and how much flowed when."""

from escrowmq_lab.chaos.check.compare import check, tell
from escrowmq_lab.chaos.check.flow import Flow, read_flow
from escrowmq_lab.chaos.check.reading import Engines, rows_in
from escrowmq_lab.chaos.check.waiting import Waiting

__all__ = ["Engines", "Flow", "Waiting", "check", "read_flow", "rows_in", "tell"]
