"""Targets of a relay: EscrowMQ, Kafka, RabbitMQ, Redis Streams; each behind the contract of ``seam.py``."""
