"""The jobs as one program for spark-submit: ``spark-submit --master ... "$(python -m escrowmq.cli.submit)" audit
FOLDER``. The arguments are those of ``escrowmq``: ``audit``, ``reconcile``, ``sweep`` or ``report`` and options, with
the same exit codes. The session is the submitted one, so name the cluster to spark-submit. Without arguments it prints
its path."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the named command, or print this file's path."""
    here = Path(__file__).resolve()
    if len(sys.argv) == 1:
        print(here)
        return
    # Python searches the folder of the program first; its modules must not be importable as top-level ones.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != here.parent]
    from escrowmq.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
