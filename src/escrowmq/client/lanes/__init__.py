"""Lanes: how the calls of many threads or tasks become batches, and how callers wait for their own answers."""
