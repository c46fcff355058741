"""Operator actions: records in a hash chain, written before an act is applied, and never changed afterwards."""

from escrowmq.acts.chain import Break, Record
from escrowmq.acts.journal import Done, Journal, Listed

__all__ = ["Break", "Done", "Journal", "Listed", "Record"]
