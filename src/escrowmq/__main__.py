"""The command ``escrowmq``, also as ``python -m escrowmq``. Without the extra ``cli`` it names what to install."""

import sys

from escrowmq.platform.extras import EXTRAS, missing_package


def main() -> None:
    """Run the command line and exit with its code; with 2, wrong use, if its packages are not installed."""
    try:
        from escrowmq.cli.main import main as run
    except ModuleNotFoundError as problem:
        if EXTRAS.get(problem.name or "") != "cli":
            raise
        missing = missing_package(problem.name or "", "the command escrowmq")
        print(f"{missing.code.name}: {missing.message}\nhint: {missing.hint}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
