"""The commit log on one partition of Kafka: what its records are, which of them count, and how they are sent and read."""
