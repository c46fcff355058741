"""Lanes: how the calls of many threads or tasks become batches, and how each caller gets its own answer back."""
