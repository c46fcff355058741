"""The Spark data source "escrow": batch and streaming reads of topics and system views, writers that are exactly once."""
