"""A broker as one of several nodes of a shard: it follows the log of the one that leads, takes over when that falls
silent, and follows again when fenced.
"""
