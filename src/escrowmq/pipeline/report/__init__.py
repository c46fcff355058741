"""The report: an HTML page with charts of messages, decision times and open transactions."""

from escrowmq.pipeline.report.measures import Report
from escrowmq.pipeline.report.page import write_report
from escrowmq.pipeline.report.run import report

__all__ = ["Report", "report", "write_report"]
