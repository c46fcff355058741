"""The audit: do the producer's database, the broker's log and every consumer's database hold the same, by id and content?"""

from escrowmq.pipeline.audit.run import run
from escrowmq.pipeline.audit.verdict import Finding, Verdict

__all__ = ["Finding", "Verdict", "run"]
