"""Consumer groups: subscriptions, cursors, leases, retries, dead letters, named members."""
