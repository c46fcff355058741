"""Operator actions: records in a chain of hashes, written before an action runs, and never changed afterwards."""

from escrowmq.acts.chain import Break, Record
from escrowmq.acts.journal import Done, Journal, Listed

__all__ = ["Break", "Done", "Journal", "Listed", "Record"]
