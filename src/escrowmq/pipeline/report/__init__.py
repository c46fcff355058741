"""The report: what a broker or a data folder holds, how fast it decides, what waits, and where it is going; a page with pictures."""

from escrowmq.pipeline.report.run import Report, report

__all__ = ["Report", "report"]
