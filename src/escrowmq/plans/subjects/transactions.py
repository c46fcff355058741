"""Transactions: commit, roll back, or repeat their check-back.

A transaction is identified by its unique id and needs no other guard: its first decision is final.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from escrowmq.client.altering import signed
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Misuse
from escrowmq.plans.frozen import PLACE
from escrowmq.plans.outcomes import Outcome, Outcomes, all_of
from escrowmq.plans.subjects.brokers import BrokerRows, batch_of, recorded_outcomes, shard_of, tolerate
from escrowmq.plans.subjects.seam import check_selection
from escrowmq.wire.actions import transactions

ACTS = ("transactions.commit", "transactions.rollback", "transactions.recheck")
SCHEMA = pa.schema(
    [
        (PLACE, pa.int64()), ("id", pa.string()), ("position", pa.int64()), ("group", pa.string()),
        ("instance", pa.string()), ("state", pa.string()), ("checks", pa.int64()), ("messages", pa.int64()),
        ("prepared_us", pa.int64()),
    ]
)  # fmt: skip
IDENTITY = (PLACE, "id")
_SELECTION: dict[str, type | tuple[type, ...]] = {
    "state": str, "group": str, "older_than": (int, float), "cause": str, "ids": (list, tuple),
}  # fmt: skip
_STATES = ("undecided", "open", "parked")
_OUTCOMES = {
    "COMMITTED": Outcome.DONE, "ROLLED_BACK": Outcome.DONE, "OK": Outcome.DONE, "ALREADY_COMMITTED": Outcome.ALREADY,
    "ALREADY_ROLLED_BACK": Outcome.ALREADY, "TRANSACTION_DECIDED": Outcome.ALREADY, "CONFLICT": Outcome.CONFLICT,
    "EXPIRED": Outcome.GONE, "UNKNOWN_TRANSACTION": Outcome.GONE, "WRONG_SHARD": Outcome.GONE,
}  # fmt: skip
_NOT_THERE = (Code.UNKNOWN_TRANSACTION, Code.WRONG_SHARD)
_FEW = 64
"""Maximum number of decided transactions that are looked up singly; more are found in the listing."""
_ENDS = {"transactions.commit": "committed", "transactions.rollback": "rolled_back"}


class Transactions(BrokerRows):
    """The transactions of ``selection``: ``state`` (undecided, open, parked), producer ``group``, ``older_than``
    (seconds since the prepare), ``cause`` (why it is undecided, as in a summary), ``ids``."""

    schema: pa.Schema = SCHEMA
    identity: Sequence[str] = IDENTITY
    counted: Sequence[str] = ("group", "state")

    def __init__(self, bus: Bus, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> None:
        chosen = check_selection(selection, _SELECTION)
        super().__init__(bus, act, chosen.pop("ids", None), patient=patient)
        state = chosen.pop("state", "undecided").lower()
        if state not in _STATES:
            raise Misuse(Code.BAD_ARGUMENT, f"{state!r} is not a state for plans", f"one of {', '.join(_STATES)}")
        self._wanted = cast(transactions.List, {"state": state, **chosen})

    # Selection

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the matching rows. Raises Rejected(UNKNOWN_GROUP) if no broker has the group."""
        self._unmatched_ids = set(self._ids or ())
        for shard, listed in self._list_all(transactions.LIST(self._wanted), "transactions"):
            rows = listed if self._ids is None else [one for one in listed if one["id"] in self._ids]
            self._unmatched_ids.difference_update(one["id"] for one in rows)
            if rows:
                yield batch_of(SCHEMA, shard, rows)

    # Preview

    def preview(self, rows: pa.RecordBatch) -> Outcomes:
        """Predict the outcomes. ALREADY: decided the same way (recheck: either way). CONFLICT: the other. GONE:
        removed."""
        ids = rows.column("id").to_pylist()
        left = {identity: row for row, identity in enumerate(ids)}
        outcomes = all_of(Outcome.GONE, rows.num_rows)
        self._find_in_state(rows, "undecided", left, outcomes)
        if len(left) <= _FEW:
            for identity, row in left.items():
                call = transactions.SHOW({"id": identity})
                shown = tolerate(partial(self._request, shard_of(rows), call), *_NOT_THERE)
                outcomes[row] = Outcome.GONE if shown is None else self._expected_outcome(shown["state"])
            return outcomes
        for state in ("committed", "rolled_back", "expired"):
            if left:
                self._find_in_state(rows, state, left, outcomes)
        return outcomes

    def _find_in_state(self, rows: pa.RecordBatch, state: str, left: dict[str, int], outcomes: Outcomes) -> None:
        """Set the outcomes of rows in ``left`` that are in this state now, and remove them from it."""
        positions = rows.column("position").to_pylist()
        request: transactions.List = {"state": state, "after": min(positions) - 1}
        last, outcome = max(positions), self._expected_outcome(state)
        for page in self._pages(shard_of(rows), transactions.LIST(request), "transactions"):
            for one in page:
                if (row := left.pop(one["id"], None)) is not None:
                    outcomes[row] = outcome
            if not left or (page and page[-1]["position"] >= last):
                return

    def _expected_outcome(self, state: str) -> Outcome:
        if state == "undecided":
            return Outcome.DONE
        if state == "expired":
            return Outcome.GONE
        return Outcome.ALREADY if self.act not in _ENDS or state == _ENDS[self.act] else Outcome.CONFLICT

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        return 0  # a decision is final

    # Acts

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        ids, end = rows.column("id").to_pylist(), self.act.rpartition(".")[2]
        if end == "recheck":
            call = transactions.RECHECK(signed(transactions.Recheck(ids=ids), why))
        else:
            outcome = cast(Literal["commit", "rollback"], end)
            call = transactions.SETTLE(signed(transactions.Settle(ids=ids, outcome=outcome), why))
        codes = self._request(shard_of(rows), call)["codes"]
        return np.array([_OUTCOMES.get(code, Outcome.REFUSED) for code in codes], np.uint8)

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        found = self._find_acts(rows, token, marks)
        return recorded_outcomes(rows.column("id").to_pylist(), found, lambda what: what["ids"], self._to_outcome)

    def _to_outcome(self, result: str) -> Outcome:
        """Convert a recorded result to an outcome. A state (``committed by operator``) is what a broker found at its
        start after a crash had interrupted the act: a transaction that is still undecided, or was to be rechecked, is
        done now."""
        if result in Code.__members__:
            return _OUTCOMES.get(result, Outcome.REFUSED)
        state, _, by = result.partition(" by ")
        if state in ("open", "parked"):
            return Outcome.NONE
        would = self._expected_outcome(state)
        return Outcome.DONE if would == Outcome.ALREADY and by == "operator" and self.act in _ENDS else would
