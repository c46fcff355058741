"""Reconcile: finds ids with a half message but no commit, as a batch or a stream, by id and content."""

from escrowmq.pipeline.reconcile.frames import differing, findings, missing, tally, unexpected
from escrowmq.pipeline.reconcile.reading import IDS, Side, read_side
from escrowmq.pipeline.reconcile.report import Finding, Report, reconcile
from escrowmq.pipeline.reconcile.streaming import settled, start, stream_findings

__all__ = [
    "IDS",
    "Finding",
    "Report",
    "Side",
    "differing",
    "findings",
    "missing",
    "read_side",
    "reconcile",
    "settled",
    "start",
    "stream_findings",
    "tally",
    "unexpected",
]
