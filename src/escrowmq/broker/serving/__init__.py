"""A broker as a process: the server of all connections, HTTP for metrics and health, the signals that end it."""
