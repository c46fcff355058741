"""The Spark data source "escrow": batch and streaming reads of topics and system views, exactly-once writers."""
