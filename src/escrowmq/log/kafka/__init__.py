"""The commit log on one partition of Kafka: its records, which of them count, and how they are sent and read."""
