"""Stores of the two sets: one contract (``seam.py``), kept by Redis and by SQL databases."""
