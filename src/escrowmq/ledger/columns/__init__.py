"""Data structures of the ledger: growing and sparse arrays, a due-time index, integer codes."""
