"""Implementations of the two sets: one interface (``seam.py``), for Redis and for SQL databases."""
