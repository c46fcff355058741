"""Access to a real Kafka, and the settings of a topic that can be a log. Only ``confluent.py`` imports
Kafka's client.
"""
