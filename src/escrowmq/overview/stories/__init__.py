"""The history of one message, over brokers and databases. ``timeline.py`` joins what the other modules find."""
