"""Entry point of ``python -m escrowmq``: the same as the command ``escrowmq``."""

from escrowmq.cli.main import main

main()
