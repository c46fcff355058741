"""The pause that a standby asks of clients when many probe it. Pure: its caller tells the
time.

A client without a leader asks some times a second. A few thousand of them would keep the very node busy that is about
to lead. So each ``hello`` of a node that follows gives out the next free place in a line that moves ``ASKS_PER_SECOND``
places a second, and says after how many milliseconds that one comes.
"""

from __future__ import annotations

ASKS_PER_SECOND = 500.0
USUAL_SECONDS = 0.15  # probe interval of clients (ms) without advice; shorter ones need no advice
LONGEST_SECONDS = 5.0  # whoever comes behind the end of the line shares its last places


class Asked:
    """The waiting line of one node, for calls from one thread at a time. Times: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._free = 0.0  # when the next free place comes

    def again_ms(self, now: float) -> int:
        """Count one more request. Returns when this client may ask again (ms); 0: at any time."""
        self._free = min(max(self._free, now) + 1 / ASKS_PER_SECOND, now + LONGEST_SECONDS)
        ahead = self._free - now
        return round(ahead * 1000) if ahead > USUAL_SECONDS else 0
