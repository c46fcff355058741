"""Rows of the brokers of a bus: requests page by page and batch by batch, and the records of acts on a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from escrowmq.client.bus import Bus
from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, EscrowError, error
from escrowmq.plans.frozen import BATCH_ROWS, PLACE
from escrowmq.plans.outcomes import Outcome, Outcomes, all_of
from escrowmq.plans.subjects.seam import check_ids
from escrowmq.wire import Call, ask
from escrowmq.wire.actions import acts, brokers
from escrowmq.wire.actions.action import Answer

T = TypeVar("T")

PATIENCE = 30.0
"""Timeout of one response (s)."""
_ACTS = 64
"""Acts per page: the broker sends fewer if they are large."""


class BrokerRows:
    """Rows of all brokers of one bus; see :class:`~escrowmq.plans.subjects.seam.Subject`. ``patient``: a query to an
    unavailable broker is repeated for a while."""

    most = BATCH_ROWS
    settings: Mapping[str, Any] = {}

    def __init__(self, bus: Bus, act: str, ids: Any, *, patient: bool) -> None:
        self.act = act
        self._ids = check_ids(ids)
        self._unmatched_ids: set[str] = set()
        self._router = bus.router
        self._patient = patient

    @property
    def source(self) -> str:
        """The addresses of the brokers."""
        return ", ".join(link.address for link in self._router.links)

    def missing(self) -> list[Missing]:
        return self._hello()[1]

    def not_found(self) -> list[str]:
        return sorted(self._unmatched_ids)

    # Requests

    def _hello(self) -> tuple[dict[int, brokers.Hello], list[Missing]]:
        """Return the hello response of each available broker by shard, and the unavailable brokers."""
        answers = self._router.every(lambda number: self._ask(number, brokers.HELLO({})), PATIENCE)
        for number, hello in answers.found:
            self._router.learn_shard(number, hello["shard"])
        return {hello["shard"]: hello for _, hello in answers.found}, answers.missing

    def _request(self, shard: int, call: Call[Answer]) -> Answer:
        """Send a request to the broker with a shard, once: if it may have been applied, the record of acts is
        consulted."""
        return self._ask(self._router.of_shard(shard, PATIENCE), call)

    def _ask(self, number: int, call: Call[Answer]) -> Answer:
        if call.reads_only and self._patient:
            return self._router.ask(number, call, time.monotonic() + PATIENCE, longest=PATIENCE)
        attendance = self._router.attendances[number]
        if attendance is not None and attendance.away:  # certainly nothing is done
            raise attendance.refusal()
        return ask(self._router.links[number], call, PATIENCE)

    def _list_all(self, call: Call[Any], field: str) -> Iterator[tuple[int, list[Any]]]:
        """Yield pages of a listing of all available brokers, in turns: the shard, and the entries. Brokers without the
        group have no entries; if all lack it, that is an error. If a broker becomes unavailable after its first page,
        that is an error, because the listing would be incomplete."""
        turns = {shard: self._pages(shard, call, field) for shard in sorted(self._hello()[0])}
        refusals: list[EscrowError] = []
        begun: set[int] = set()
        while turns:
            for shard, pages in list(turns.items()):
                try:
                    page = next(pages, None)
                except EscrowError as problem:
                    if shard in begun or problem.code is not Code.UNKNOWN_GROUP:
                        raise
                    refusals.append(problem)
                    page = None
                if page is None:
                    del turns[shard]
                else:
                    begun.add(shard)
                    yield shard, page
        if refusals and not begun:
            raise refusals[0]

    def _pages(self, shard: int, call: Call[Any], field: str, limit: int = BATCH_ROWS) -> Iterator[list[Any]]:
        """Yield pages of a listing of one broker, starting at the ``after`` of the request."""
        request: dict[str, Any] = {**call.request, "limit": limit}
        while True:
            answer: Any = self._request(shard, Call(call.name, request, call.reads_only))
            yield answer[field]
            if answer.get("next") is None:
                return
            request["after"] = answer["next"]

    # The record of acts

    def mark(self) -> dict[str, int]:
        found = {}
        for shard in self._hello()[0]:
            newest = self._request(shard, acts.LIST({"newest": True, "limit": 1}))["acts"]
            found[str(shard)] = newest[-1]["number"] if newest else 0
        return found

    def _find_acts(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Iterator[acts.Act]:
        """Yield the acts of the rows' broker after its mark whose reason begins with ``token``."""
        shard = shard_of(rows)
        for page in self._pages(shard, acts.LIST({"after": marks.get(str(shard), 0)}), "acts", _ACTS):
            yield from (one for one in page if (one["why"] or "").startswith(token))


def recorded_outcomes(
    keys: Sequence[Any],
    found: Iterable[acts.Act],
    list_keys: Callable[[Mapping[str, Any]], list[Any]],
    to_outcome: Callable[[str], Outcome],
) -> Outcomes:
    """Return DONE for each of ``keys`` that any of the acts did, otherwise the result of the last of them.
    ``list_keys`` returns the keys of an act from its arguments."""
    wanted = {key: row for row, key in enumerate(keys)}
    outcomes = all_of(Outcome.NONE, len(keys))
    for act in found:
        of_act = list_keys(act["what"])
        for key, result in zip(of_act, _results_of(act, len(of_act)), strict=False):
            row = wanted.get(key)
            if row is not None and outcomes[row] != Outcome.DONE:
                outcomes[row] = to_outcome(result)
    return outcomes


def _results_of(act: acts.Act, things: int) -> list[str]:
    """Return the result of each of the ``things`` of an act, or its state found at the broker's start after a crash had
    interrupted the act. Empty: nothing recorded as done. Raises Unknown(TIMED_OUT) while it is in progress."""
    found: Any = act.get("ended")
    if found is None:
        raise error(Code.TIMED_OUT, f"act {act['number']} is still in progress", "run the plan again in a moment")
    if "interrupted" in found:
        found = found["found"]
    if not isinstance(found, Mapping) or not found.get("results"):
        return []
    return [str(one) for one in found.get("each") or [*found["results"]] * things]


def shard_of(rows: pa.RecordBatch) -> int:
    """Return the shard of the rows of a batch."""
    return int(rows.column(PLACE)[0].as_py())


def batch_of(schema: pa.Schema, place: int, entries: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Convert entries of a listing to a batch."""
    return pa.RecordBatch.from_pylist([{**entry, PLACE: place} for entry in entries], schema)


def tolerate(act: Callable[[], T], *codes: Code) -> T | None:
    """Return the response; None if it is rejected with one of ``codes``."""
    try:
        return act()
    except EscrowError as problem:
        if problem.code in codes:
            return None
        raise
