"""Copies of a log in use: which files a copy needs, and whether a copy is complete."""
