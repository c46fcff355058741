"""Reads, which change nothing: topics and system views, deliveries, look-ups."""
