"""``escrowmq`` on a disk whose syncs take longer: ``python slow_disk.py MILLISECONDS serve -d FOLDER ...``.

Each sync of a file is a real one, and takes at least so long: with it a machine with a fast disk shows how a broker
does on another one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from escrowmq.cli.main import main


def slowed(sync: Callable[[int], None], seconds: float) -> Callable[[int], None]:
    """``sync`` that takes ``seconds`` at least; other threads run meanwhile, as they do while a disk is waited for."""

    def slow(descriptor: int) -> None:
        begun = time.monotonic()
        sync(descriptor)
        time.sleep(max(begun + seconds - time.monotonic(), 0.0))

    return slow


if __name__ == "__main__":
    seconds = float(sys.argv.pop(1)) / 1e3
    os.fsync, os.fdatasync = slowed(os.fsync, seconds), slowed(os.fdatasync, seconds)
    main()
