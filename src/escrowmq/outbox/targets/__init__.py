"""Where a relay can send to: EscrowMQ, Kafka, RabbitMQ, Redis Streams; each behind the contract of ``seam.py``."""
