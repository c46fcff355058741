"""The command ``escrowmq``, one command a file; it uses the client's public faces like anyone else."""
