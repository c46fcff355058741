"""Topics and their queues: which log row stands at which offset, and which message still waits for its time."""
