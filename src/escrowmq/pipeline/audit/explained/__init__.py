"""Explanations of findings: their reasons, and the columns that differ."""
