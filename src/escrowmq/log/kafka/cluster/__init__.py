"""Access to a real Kafka, and the topic settings that a log needs. Only ``confluent.py`` imports Kafka's client."""
