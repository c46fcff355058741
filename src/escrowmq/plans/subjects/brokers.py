"""The brokers of a bus, asked page by page and batch by batch, and what their records of acts say of a batch."""

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
"""Seconds for one answer."""
_ACTS = 64
"""Acts of a page: the broker sends fewer if they are large."""


class Brokers:
    """All brokers of one bus, by their shards. ``patient``: a question to one that is away is repeated for a while."""

    def __init__(self, bus: Bus, *, patient: bool = True) -> None:
        self._router = bus.router
        self._timeout = PATIENCE
        self._patient = patient

    @property
    def source(self) -> str:
        """Their addresses."""
        return ", ".join(link.address for link in self._router.links)

    def hello(self) -> tuple[dict[int, brokers.Hello], list[Missing]]:
        """Return each broker's description of itself, by shard, and who does not answer."""
        answers = self._router.every(lambda number: self._ask(number, brokers.HELLO({})), self._timeout)
        for number, hello in answers.found:
            self._router.learn_shard(number, hello["shard"])
        return {hello["shard"]: hello for _, hello in answers.found}, answers.missing

    def address(self, shard: int) -> str:
        """Return the address of the broker that has a shard."""
        return self._router.links[self._router.of_shard(shard, self._timeout)].address

    def asked(self, shard: int, call: Call[Answer]) -> Answer:
        """Return the answer of the broker that has a shard; asked once, as what may have been done is looked up in
        its record."""
        return self._ask(self._router.of_shard(shard, self._timeout), call)

    def _ask(self, number: int, call: Call[Answer]) -> Answer:
        if call.reads_only and self._patient:
            return self._router.ask(number, call, time.monotonic() + self._timeout, longest=self._timeout)
        attendance = self._router.attendances[number]
        if attendance is not None and attendance.away:  # surely nothing is done
            raise attendance.refusal()
        return ask(self._router.links[number], call, self._timeout)

    def listed(self, call: Call[Any], what: str, *unknown: Code) -> Iterator[tuple[brokers.Hello, list[Any]]]:
        """Pages of a listing of all brokers that answer, by turns: what the broker says of itself, and the entries.

        Those that refuse with a code of ``unknown`` have none; an error if all of them do. A broker that goes away
        after it began is an error: the list would be one in part.
        """
        hello = self.hello()[0]
        turns = {shard: self.pages(shard, call, what) for shard in sorted(hello)}
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

    def pages(self, shard: int, call: Call[Any], what: str, limit: int = BATCH_ROWS) -> Iterator[list[Any]]:
        """Pages of a listing of one broker, from the ``after`` of the request on."""
        request: dict[str, Any] = {**call.request, "limit": limit}
        while True:
            answer: Any = self.asked(shard, Call(call.name, request, call.reads_only))
            yield answer[what]
            if answer.get("next") is None:
                return
            request["after"] = answer["next"]

    # The record of acts

    def marks(self) -> dict[str, int]:
        """By shard: the number of the last act that each broker has recorded."""
        found = {}
        for shard in self.hello()[0]:
            newest = self.asked(shard, acts.LIST({"newest": True, "limit": 1}))["acts"]
            found[str(shard)] = newest[-1]["number"] if newest else 0
        return found

    def recorded(self, shard: int, token: str, after: int) -> Iterator[acts.Act]:
        """Yield the acts of a broker whose reason begins with ``token``, of those numbered above ``after``."""
        for page in self.pages(shard, acts.LIST({"after": after}), "acts", _ACTS):
            yield from (one for one in page if (one["why"] or "").startswith(token))


def ended(act: acts.Act, things: int) -> list[str]:
    """Return the result of each of the ``things`` that an act was about, or how it stood when the broker looked, at
    its start, after its end had interrupted the act. Empty: nothing was done, as far as the record says. Raises
    Unknown(TIMED_OUT) while it is under way."""
    found: Any = act.get("ended")
    if found is None:
        raise error(Code.TIMED_OUT, f"act {act['number']} is still under way", "run the plan again in a moment")
    if "interrupted" in found:
        found = found["found"]
    if not isinstance(found, Mapping) or not found.get("results"):
        return []
    return [str(one) for one in found.get("each") or [*found["results"]] * things]


def shard_of(rows: pa.RecordBatch) -> int:
    """Return where the rows of a batch live."""
    return int(rows.column(PLACE)[0].as_py())


def batch_of(schema: pa.Schema, place: int, entries: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return entries of a listing as a batch."""
    return pa.RecordBatch.from_pylist([{**entry, PLACE: place} for entry in entries], schema)


def tolerated(act: Callable[[], Answer], *codes: Code) -> Answer | None:
    """Return the answer; None if it is refused with one of ``codes``."""
    try:
        return act()
    except EscrowError as problem:
        if problem.code in codes:
            return None
        raise
