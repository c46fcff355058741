"""A broker as a process: the Flight service, HTTP for metrics and health, the signals that end it."""
