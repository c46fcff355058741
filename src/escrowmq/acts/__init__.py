"""What operators did: records in a chain of hashes, written before an act is done, and never changed afterwards."""

from escrowmq.acts.chain import Break, Record
from escrowmq.acts.journal import Done, Journal, Listed

__all__ = ["Break", "Done", "Journal", "Listed", "Record"]
