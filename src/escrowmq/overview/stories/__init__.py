"""The history of one message, over brokers and databases. ``timeline.py`` joins the results of the other modules."""
