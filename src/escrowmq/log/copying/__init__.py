"""Copies of a log that is in use: of which files they are made, and whether what came is whole."""
