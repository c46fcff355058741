"""The report of a chaos run: one page with the faults under the flow of messages, and its numbers."""

from escrowmq_lab.chaos.report.page import write_report
from escrowmq_lab.chaos.report.record import JSON, PAGE, Record

__all__ = ["JSON", "PAGE", "Record", "write_report"]
