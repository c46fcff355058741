"""How long a node that follows asks clients to leave it alone, when many ask it who leads. Pure: its caller tells the time.

A client without a leader asks some times a second. A few thousand of them would keep the very node busy that is about to lead. So each ``hello`` of a node
that follows says after how many milliseconds it may be asked again: as long as it takes that all who ask come to ``ASKS_PER_SECOND`` together. How many
they are follows from how often it was asked in the last second, and how long it had told them to wait.
"""

from __future__ import annotations

ASKS_PER_SECOND = 500.0
USUAL_SECONDS = 0.15
"""Between two looks of a client that nobody has told anything; what is shorter need not be said."""
LONGEST_SECONDS = 5.0


class Asked:
    """The count of one node, for calls from one thread at a time. Times are seconds of a clock that only goes forward."""

    def __init__(self) -> None:
        self._second, self._count = -1.0, 0
        self._told = USUAL_SECONDS

    def again_ms(self, now: float) -> int:
        """It is asked once more: when this client may ask again; 0: when it likes."""
        if now - self._second >= 1.0:
            self._settle(self._count / max(now - self._second, 1.0) if self._second >= 0 else 0.0)
            self._second, self._count = now, 0
        self._count += 1
        if self._count > ASKS_PER_SECOND:  # within this second already
            self._settle(float(self._count))
        return round(self._told * 1000) if self._told > USUAL_SECONDS else 0

    def _settle(self, rate: float) -> None:
        wanted = max(USUAL_SECONDS, min(self._told * rate / ASKS_PER_SECOND, LONGEST_SECONDS))
        self._told = max(wanted, self._told / 2)  # down by steps: those who were told to wait long have not come yet
