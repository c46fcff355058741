"""The single writer of a shard: its request queue, ledger and log updates, check-back and maintenance."""
