"""Time as this process has it, for limits of how long something may take: while the machine has no time for us, none
passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.01


class Ticks:
    """Counts from :meth:`start` on: a thread that does little else."""

    def __init__(self) -> None:
        self._count = 0
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._tick, name="ticks", daemon=True)

    def _tick(self) -> None:
        while not self._over.wait(TICK):
            self._count += 1

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self._over.set()
        self.thread.join()

    @property
    def seconds(self) -> float:
        """Since the start, as this process had them."""
        return self._count * TICK


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes less."""
    ticks = Ticks()
    ticks.start()
    try:
        yield
    finally:
        ticks.stop()
    assert ticks.seconds < seconds
