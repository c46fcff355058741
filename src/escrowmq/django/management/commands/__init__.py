"""Commands: relay, worker, purge."""
