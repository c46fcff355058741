"""The command ``escrowmq``, one subcommand per file, built only on the public client API."""
