"""The jobs as one program for spark-submit: ``spark-submit --master ... "$(python -m escrowmq.cli.submit)" audit
FOLDER``.

What follows the program is what follows ``escrowmq``: ``audit``, ``reconcile``, ``sweep`` or ``report`` and its
options, with the same exit codes. The session is the one that was submitted, so the cluster is named to spark-submit.
Without words it prints where it is.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command that is named, or print this file's path."""
    here = Path(__file__).resolve()
    if len(sys.argv) == 1:
        print(here)
        return
    # Python looks first in the folder of the program that it runs; our modules there must not be found as top-level
    # ones
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != here.parent]
    from escrowmq.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
