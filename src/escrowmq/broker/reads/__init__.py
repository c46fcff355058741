"""What is read without changing anything: topics and system views, deliveries, look-ups."""
