"""Look-ups: the timeline of a transaction, which may scan the log, and messages by id, key or place, which do not."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import owners_of
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, Rejected, error
from escrowmq.ledger.columns.arrays import Bools, Int64s, UInt8s
from escrowmq.ledger.groups.reports import positions_of
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.listings import transaction
from escrowmq.ledger.queues.queues import Place
from escrowmq.message.names import EDITED_FROM
from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.schemas import ID, Kind
from escrowmq.wire.actions.messages import Found, FoundMessage, Message, MessageFields
from escrowmq.wire.actions.transactions import Body, Event, Shown

WARM_ROWS = 100_000
"""A log that stores so many rows is looked into once when it is opened, which is not noticed: opening it takes many
times as long.
"""
VIEWED = 64  # messages of one key whose states are looked at together
NOWHERE: tuple[None, None] = (None, None)
UNDONE = [TransactionState.ROLLED_BACK, TransactionState.EXPIRED]
UNDONE_NAMES = [state.name.lower() for state in UNDONE]
MAX_SHOWN = 100  # messages of one transaction that are shown in full
_CHECKING = {Kind.CHECKED: "checked", Kind.PARKED: "parked", Kind.REOPENED: "reopened"}


def show_transaction(engine: Readable, identity: TransactionId) -> Shown:
    """Return a transaction with its messages and what happened to it when. Rejected(UNKNOWN_TRANSACTION,
    WRONG_SHARD)."""
    found: Any = engine.look(lambda: transaction(engine.shard.ledger, identity)).result()
    positions: Int64s = found.pop("positions")
    end = engine.look(lambda: engine.log.next_position).result()
    asked, unknown_us = engine.listeners.about(identity.position)
    shown: Shown = found | {
        "asked_session": asked,
        "unknown_us": unknown_us,
        "message_count": len(positions),
        "messages": [_withhold(describe(row), found["state"]) for row in _rows(engine, positions[:MAX_SHOWN])],
        "timeline": _timeline(engine, identity, positions, end),
    }
    return shown


def bodies_of(engine: Readable, identity: TransactionId) -> list[Body]:
    """Return the bodies of the messages that :func:`show_transaction` shows. Raises as that."""
    found: Any = engine.look(lambda: transaction(engine.shard.ledger, identity)).result()
    messages = [describe(row) for row in _rows(engine, found["positions"][:MAX_SHOWN])]
    return [{"position": one["position"], "body_base64": one["body_base64"]} for one in messages]


def _withhold(message: Any, state: str) -> Any:
    """Remove the body of a message that was rolled back or has expired: its producer never released it."""
    if state in ("rolled_back", "expired"):
        return message | {"body_base64": None, "withheld": True}
    return message


def _timeline(engine: Readable, identity: TransactionId, positions: Int64s, end: int) -> list[Event]:
    times = engine.log.time_at(positions)
    events: list[Event] = [
        {"time_us": int(time), "event": "prepared", "messages": int((times == time).sum())} for time in np.unique(times)
    ]
    asked, decided = 0, False
    kinds = [*_CHECKING, Kind.DECIDED, Kind.BATCH_DECIDED]
    for frame in engine.log.frames_at(identity.position, kinds, end, damaged=True):
        at = np.flatnonzero(frame.batch.column("transaction").to_numpy() == identity.position)
        for row in at.tolist():
            event: Any = {"time_us": frame.time_us, "position": frame.position + row}
            if frame.kind not in _CHECKING:
                decided = True
                event["event"] = TransactionState(frame.batch.column("state")[row].as_py()).name.lower()
                event["by"] = DecidedBy(frame.batch.column("decided_by")[row].as_py()).name.lower()
                event["session"] = frame.batch.column("epoch")[row].as_py()
            else:
                event["event"] = _CHECKING[frame.kind]
                asked = 0 if frame.kind == Kind.REOPENED else asked + (frame.kind == Kind.CHECKED)
                if frame.kind == Kind.CHECKED:
                    event["attempt"] = asked
            events.append(event)
        if decided:  # the first decision is final, and nothing follows it
            break
    return events


def warm_up(engine: Readable) -> None:
    """Look up a message of a large log, just opened: so the first caller does not wait for what a process pays once."""
    log = engine.log
    if log.next_position - log.first_position < WARM_ROWS:
        return

    def newest() -> Int64s:
        queues = (queue for queue in engine.shard.ledger.topics.queues if queue.end > queue.head)
        return next((queue.positions(queue.end - 1, queue.end) for queue in queues), np.empty(0, np.int64))

    with suppress(Exception):  # whatever it is, a look-up of that message reports it
        for row in _states(engine, engine.look(newest).result()):
            view_message(engine, row["topic"] or "", bytes(16), row["key"] or "")


def find_messages(engine: Readable, message_id: bytes | None, key: str | None, topic: str | None, limit: int) -> Found:
    """Return messages of an id, or with a key, newest first; each with its state and body. By its id also what one
    group gets
    in place of a dead letter. Damaged ones that cannot be compared are counted, but for the one of which the ledger
    still knows that it has the id."""
    found: list[FoundMessage] = []
    unreadable = 0
    for positions, lost in _matches(engine, _end(engine), message_id, key, topic):
        unreadable += lost
        while len(positions) and len(found) < limit:
            some, positions = np.split(positions, [limit - len(found)])
            found += _states(engine, some)
        if len(found) >= limit:
            break
    if message_id is not None and len(found) < limit:
        found += _edits(engine, message_id, key, topic)[: limit - len(found)]
    answer: Found = {"messages": found}
    return {**answer, "unreadable": unreadable} if unreadable else answer


def _edits(engine: Readable, message_id: bytes, key: str | None, topic: str | None) -> list[FoundMessage]:
    """Return the edited messages of an id: they stand in no topic, so no index has them. All edits that stand are
    looked through; each was made manually."""

    def look() -> list[tuple[str, Place, int, int]]:
        ledger = engine.shard.ledger
        found = []
        for group in ledger.groups.groups.values():
            for queue_id, cursor in group.cursors.items():
                offset = cursor.edited.find(message_id) if len(cursor.edited) else None
                edit = None if offset is None else cursor.edited.get(offset)
                if offset is not None and edit is not None:
                    found.append((group.name, ledger.topics.queues[queue_id].place, offset, edit.position))
        return found

    edits = [edit for edit in engine.glance(look).result() if topic in (None, edit[1].topic)]
    edits = [edit for edit in edits if edit[3] >= engine.log.first_position]
    rows = _rows(engine, np.array([edit[3] for edit in edits], np.int64)) if edits else []
    told: list[FoundMessage] = []
    for row, (group, place, offset, _) in zip(rows, edits, strict=True):
        if key is not None and not row["lost"] and row["key"] != key:
            continue
        if row["lost"]:
            row |= {"topic": place.topic, "queue": place.queue}
        old = dict(row["properties"] or ()).get(EDITED_FROM)
        told.append(_make_found(row, state="edited", offset=offset, visible=False, group=group, edited_from=old))
    return told


def view_message(engine: Readable, topic: str, message_id: bytes, key: str) -> FoundMessage | None:
    """Return the message of a topic with an id, or else the newest with a key, that stands or still may: none that was
    rolled back or has expired.
    Corrupt(DAMAGED) if there is none, and a message that could not be compared may be it."""
    end = _end(engine)
    unreadable = 0
    for identity, text in ((message_id, None), (None, key)):
        passed = 0
        for positions, lost in _matches(engine, end, identity, text, topic):
            passed += lost
            for start in range(0, len(positions), VIEWED):
                one = _standing_one(engine, positions[start : start + VIEWED])
                if one is not None and one["topic"] in (topic, None):
                    return one
        unreadable = max(unreadable, passed)
    if unreadable:
        raise error(Code.DAMAGED, f"not found among what can be read, but {unreadable} messages are damaged")
    return None


def _standing_one(engine: Readable, positions: Int64s) -> FoundMessage | None:
    """Return the first of some messages that was not rolled back and has not expired."""
    first = _states(engine, positions[:1])
    if first and first[0]["state"] not in UNDONE_NAMES:
        return first[0]
    others = positions[1:]
    others = others[~_undone(engine, others)]
    return next(iter(_states(engine, others[:1]) or _states(engine, others[1:])), None)


def _end(engine: Readable) -> int:
    """Return the end of what there is, all of it durable. The writer is asked only if that is still being made so,
    or has failed."""
    end = engine.log.next_sequence
    if engine.shard.failure is None and engine.log.durable_sequence >= end:
        return end
    asked: int = engine.look(lambda: engine.log.next_sequence).result()
    return asked


def _undone(engine: Readable, positions: Int64s) -> Bools:
    """Return which messages were rolled back, or have expired."""
    mask: Bools = np.asarray(engine.log.kind_at(positions) == Kind.HALF)
    halves = positions[mask]
    if len(halves):
        states: UInt8s = engine.glance(lambda: engine.shard.ledger.half_states(halves)[0]).result()
        mask[mask] = np.isin(states, UNDONE)
    return mask


def _matches(
    engine: Readable, end: int, message_id: bytes | None, key: str | None, topic: str | None
) -> Iterator[tuple[Int64s, int]]:
    """Yield messages of an id, or with a key, or both: positions, newest first, and how many cannot be compared
    that lie between them. Ends where retention has come meanwhile."""
    known: Int64s | None = None
    if message_id is None:
        matches = engine.log.find("key", key or "", topic, end=end)
    else:
        matches = engine.log.find("message_id", message_id, topic, end=end)
    try:
        for match in matches:
            positions, lost = match.positions, 0
            if match.lost:
                if known is None:
                    known = _find_known(engine, message_id)
                positions = positions[np.isin(positions, known)]
                lost = len(match.positions) - len(positions)
            elif message_id is not None and key is not None:
                keys = engine.log.salvage(positions, ["key"])[0].column("key")
                positions = positions[np.array([one == key for one in keys.to_pylist()], bool)]
            yield positions, lost
    except Rejected as problem:
        if problem.code is not Code.RANGE_PURGED:
            raise


def _find_known(engine: Readable, message_id: bytes | None) -> Int64s:
    """Return where the ledger remembers messages of this id, in whatever topic; nowhere if it is None."""

    def look() -> Int64s:
        topics = engine.shard.ledger.topics.by_name.values()
        numbers = np.array([topic.number for topic in topics], np.int32)
        return engine.shard.ledger.dedup.find(pa.array([message_id] * len(numbers), ID), numbers).positions

    nowhere = np.empty(0, np.int64)
    return nowhere if message_id is None else engine.look(look).result()


def _states(engine: Readable, positions: Int64s) -> list[FoundMessage]:
    """Return the messages at these positions, with what became of them; without those that are beyond the retention
    of their topic, or whose topic is deleted."""
    if not len(positions):
        return []
    rows = _rows(engine, positions)
    half = np.array([row["half"] for row in rows])

    def look() -> tuple[list[int], list[tuple[Place | None, int | None]], Bools]:
        ledger = engine.shard.ledger
        states = ledger.half_states(positions[half])[0].tolist() if half.any() else []
        of_halves = iter(states)
        placed = [not row["half"] or next(of_halves) == TransactionState.COMMITTED or row["lost"] for row in rows]
        standing = [_standing(ledger, row) if stands else NOWHERE for row, stands in zip(rows, placed, strict=True)]
        gone = np.array(
            [
                not row["lost"] and (ledger.topics.is_gone(row["queue_id"]) or (stands and place is NOWHERE))
                for row, stands, place in zip(rows, placed, standing, strict=True)
            ]
        )
        if gone.any():
            gone[gone] = ledger.delays.queue_ids_of(positions[gone]) < 0
        return states, standing, gone

    states, standing, gone = engine.glance(look).result()
    of_halves = iter(states)
    found: list[FoundMessage] = []
    for row, (place, offset), left in zip(rows, standing, gone.tolist(), strict=True):
        state: Any = TransactionState(next(of_halves)).name.lower() if row["half"] else "plain"
        if left:
            continue
        if place is not None and row["lost"]:
            row |= {"topic": place.topic, "queue": place.queue}
        found.append(_make_found(row, state=state, offset=offset, visible=offset is not None))
    return found


def _make_found(row: dict[str, Any], **standing: Any) -> FoundMessage:
    found: FoundMessage = _withhold({**describe(row), **standing}, standing["state"])
    return found


def _standing(ledger: Ledger, row: dict[str, Any]) -> tuple[Place | None, int | None]:
    """Return the queue in which a row stands, and its offset there. Of a row that is lost every queue is asked."""
    queues = ledger.topics.queues if row["lost"] else [ledger.queue(row["queue_id"])]
    for queue in queues:
        since_us = 0 if row["lost"] else max(row["stored_us"], row["visible_us"])
        if (offset := queue.find(row["position"], since_us)) is not None:
            return queue.place, offset
    return NOWHERE  # also what waits for its time


def _rows(engine: Readable, positions: Int64s) -> list[dict[str, Any]]:
    """Return stored messages as dicts, with ``position, transaction, half, damaged`` (the place or None) and
    ``lost`` (all of it is)."""
    stored, damaged = engine.log.salvage(positions)
    kinds = np.asarray(engine.log.kind_at(positions))
    transactions = owners_of(stored, positions, engine.log)
    rows: list[dict[str, Any]] = stored.to_pylist()
    for number, (row, owner) in enumerate(zip(rows, transactions.to_pylist(), strict=True)):
        damage = damaged.get(number)
        row["position"] = int(positions[number])
        row["half"] = bool(kinds[number] == Kind.HALF)
        row["transaction"] = None if owner is None else str(TransactionId.from_bytes(owner))
        row["damaged"] = None if damage is None else str(damage)
        row["lost"] = damage is not None and not damage.body_only
        if damage is not None:
            row["body"] = None
        if row["lost"]:
            row |= {"topic": None, "message_id": None}
    return rows


def describe(row: dict[str, Any]) -> Message:
    """One stored message for JSON."""
    identity, body = row["message_id"], row["body"]
    message: Message = {name: row[name] for name in MessageFields.__annotations__} | {  # type: ignore[assignment]
        "properties": dict(row["properties"] or ()),
        "message_id": None if identity is None else identity.hex(),
        "body_base64": None if body is None else base64.b64encode(body).decode(),
    }
    return message


def damaged_places(engine: Readable, group: str, places: Int64s) -> Bools:
    """Return which of these (queue id, offset) cannot be delivered to a group, because their content is lost."""

    def look() -> Int64s:
        ledger = engine.shard.ledger
        return positions_of(ledger.topics, places[:, 0], places[:, 1], ledger.groups.by_name.get(group))

    positions = engine.look(look).result()
    mask = np.zeros(len(places), bool)
    stored = np.flatnonzero(positions >= engine.log.first_position)
    _, damaged = engine.log.salvage(positions[stored], ["message_id"])
    mask[stored[list(damaged)]] = True
    return mask
