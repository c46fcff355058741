"""Half messages that left the log undecided: remembered for a while, so that late requests learn that they
EXPIRED.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Bools, Columns, Int64s, locate

MAX_EXPIRED = 1 << 20
"""Half messages remembered that left the log undecided, 20 MiB at most; beyond, the oldest are forgotten. A weekend's
are still there.
"""

_COLUMNS = {"position": np.int64, "first": np.int64, "epoch": np.uint32}


class LeftUndecided:
    """Their positions, the positions at which their transactions began, and the sessions of these."""

    def __init__(self) -> None:
        self._rows = Columns(_COLUMNS)

    def add(self, positions: Int64s, firsts: Int64s, epochs: npt.NDArray[np.uint32]) -> None:
        """Remember these, too."""
        columns = [
            np.concatenate([self._rows[name], new])
            for name, new in zip(_COLUMNS, (positions, firsts, epochs), strict=True)
        ]
        order = np.argsort(columns[0], kind="stable")[-MAX_EXPIRED:]
        self._rows = Columns(_COLUMNS)
        self._rows.extend(len(order), **{name: c[order] for name, c in zip(_COLUMNS, columns, strict=True)})

    def holds(self, positions: Int64s) -> Bools:
        """Return which half messages are among them."""
        return np.asarray(locate(self._rows["position"], positions) >= 0, bool)

    def begin_with(self, raw: npt.NDArray[Any]) -> Bools:
        """Return which transaction ids (as of ``TRANSACTION_ID_DTYPE``) name the first message of one."""
        if not len(raw) or not len(self._rows):
            return np.zeros(len(raw), bool)
        at = locate(self._rows["position"], raw["position"].astype(np.int64))
        same = self._rows["epoch"][at] == raw["epoch"]
        same &= self._rows["first"][at] == self._rows["position"][at]
        return np.asarray((at >= 0) & same, bool)

    def to_table(self) -> pa.Table:
        """They, as a copy."""
        return self._rows.to_table()

    def load(self, table: pa.Table) -> None:
        """Become what :meth:`to_table` gave."""
        self._rows.load(table)
