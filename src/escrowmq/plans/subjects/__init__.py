"""Kinds of rows for plans: selection, current state, and acts on batches."""
