"""The command ``escrowmq-lab``."""
