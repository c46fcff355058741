"""Pending work, grouped by its cause: at the brokers, and in the databases."""
