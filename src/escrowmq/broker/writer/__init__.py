"""The one writer of a shard: rounds, the step in which ledger and log meet, check-back, upkeep."""
