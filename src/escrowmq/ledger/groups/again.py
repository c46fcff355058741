"""Offset ranges to redeliver after a reset: runs of offsets, none of them delivered yet, that members of the group were
given before.

A reset makes settled messages wait again, as if nobody had ever had them. That somebody had is not forgotten: these
runs say it, so that they are delivered as repeats (I23). They cost memory by runs, not by messages: at most
:data:`MAX_RUNS` of a queue; beyond, the closest are taken for one, and what lies between is called a repeat, too,
though it is none.
"""

from __future__ import annotations

import numpy as np

from escrowmq.ledger.columns.arrays import Int32s, Int64s, UInt8s

MAX_RUNS = 1024
"""Runs of one queue."""
HANDED_OUT, NOT, EITHER = 1, 0, 2
"""Of offsets: members were given them, or not, or it does not matter: the tags exclude them, and they join what is
around.
"""

_NONE: Int64s = np.empty(0, np.int64)


class Again:
    """Runs ``starts[n]`` .. ``ends[n]``-1, rising, none touching the next. Never changed but by :meth:`trim`."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Int64s = _NONE, ends: Int64s = _NONE) -> None:
        apart = starts[1:] - ends[:-1]
        if len(starts) > MAX_RUNS:
            widest = np.argsort(-apart, kind="stable")[: MAX_RUNS - 1]
            kept = np.zeros(len(apart), bool)
            kept[widest] = True
        else:
            kept = apart > 0
        self.starts = starts[np.append(True, kept)] if len(starts) else _NONE
        self.ends = ends[np.append(kept, True)] if len(starts) else _NONE

    def __len__(self) -> int:
        return len(self.starts)

    def trim(self, first: int) -> None:
        """Forget offsets below ``first``."""
        gone = int(np.searchsorted(self.ends, first, side="right"))
        self.starts, self.ends = np.maximum(self.starts[gone:], first), self.ends[gone:]

    def attempts(self, offsets: Int64s, repeated: int) -> Int32s:
        """Return the attempt of each of the rising ``offsets`` at its next delivery: ``repeated`` of those that
        are redelivered, else 1."""
        if not len(self):
            return np.ones(len(offsets), np.int32)
        at = np.searchsorted(self.starts, offsets, side="right") - 1
        return np.where((at >= 0) & (offsets < self.ends[at]), repeated, 1).astype(np.int32)

    def stretch(self, start: int, end: int) -> tuple[bool, int]:
        """Return whether ``start`` is redelivered, and the first later offset, up to ``end``, where that differs."""
        if not len(self):
            return False, end
        at = int(np.searchsorted(self.ends, start, side="right"))
        if at == len(self):
            return False, end
        if start < int(self.starts[at]):
            return False, min(int(self.starts[at]), end)
        return True, min(int(self.ends[at]), end)


def handed_out(starts: Int64s, kinds: UInt8s, end: int, more: Again) -> Again:
    """Build the record of runs that were handed out: they begin at ``starts``, each of one of the ``kinds`` above,
    the last up to ``end``; and ``more`` from there on."""
    known = kinds != EITHER
    starts, kinds = starts[known], kinds[known]
    ends = np.append(starts[1:], end)[: len(starts)]
    chosen = kinds == HANDED_OUT
    return Again(np.concatenate([starts[chosen], more.starts]), np.concatenate([ends[chosen], more.ends]))
