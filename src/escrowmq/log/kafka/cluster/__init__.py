"""How is a real Kafka reached, and how must a topic be kept so that it can be a log? Only ``confluent.py`` imports
Kafka's client.
"""
