"""Dead letters of a consumer group: retry or discard them.

A dead letter is identified by its broker, topic, queue and offset, and guarded by the time of its death (``dead_us``)
and its number of attempts: if it was delivered again and died again, it is a new dead letter and stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from escrowmq.client.altering import signed
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.message.names import check_name
from escrowmq.plans.frozen import PLACE
from escrowmq.plans.outcomes import Outcome, Outcomes, all_of
from escrowmq.plans.subjects.brokers import PATIENCE, BrokerRows, batch_of, recorded_outcomes, shard_of, tolerate
from escrowmq.plans.subjects.seam import check_selection
from escrowmq.wire.actions import dead_letters

ACTS = ("dead_letters.retry", "dead_letters.discard")
SCHEMA = pa.schema(
    [
        (PLACE, pa.int64()), ("topic", pa.string()), ("queue", pa.int64()), ("offset", pa.int64()),
        ("dead_us", pa.int64()), ("attempts", pa.int64()), ("queue_id", pa.int64()), ("message_id", pa.string()),
        ("key", pa.string()), ("tag", pa.string()), ("cause", pa.string()), ("damaged", pa.string()),
    ]
)  # fmt: skip
IDENTITY = (PLACE, "topic", "queue", "offset", "dead_us", "attempts")
_SELECTION: dict[str, type | tuple[type, ...]] = {
    "group": str, "topic": str, "cause": str, "containing": str, "key": str, "tag": str,
    "older_than": (int, float), "ids": (list, tuple), "items": (list, tuple),
}  # fmt: skip
_OUTCOMES = {
    "OK": Outcome.DONE, "NOT_FOUND": Outcome.ALREADY, "CONFLICT": Outcome.CHANGED, "DAMAGED": Outcome.DAMAGED,
    "UNKNOWN_TOPIC": Outcome.GONE, "BAD_QUEUE": Outcome.GONE, "UNKNOWN_GROUP": Outcome.GONE,
    "settled": Outcome.DONE, "dead": Outcome.NONE,
}  # fmt: skip
_NOT_THERE = (Code.UNKNOWN_TOPIC, Code.BAD_QUEUE, Code.UNKNOWN_GROUP)
_SHOWN = ("topic", "queue", "offset", "dead_us", "attempts")
_BROKERS = ("cause", "topic", "older_than")
"""Selection fields evaluated by the broker."""
_MOST_ITEMS = 1000


class DeadLetters(BrokerRows):
    """The dead letters of consumer group ``group`` in ``selection``; further fields restrict them. ``topic``, ``cause``
    (grouped as in a summary: numbers and ids in it do not count), ``containing`` (part of the cause's text), ``key``,
    ``tag``, ``older_than`` (seconds since the death), ``ids`` (``TOPIC/QUEUE/OFFSET``, or message ids), ``items`` (at
    most 1,000: topic, queue, offset and, if known, broker, dead_us and attempts)."""

    schema: pa.Schema = SCHEMA
    identity: Sequence[str] = IDENTITY
    counted: Sequence[str] = ("topic", "cause")

    def __init__(self, bus: Bus, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> None:
        chosen = check_selection(selection, _SELECTION)
        if "group" not in chosen:
            raise Misuse(Code.BAD_ARGUMENT, "the selection has no consumer group", "add a group")
        check_name(chosen["group"], Code.BAD_GROUP_NAME)
        super().__init__(bus, act, chosen.pop("ids", None), patient=patient)
        self._group: str = chosen.pop("group")
        self.settings = {"group": self._group}
        self._items = _check_items(chosen.pop("items", None))
        self._broker_fields = {name: chosen.pop(name) for name in _BROKERS if name in chosen}
        self._wanted = chosen

    # Selection

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the matching rows. Raises Rejected(UNKNOWN_GROUP) if no broker has the group."""
        self._unmatched_ids = set(self._ids or ())
        if self._items is not None:
            listed = self._list_items()
        else:
            call = dead_letters.LIST(cast(dead_letters.List, {"group": self._group, **self._broker_fields}))
            listed = self._list_all(call, "dead_letters")
        for shard, letters in listed:
            if rows := [letter for letter in letters if self._is_chosen(letter)]:
                yield batch_of(SCHEMA, shard, rows)

    def _list_items(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the dead letters in ``items`` by broker, without reading all of them."""
        items = self._items or ()
        self._unmatched_ids |= {_place_of(item) for item in items}
        for shard in self._hello()[0]:
            address = self._router.links[self._router.of_shard(shard, PATIENCE)].address
            wanted = {_place_of(item): item for item in items if item.get("broker", address) == address}
            places = [(item["topic"], item["queue"], item["offset"]) for item in wanted.values()]
            found = []
            for letter in self._list_at(shard, places) or ():
                item = wanted[_place_of(letter)]
                if all(letter[name] == item[name] for name in _SHOWN if name in item):
                    self._unmatched_ids.discard(_place_of(letter))
                    found.append(letter)
            found.sort(key=lambda letter: (letter["queue_id"], letter["offset"]))
            yield shard, found

    def _is_chosen(self, letter: Mapping[str, Any]) -> bool:
        for name, value in self._wanted.items():
            if value not in (letter["cause"] or "") if name == "containing" else letter[name] != value:
                return False
        if self._ids is None:
            return True
        names = {_place_of(letter), letter["message_id"]} & self._ids
        self._unmatched_ids -= names
        return bool(names)

    # Preview

    def preview(self, rows: pa.RecordBatch) -> Outcomes:
        """Predict the outcomes. ALREADY: no longer dead. CHANGED: died again. DAMAGED: cannot be delivered again."""
        columns = [rows.column(name).to_pylist() for name in _SHOWN]
        places = list(zip(*columns[:3], strict=True))
        found = self._list_at(shard_of(rows), places)
        if found is None:
            return all_of(Outcome.GONE, rows.num_rows)
        standing = {(letter["topic"], letter["queue"], letter["offset"]): letter for letter in found}
        retry = self.act.endswith("retry")
        outcomes = all_of(Outcome.ALREADY, rows.num_rows)
        for row, place in enumerate(places):
            if (letter := standing.get(place)) is None:
                continue
            if (letter["dead_us"], letter["attempts"]) != (columns[3][row], columns[4][row]):
                outcomes[row] = Outcome.CHANGED
            else:
                outcomes[row] = Outcome.DAMAGED if retry and letter["damaged"] else Outcome.DONE
        return outcomes

    def _list_at(self, shard: int, places: list[tuple[str, int, int]]) -> list[Any] | None:
        """Return the dead letters at these places of a broker; None if it lacks the group or all of the topics."""
        items = [dead_letters.Item(topic=topic, queue=queue, offset=offset) for topic, queue, offset in places]
        call = dead_letters.LIST({"group": self._group, "items": items})
        page = tolerate(lambda: self._request(shard, call), *_NOT_THERE)
        if page is not None:
            return list(page["dead_letters"])
        topics = dict.fromkeys(topic for topic, _, _ in places)
        if len(topics) < 2:
            return None
        parts = [self._list_at(shard, [place for place in places if place[0] == topic]) for topic in topics]
        known = [part for part in parts if part is not None]
        return [letter for part in known for letter in part] if known else None

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        """Count the rows that were delivered again and have died again."""
        return int((self.preview(rows) == Outcome.CHANGED).sum()) if self.act.endswith("retry") else 0

    # Acts

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        """Apply one act; if a topic or the group no longer exists, one act per topic."""
        codes = tolerate(lambda: self._settle(rows, why), *_NOT_THERE)
        if codes is not None:
            return np.array([_to_outcome(code) for code in codes], np.uint8)
        outcomes = all_of(Outcome.GONE, rows.num_rows)
        topics = rows.column("topic").to_pylist()
        names = list(dict.fromkeys(topics))
        for topic in names if len(names) > 1 else ():
            at = [row for row, name in enumerate(topics) if name == topic]
            try:
                outcomes[at] = self.do(rows.take(pa.array(at, pa.int64())), why)
            except EscrowError as problem:  # part of the batch may be done
                raise error(Code.TIMED_OUT, problem.message, problem.hint) from problem
        return outcomes

    def _settle(self, rows: pa.RecordBatch, why: str) -> list[str]:
        items = rows.select(["topic", "queue", "offset", "dead_us", "attempts"]).to_pylist()
        act = cast(Literal["retry", "discard"], self.act.rpartition(".")[2])
        request = dead_letters.Settle(group=self._group, act=act, items=cast(list[dead_letters.Shown], items))
        return self._request(shard_of(rows), dead_letters.SETTLE(signed(request, why)))["codes"]

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        columns = [rows.column(name).to_pylist() for name in ("topic", "queue", "offset", "dead_us")]
        deaths = list(zip(*columns, strict=True))
        found = self._find_acts(rows, token, marks)
        # A row that was no longer dead, or had died again, is not recorded: its repeated request shows that.
        return recorded_outcomes(deaths, found, lambda what: [tuple(item) for item in what["items"]], _to_outcome)


def _place_of(item: Mapping[str, Any]) -> str:
    return f"{item['topic']}/{item['queue']}/{item['offset']}"


def _check_items(given: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return the items of a selection without duplicates. Raises Misuse(BAD_ARGUMENT)."""
    if given is None:
        return None
    if len(given) > _MOST_ITEMS:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(given):,} items; the limit is {_MOST_ITEMS:,}", "give ids instead")
    for item in given:
        wanted = isinstance(item, Mapping) and isinstance(item.get("topic"), str)
        if not wanted or not all(isinstance(item.get(name), int) for name in ("queue", "offset")):
            raise Misuse(Code.BAD_ARGUMENT, f"{item!r:.100} is not a dead letter", "topic, queue and offset, as listed")
    return tuple({(item.get("broker"), _place_of(item)): item for item in given}.values())


def _to_outcome(result: str) -> Outcome:
    """Convert a response, or what a broker found at its start for an act that a crash interrupted. A row that is still
    dead is done now."""
    return _OUTCOMES.get(result, Outcome.REFUSED)
