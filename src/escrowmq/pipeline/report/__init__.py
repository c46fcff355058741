"""The report: what a broker or a data folder holds, how fast it decides, what waits and how that changes; a page with charts."""

from escrowmq.pipeline.report.measures import Report
from escrowmq.pipeline.report.page import write_report
from escrowmq.pipeline.report.run import report

__all__ = ["Report", "report", "write_report"]
