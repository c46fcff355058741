"""Data structures of the ledger: growing and sparse arrays, a due-time index, the key hash, integer codes."""
