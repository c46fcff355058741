"""Look-ups: the timeline of a transaction (may scan the log), and messages by id, key or place (do not)."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
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

WARM_ROWS = 100_000  # a log of so many rows is read once when it is opened, which takes many times as long anyway
VIEWED = 64  # messages of one key whose states are read together
NOWHERE: tuple[None, None] = (None, None)
UNDONE = [TransactionState.ROLLED_BACK, TransactionState.EXPIRED]
UNDONE_NAMES = [state.name.lower() for state in UNDONE]
MAX_SHOWN = 100  # messages of one transaction that are shown in full
_CHECKING = {Kind.CHECKED: "checked", Kind.PARKED: "parked", Kind.REOPENED: "reopened"}


def show_transaction(engine: Readable, identity: TransactionId) -> Shown:
    """Return a transaction with its messages and its timeline; without bodies if it was rolled back or has expired.
    Rejected(UNKNOWN_TRANSACTION, WRONG_SHARD)."""
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
    """Return the bodies of the messages of a transaction, also those that :func:`show_transaction` withholds. Raises as
    that."""
    found: Any = engine.look(lambda: transaction(engine.shard.ledger, identity)).result()
    messages = [describe(row) for row in _rows(engine, found["positions"][:MAX_SHOWN])]
    return [{"position": one["position"], "body_base64": one["body_base64"]} for one in messages]


def _withhold(message: Any, state: str) -> Any:
    """Return a message (as JSON) without its body if ``state`` is rolled back or expired: its producer never released
    it."""
    return message | {"body_base64": None, "withheld": True} if state in UNDONE_NAMES else message


def _timeline(engine: Readable, identity: TransactionId, positions: Int64s, end: int) -> list[Event]:
    times, counts = np.unique(engine.log.time_at(positions), return_counts=True)
    events: list[Event] = [
        {"time_us": time_us, "event": "prepared", "messages": count}
        for time_us, count in zip(times.tolist(), counts.tolist(), strict=True)
    ]
    asked = 0
    kinds = [*_CHECKING, Kind.DECIDED, Kind.BATCH_DECIDED]
    for frame in engine.log.frames_at(identity.position, kinds, end, damaged=True):
        for row in np.flatnonzero(frame.batch.column("transaction").to_numpy() == identity.position).tolist():
            event: Any = {"time_us": frame.time_us, "position": frame.position + row}
            events.append(event)
            if frame.kind not in _CHECKING:
                state, by, session = (
                    frame.batch.column(name)[row].as_py() for name in ("state", "decided_by", "epoch")
                )
                event["event"] = TransactionState(state).name.lower()
                event["by"], event["session"] = DecidedBy(by).name.lower(), session
                return events  # the first decision is final, and nothing follows it
            event["event"] = _CHECKING[frame.kind]
            asked = 0 if frame.kind == Kind.REOPENED else asked + (frame.kind == Kind.CHECKED)
            if frame.kind == Kind.CHECKED:
                event["attempt"] = asked
    return events


def warm_up(engine: Readable) -> None:
    """Look up one of the newest messages of a large, newly opened log, so that the first caller does not wait for
    one-time costs. Changes nothing; errors are ignored."""
    log = engine.log
    if log.next_position - log.first_position < WARM_ROWS:
        return

    def newest() -> Int64s:
        queues = (queue for queue in engine.shard.ledger.topics.queues if queue.end > queue.head)
        return next((queue.positions(queue.end - 1, queue.end) for queue in queues), np.empty(0, np.int64))

    with suppress(Exception):  # a look-up of that message reports it
        for row in _states(engine, engine.look(newest).result()):
            view_message(engine, row["topic"] or "", bytes(16), row["key"] or "")


def find_messages(engine: Readable, message_id: bytes | None, key: str | None, topic: str | None, limit: int) -> Found:
    """Return messages of an id, or with a key, newest first, each with its state and body; by id also those that
    replace a dead letter of a group. Damaged messages that cannot be compared are counted, except the one that the
    ledger still has under the id."""
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
    """Return the edited messages with an id, which replace dead letters. No index has them, so all current edits are
    searched; they are few."""

    def look() -> list[tuple[str, Place, int, int]]:
        ledger = engine.shard.ledger
        found = []
        for group in ledger.groups.groups.values():
            for queue_id, cursor in group.cursors.items():
                offset = cursor.edited.find(message_id) if len(cursor.edited) else None
                if offset is not None and (edit := cursor.edited.get(offset)) is not None:
                    found.append((group.name, ledger.topics.queues[queue_id].place, offset, edit.position))
        return found

    first, edits = engine.log.first_position, engine.glance(look).result()
    edits = [edit for edit in edits if topic in (None, edit[1].topic) and edit[3] >= first]
    rows = _rows(engine, np.array([edit[3] for edit in edits], np.int64)) if edits else []
    found: list[FoundMessage] = []
    for row, (group, place, offset, _) in zip(rows, edits, strict=True):
        if row["lost"]:
            row |= {"topic": place.topic, "queue": place.queue}
        elif key not in (None, row["key"]):
            continue
        old = dict(row["properties"] or ()).get(EDITED_FROM)
        found.append(_make_found(row, state="edited", offset=offset, visible=False, group=group, edited_from=old))
    return found


def plain_positions(engine: Readable, topic: str, message_id: bytes) -> Int64s:
    """Return the log positions of the plain messages (not half messages) of a topic with an id."""
    parts = [positions for positions, _ in _matches(engine, _end(engine), message_id, None, topic)]
    positions = np.concatenate([np.empty(0, np.int64), *parts])
    plain: Int64s = positions[np.asarray(engine.log.kind_at(positions)) == Kind.PLAIN]
    return plain


def view_message(engine: Readable, topic: str, message_id: bytes, key: str) -> FoundMessage | None:
    """Return the message of a topic with an id, or else the newest with a key, that was neither rolled back nor has
    expired. Corrupt(DAMAGED) if there is none, but a damaged message may be it."""
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
    """Return the first of the messages at these positions that was not rolled back and has not expired, with its state;
    None if there is none."""
    first = _states(engine, positions[:1])
    if first and first[0]["state"] not in UNDONE_NAMES:
        return first[0]
    others = positions[1:]
    undone = np.asarray(engine.log.kind_at(others) == Kind.HALF)
    if undone.any():
        halves = others[undone]
        states: UInt8s = engine.glance(lambda: engine.shard.ledger.half_states(halves)[0]).result()
        undone[undone] = np.isin(states, UNDONE)
    others = others[~undone]
    return next(iter(_states(engine, others[:1]) or _states(engine, others[1:])), None)


def _end(engine: Readable) -> int:
    """Return the end of the log (a sequence number) once everything before it is durable. The writer is involved only
    if it is not, or has failed."""
    end = engine.log.next_sequence
    if engine.shard.failure is not None or engine.log.durable_sequence < end:
        end = engine.look(lambda: engine.log.next_sequence).result()
    return end


def _matches(
    engine: Readable, end: int, message_id: bytes | None, key: str | None, topic: str | None
) -> Iterator[tuple[Int64s, int]]:
    """Yield batches of messages with an id, or a key, or both: their log positions, newest first, and how many damaged
    ones between them cannot be compared. Ends where retention has removed messages meanwhile."""
    if message_id is None:
        matches = engine.log.find("key", key or "", topic, end=end)
    else:
        matches = engine.log.find("message_id", message_id, topic, end=end)
    find_known = cache(partial(_find_known, engine, message_id))
    try:
        for match in matches:
            positions, lost = match.positions, 0
            if match.lost:
                positions = positions[np.isin(positions, find_known())]
                lost = len(match.positions) - len(positions)
            elif message_id is not None and key is not None:
                keys = engine.log.salvage(positions, ["key"])[0].column("key")
                positions = positions[np.array([one == key for one in keys.to_pylist()], bool)]
            yield positions, lost
    except Rejected as problem:
        if problem.code is not Code.RANGE_PURGED:
            raise


def _find_known(engine: Readable, message_id: bytes | None) -> Int64s:
    """Return the log positions that the ledger's deduplication knows for a message id, in any topic; none for None."""

    def look() -> Int64s:
        topics = engine.shard.ledger.topics.by_name.values()
        numbers = np.array([topic.number for topic in topics], np.int32)
        return engine.shard.ledger.dedup.find(pa.array([message_id] * len(numbers), ID), numbers).positions

    return np.empty(0, np.int64) if message_id is None else engine.look(look).result()


def _states(engine: Readable, positions: Int64s) -> list[FoundMessage]:
    """Return the messages at these positions with state, queue and offset, without those removed by retention or
    deletion."""
    if not len(positions):
        return []
    rows = _rows(engine, positions)
    half = np.array([row["half"] for row in rows])

    def look() -> tuple[list[str], list[tuple[Place | None, int | None]], Bools]:
        ledger = engine.shard.ledger
        of_halves = iter(ledger.half_states(positions[half])[0].tolist() if half.any() else ())
        states = [TransactionState(next(of_halves)).name.lower() if row["half"] else "plain" for row in rows]
        standing, gone = [], np.zeros(len(rows), bool)
        for at, (row, state) in enumerate(zip(rows, states, strict=True)):
            is_placed = state in ("plain", "committed") or row["lost"]
            standing.append(_standing(ledger, row) if is_placed else NOWHERE)
            if not row["lost"]:
                gone[at] = ledger.topics.is_gone(row["queue_id"]) or (is_placed and standing[-1] is NOWHERE)
        if gone.any():
            gone[gone] = ledger.delays.queue_ids_of(positions[gone]) < 0
        return states, standing, gone

    found: list[FoundMessage] = []
    for row, state, (place, offset), left in zip(rows, *engine.glance(look).result(), strict=True):
        if place is not None and row["lost"]:
            row |= {"topic": place.topic, "queue": place.queue}
        if not left:
            found.append(_make_found(row, state=state, offset=offset, visible=offset is not None))
    return found


def _make_found(row: dict[str, Any], **standing: Any) -> FoundMessage:
    found: FoundMessage = _withhold({**describe(row), **standing}, standing["state"])
    return found


def _standing(ledger: Ledger, row: dict[str, Any]) -> tuple[Place | None, int | None]:
    """Return queue and offset of a message (a row of :func:`_rows`), (None, None) if it has none. For a row whose topic
    is lost every queue is searched."""
    queues = ledger.topics.queues if row["lost"] else [ledger.queue(row["queue_id"])]
    for queue in queues:
        since_us = 0 if row["lost"] else max(row["stored_us"], row["visible_us"])
        if (offset := queue.find(row["position"], since_us)) is not None:
            return queue.place, offset
    return NOWHERE  # or delayed


def _rows(engine: Readable, positions: Int64s) -> list[dict[str, Any]]:
    """Return the messages at these positions by column, with ``position, transaction, half, damaged`` (the place of the
    damage) and ``lost`` (whether more than the body is)."""
    stored, damaged = engine.log.salvage(positions)
    kinds = np.asarray(engine.log.kind_at(positions))
    transactions = owners_of(stored, positions, engine.log)
    rows: list[dict[str, Any]] = stored.to_pylist()
    for number, (row, owner) in enumerate(zip(rows, transactions.to_pylist(), strict=True)):
        row["position"] = int(positions[number])
        row["half"] = bool(kinds[number] == Kind.HALF)
        row["transaction"] = None if owner is None else str(TransactionId.from_bytes(owner))
        row["damaged"], row["lost"] = None, False
        if (damage := damaged.get(number)) is not None:
            row |= {"damaged": str(damage), "lost": not damage.body_only, "body": None}
        if row["lost"]:
            row |= {"topic": None, "message_id": None}
    return rows


def describe(row: dict[str, Any]) -> Message:
    """Convert a row of :func:`_rows` to JSON: the message id in hex, the body in base64."""
    identity, body = row["message_id"], row["body"]
    message: Any = {name: row[name] for name in MessageFields.__annotations__}
    message["properties"] = dict(row["properties"] or ())
    message["message_id"] = None if identity is None else identity.hex()
    message["body_base64"] = None if body is None else base64.b64encode(body).decode()
    return message  # type: ignore[no-any-return]


def damaged_places(engine: Readable, group: str, places: Int64s) -> Bools:
    """Return a mask of ``places`` (rows of queue id and offset): whether the log has lost the content of what a group
    would be delivered there."""

    def look() -> Int64s:
        ledger = engine.shard.ledger
        return positions_of(ledger.topics, places[:, 0], places[:, 1], ledger.groups.by_name.get(group))

    positions = engine.look(look).result()
    mask = np.zeros(len(places), bool)
    stored = np.flatnonzero(positions >= engine.log.first_position)
    _, damaged = engine.log.salvage(positions[stored], ["message_id"])
    mask[stored[list(damaged)]] = True
    return mask
