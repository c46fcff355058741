"""What became of one message, over brokers and databases. ``timeline.py`` puts together what the others find and say."""
