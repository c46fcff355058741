"""Fake Kafka for tests of the log on a partition."""

from escrowmq.testing.partitions.memory import MemoryKafka, MemoryPartition, MemoryPartitions, MemoryTopic

__all__ = ["MemoryKafka", "MemoryPartition", "MemoryPartitions", "MemoryTopic"]
