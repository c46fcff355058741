"""Consumers: prefetched receives, deliveries, acknowledgements, named group members."""
