"""Consumers: receives ahead of the caller, deliveries, acknowledgements, named members."""
