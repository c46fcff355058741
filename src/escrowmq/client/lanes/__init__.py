"""Lanes: combine the calls of many threads or tasks into batches and return each caller its own answer."""
