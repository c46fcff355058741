"""Dead letters of a consumer group: retry or discard them.

A dead letter is identified by its broker, topic, queue and offset, and guarded by the time of its death (``dead_us``)
and its number of attempts: if it was delivered again and died again, it is a new dead letter and stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import pyarrow as pa

from escrowmq.client.altering import signed
from escrowmq.client.bus import Bus
from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.message.names import check_name
from escrowmq.plans.frozen import BATCH_ROWS, PLACE
from escrowmq.plans.outcomes import Outcome, Outcomes, all_of
from escrowmq.plans.subjects.brokers import Brokers, batch_of, results_of, shard_of, tolerate
from escrowmq.plans.subjects.seam import check_ids, check_selection
from escrowmq.wire.actions import brokers, dead_letters

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
    Code.OK: Outcome.DONE, Code.NOT_FOUND: Outcome.ALREADY, Code.CONFLICT: Outcome.CHANGED,
    Code.DAMAGED: Outcome.DAMAGED, Code.UNKNOWN_TOPIC: Outcome.GONE, Code.BAD_QUEUE: Outcome.GONE,
    Code.UNKNOWN_GROUP: Outcome.GONE,
}  # fmt: skip
_FOUND = {"settled": Outcome.DONE, "dead": Outcome.NONE}
"""Results that a broker finds at its start for an act interrupted by a crash. A row that is still dead is done now."""
_NOT_THERE = (Code.UNKNOWN_TOPIC, Code.BAD_QUEUE, Code.UNKNOWN_GROUP)
_SHOWN = ("topic", "queue", "offset", "dead_us", "attempts")
_BROKERS = ("cause", "topic", "older_than")
"""Selection fields evaluated by the broker."""
_MOST_ITEMS = 1000


class DeadLetters:
    """The dead letters of consumer group ``group`` in ``selection``; further fields restrict them. ``topic``, ``cause``
    (grouped as in a summary: numbers and ids in it do not count), ``containing`` (part of the cause's text), ``key``,
    ``tag``, ``older_than`` (seconds since the death), ``ids`` (``TOPIC/QUEUE/OFFSET``, or message ids), ``items`` (at
    most 1,000: topic, queue, offset and, if known, broker, dead_us and attempts)."""

    schema: pa.Schema = SCHEMA
    identity: Sequence[str] = IDENTITY
    most: int = BATCH_ROWS
    counted: Sequence[str] = ("topic", "cause")

    def __init__(self, bus: Bus, act: str, selection: Mapping[str, Any], *, patient: bool = True) -> None:
        chosen = check_selection(selection, _SELECTION)
        if "group" not in chosen:
            raise Misuse(Code.BAD_ARGUMENT, "the selection has no consumer group", "add a group")
        check_name(chosen["group"], Code.BAD_GROUP_NAME)
        self.act = act
        self._group: str = chosen.pop("group")
        self._ids = check_ids(chosen.pop("ids", None))
        self._items = _check_items(chosen.pop("items", None))
        self._broker_fields = {name: chosen.pop(name) for name in _BROKERS if name in chosen}
        self._wanted = chosen
        self._unmatched_ids: set[str] = set()
        self._brokers = Brokers(bus, patient=patient)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The group."""
        return {"group": self._group}

    @property
    def source(self) -> str:
        """The addresses of the brokers."""
        return self._brokers.source

    def missing(self) -> list[Missing]:
        """Return the brokers that do not respond now."""
        return self._brokers.hello()[1]

    # Selection

    def pages(self) -> Iterator[pa.RecordBatch]:
        """Yield the matching rows. Raises Rejected(UNKNOWN_GROUP) if no broker has the group."""
        self._unmatched_ids = set(self._ids or ())
        if self._items is not None:
            listed = self._list_items()
        else:
            call = dead_letters.LIST(cast(dead_letters.List, {"group": self._group, **self._broker_fields}))
            listed = self._brokers.list_all(call, "dead_letters", Code.UNKNOWN_GROUP)
        for hello, letters in listed:
            if rows := [letter for letter in letters if self._is_chosen(letter)]:
                yield batch_of(SCHEMA, hello["shard"], rows)

    def _list_items(self) -> Iterator[tuple[brokers.Hello, list[Any]]]:
        """Yield the dead letters in ``items`` by broker, without reading all of them."""
        items = self._items or ()
        self._unmatched_ids |= {_place_of(item) for item in items}
        for shard, hello in self._brokers.hello()[0].items():
            address = self._brokers.address(shard)
            wanted = {_place_of(item): item for item in items if item.get("broker", address) == address}
            places = [(item["topic"], item["queue"], item["offset"]) for item in wanted.values()]
            found = []
            for letter in self._list_at(shard, places) or ():
                item = wanted[_place_of(letter)]
                if all(letter[name] == item[name] for name in _SHOWN if name in item):
                    self._unmatched_ids.discard(_place_of(letter))
                    found.append(letter)
            found.sort(key=lambda letter: (letter["queue_id"], letter["offset"]))
            yield hello, found

    def _is_chosen(self, letter: Mapping[str, Any]) -> bool:
        for name, value in self._wanted.items():
            if value not in (letter["cause"] or "") if name == "containing" else letter[name] != value:
                return False
        if self._ids is None:
            return True
        names = {_place_of(letter), letter["message_id"]} & self._ids
        self._unmatched_ids -= names
        return bool(names)

    def not_found(self) -> list[str]:
        """Return the ids without a dead letter of the group."""
        return sorted(self._unmatched_ids)

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
            letter = standing.get(place)
            if letter is None:
                continue
            if any(letter[name] != column[row] for name, column in zip(_SHOWN[3:], columns[3:], strict=True)):
                outcomes[row] = Outcome.CHANGED
            else:
                outcomes[row] = Outcome.DAMAGED if retry and letter["damaged"] else Outcome.DONE
        return outcomes

    def _list_at(self, shard: int, places: list[tuple[str, int, int]]) -> list[Any] | None:
        """Return the dead letters at these places of a broker; None if it lacks the group or all of the topics."""
        items = [dead_letters.Item(topic=topic, queue=queue, offset=offset) for topic, queue, offset in places]
        call = dead_letters.LIST({"group": self._group, "items": items})
        page = tolerate(lambda: self._brokers.request(shard, call), *_NOT_THERE)
        if page is not None:
            return list(page["dead_letters"])
        topics = dict.fromkeys(topic for topic, _, _ in places)
        parts = [
            self._list_at(shard, [place for place in places if place[0] == topic])
            for topic in topics
            if len(topics) > 1
        ]
        known = [part for part in parts if part is not None]
        return [letter for part in known for letter in part] if known else None

    def count_failed_again(self, rows: pa.RecordBatch) -> int:
        """Count the rows that were delivered again and have died again."""
        return int((self.preview(rows) == Outcome.CHANGED).sum()) if self.act.endswith("retry") else 0

    # Acts

    def mark(self) -> dict[str, int]:
        """Return the number of the last recorded act of each broker."""
        return self._brokers.marks()

    def do(self, rows: pa.RecordBatch, why: str) -> Outcomes:
        """Apply one act; if a topic or the group no longer exists, one act per topic."""
        codes = tolerate(lambda: {"codes": self._settle(rows, why)}, *_NOT_THERE)
        if codes is not None:
            return _to_outcomes(codes["codes"])
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
        return self._brokers.request(shard_of(rows), dead_letters.SETTLE(signed(request, why)))["codes"]

    def find_outcomes(self, rows: pa.RecordBatch, token: str, marks: Mapping[str, int]) -> Outcomes:
        """Return DONE for a row done by any act with this token, otherwise the result of the last of them."""
        shard = shard_of(rows)
        names = ("topic", "queue", "offset", "dead_us")
        columns = [rows.column(name).to_pylist() for name in names]
        deaths = {death: row for row, death in enumerate(zip(*columns, strict=True))}
        outcomes = all_of(Outcome.NONE, rows.num_rows)
        for act in self._brokers.find_acts(shard, token, marks.get(str(shard), 0)):
            items = act["what"]["items"]
            for item, result in zip(items, results_of(act, len(items)), strict=False):
                # A row that was no longer dead, or had died again, is not recorded: its repeated request shows that.
                row = deaths.get(tuple(item))
                if row is not None and outcomes[row] != Outcome.DONE:
                    outcomes[row] = _FOUND[result] if result in _FOUND else _to_outcome(result)
        return outcomes


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


def _to_outcomes(codes: list[str]) -> Outcomes:
    outcomes = all_of(Outcome.DONE, len(codes))
    for row, code in enumerate(codes):
        if code != "OK":
            outcomes[row] = _to_outcome(code)
    return outcomes


def _to_outcome(code: str) -> Outcome:
    return _OUTCOMES.get(Code[code], Outcome.REFUSED) if code in Code.__members__ else Outcome.REFUSED
