"""The audit: a comparison of the producer's database, the log and every consumer's database by id and content.

:func:`run` audits a run folder; :func:`compare` is for any two DataFrames.
"""

from escrowmq.pipeline.audit.comparing import Compared, compare
from escrowmq.pipeline.audit.delivered import delivered_to
from escrowmq.pipeline.audit.run import run
from escrowmq.pipeline.audit.verdict import Finding, Verdict

__all__ = ["Compared", "Finding", "Verdict", "compare", "delivered_to", "run"]
