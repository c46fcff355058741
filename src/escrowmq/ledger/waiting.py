"""Undecided transactions, summed up by producer group and cause, in steps: producers continue between two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from escrowmq.errors import Code, error
from escrowmq.ledger import listings
from escrowmq.ledger.causes import CAUSES, causes_of
from escrowmq.ledger.columns.arrays import Int64s, all_true, locate
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import TransactionState


@dataclass(slots=True)
class _Alike:
    """Transactions of one group that wait for the same reason."""

    state: str
    cause: str
    count: int = 0
    oldest_us: int = 0
    newest_us: int = 0
    least: int = 0
    most: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "cause": self.cause,
            "count": self.count,
            "oldest_us": self.oldest_us,
            "newest_us": self.newest_us,
            "checks": [self.least, self.most],
            "samples": self.samples,
        }


class Waiting:
    """A sum in the making. What is prepared after it was begun is not in it; what is decided between two looks may be,
    or not."""

    def __init__(self, ledger: Ledger, group: str | None, after: int, limit: int, samples: int, now_us: int) -> None:
        """Of the groups with numbers above ``after``, at most ``limit``. Rejected(UNKNOWN_GROUP)."""
        table, only = ledger.transactions, None if group is None else ledger.sessions.ordinal(group)
        if group is not None and only is None:
            raise error(Code.UNKNOWN_GROUP, f"no producer group {group!r}")
        waiting = {number for counts in (table.open, table.parked) for number, count in counts.items() if count}
        self._chosen = sorted(number for number in waiting if number > after and only in (None, number))[:limit]
        self._names = [ledger.sessions.groups.get(number) for number in self._chosen]
        self._alike: list[dict[int, _Alike]] = [{} for _ in self._chosen]
        self._samples, self._now_us = samples, now_us
        self._next, self._end = table.rows.first, table.rows.end

    def look(self, ledger: Ledger) -> bool:
        """Take some more in; whether anything is left."""
        table = ledger.transactions
        if self._chosen:
            rows, self._next = listings.some_rows(ledger, self._next, self._end, listings.UNDECIDED)
            if len(rows):
                self._take(ledger, rows, table.groups_of(rows + table.rows.first))
        return bool(self._chosen) and self._next < self._end

    def _take(self, ledger: Ledger, rows: Int64s, groups: Int64s) -> None:
        table = ledger.transactions
        places = locate(np.array(self._chosen, np.int64), groups)
        if not all_true(mine := places >= 0):
            rows, places = rows[mine], places[mine]
        kinds = (places * len(CAUSES) + causes_of(ledger, rows, self._now_us)).astype(np.uint16)  # sorted in one pass
        rows = rows[np.argsort(kinds, kind="stable")]
        counts = np.bincount(kinds)
        ends = np.cumsum(counts)
        for kind in np.flatnonzero(counts).tolist():
            part = rows[int(ends[kind] - counts[kind]) : int(ends[kind])]
            place, cause = divmod(kind, len(CAUSES))
            oldest_us, newest_us = table.prepared_us(table.rows["first"][part[[0, -1]]]).tolist()
            checks = table.rows["checks"][part]
            least, most = int(checks.min()), int(checks.max())
            one = self._alike[place].get(cause)
            if one is None:
                state = TransactionState(int(table.rows["state"][part[0]])).name.lower()
                one = self._alike[place][cause] = _Alike(state, CAUSES[cause], 0, oldest_us, newest_us, least, most)
            one.count += len(part)
            one.newest_us = newest_us
            one.least, one.most = min(one.least, least), max(one.most, most)
            if len(one.samples) < self._samples:
                few = part[: self._samples - len(one.samples)]
                one.samples += listings.described(ledger, few + table.rows.first)

    def to_json(self) -> list[dict[str, Any]]:
        """Return ``number``, ``group`` and ``causes`` of each group. A cause has ``state, cause, count, oldest_us,
        newest_us, checks`` (least and most), and ``samples``, the oldest."""
        return [
            {"number": number, "group": name, "causes": [causes[cause].to_json() for cause in sorted(causes)]}
            for number, name, causes in zip(self._chosen, self._names, self._alike, strict=True)
        ]


def undecided(
    ledger: Ledger, group: str | None, after: int, limit: int, samples: int, now_us: int
) -> list[dict[str, Any]]:
    """Return the complete summary, see :meth:`Waiting.to_json`."""
    found = Waiting(ledger, group, after, limit, samples, now_us)
    while found.look(ledger):
        pass
    return found.to_json()
