"""Entry point of ``python -m escrowmq_lab``."""

from escrowmq_lab.cli.main import main

if __name__ == "__main__":
    main()
