"""``python -m escrowmq`` is the command ``escrowmq``."""

from escrowmq.cli.main import main

main()
