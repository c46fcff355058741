"""Requests to the brokers of a bus, page by page and batch by batch, and their records of acts on a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from escrowmq.client.bus import Bus
from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, EscrowError, error
from escrowmq.plans.frozen import BATCH_ROWS, PLACE
from escrowmq.wire import Call, ask
from escrowmq.wire.actions import acts, brokers
from escrowmq.wire.actions.action import Answer

PATIENCE = 30.0
"""Timeout of one response (s)."""
_ACTS = 64
"""Acts per page: the broker sends fewer if they are large."""


class Brokers:
    """All brokers of one bus, by their shards. ``patient``: a query to an unavailable broker is repeated for a
    while."""

    def __init__(self, bus: Bus, *, patient: bool = True) -> None:
        self._router = bus.router
        self._timeout = PATIENCE
        self._patient = patient

    @property
    def source(self) -> str:
        """The addresses of the brokers."""
        return ", ".join(link.address for link in self._router.links)

    def hello(self) -> tuple[dict[int, brokers.Hello], list[Missing]]:
        """Return the hello response of each available broker by shard, and the unavailable brokers."""
        answers = self._router.every(lambda number: self._ask(number, brokers.HELLO({})), self._timeout)
        for number, hello in answers.found:
            self._router.learn_shard(number, hello["shard"])
        return {hello["shard"]: hello for _, hello in answers.found}, answers.missing

    def address(self, shard: int) -> str:
        """Return the address of the broker with a shard."""
        return self._router.links[self._router.of_shard(shard, self._timeout)].address

    def request(self, shard: int, call: Call[Answer]) -> Answer:
        """Send a request to the broker with a shard, once: if it may have been applied, the record of acts is
        consulted."""
        return self._ask(self._router.of_shard(shard, self._timeout), call)

    def _ask(self, number: int, call: Call[Answer]) -> Answer:
        if call.reads_only and self._patient:
            return self._router.ask(number, call, time.monotonic() + self._timeout, longest=self._timeout)
        attendance = self._router.attendances[number]
        if attendance is not None and attendance.away:  # certainly nothing is done
            raise attendance.refusal()
        return ask(self._router.links[number], call, self._timeout)

    def list_all(self, call: Call[Any], field: str, *unknown: Code) -> Iterator[tuple[brokers.Hello, list[Any]]]:
        """Yield pages of a listing of all available brokers, in turns: the broker's hello response, and the entries.
        Brokers that reject it with a code of ``unknown`` have no entries; if all do, that is an error. If a broker
        becomes unavailable after its first page, that is an error, because the listing would be incomplete."""
        hello = self.hello()[0]
        turns = {shard: self.pages(shard, call, field) for shard in sorted(hello)}
        refusals: list[EscrowError] = []
        begun: set[int] = set()
        while turns:
            for shard, pages in list(turns.items()):
                try:
                    page = next(pages, None)
                except EscrowError as problem:
                    if shard in begun or problem.code not in unknown:
                        raise
                    refusals.append(problem)
                    page = None
                if page is None:
                    del turns[shard]
                else:
                    begun.add(shard)
                    yield hello[shard], page
        if refusals and not begun:
            raise refusals[0]

    def pages(self, shard: int, call: Call[Any], field: str, limit: int = BATCH_ROWS) -> Iterator[list[Any]]:
        """Yield pages of a listing of one broker, starting at the ``after`` of the request."""
        request: dict[str, Any] = {**call.request, "limit": limit}
        while True:
            answer: Any = self.request(shard, Call(call.name, request, call.reads_only))
            yield answer[field]
            if answer.get("next") is None:
                return
            request["after"] = answer["next"]

    # The record of acts

    def marks(self) -> dict[str, int]:
        """Return the number of each broker's last recorded act by shard."""
        found = {}
        for shard in self.hello()[0]:
            newest = self.request(shard, acts.LIST({"newest": True, "limit": 1}))["acts"]
            found[str(shard)] = newest[-1]["number"] if newest else 0
        return found

    def find_acts(self, shard: int, token: str, after: int) -> Iterator[acts.Act]:
        """Yield the acts of a broker numbered above ``after`` whose reason begins with ``token``."""
        for page in self.pages(shard, acts.LIST({"after": after}), "acts", _ACTS):
            yield from (one for one in page if (one["why"] or "").startswith(token))


def results_of(act: acts.Act, things: int) -> list[str]:
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


def tolerate(act: Callable[[], Answer], *codes: Code) -> Answer | None:
    """Return the response; None if it is rejected with one of ``codes``."""
    try:
        return act()
    except EscrowError as problem:
        if problem.code in codes:
            return None
        raise
