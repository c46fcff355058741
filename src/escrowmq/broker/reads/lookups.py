"""Look-ups: the timeline of a transaction, messages by id or key. They are rare, so they may scan the log."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.columns import owners_of
from escrowmq.broker.reads.readable import Readable
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.listings import transaction
from escrowmq.log.seam import Frame
from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.schemas import ID, Kind
from escrowmq.wire.actions.messages import FoundMessage, Message, MessageFields
from escrowmq.wire.actions.transactions import Event, Shown

SCAN_FRAMES = 256
"""Frames looked at in one go, newest first."""
MAX_SHOWN = 100
"""Messages of one transaction that are shown in full."""
_CHECKING = {Kind.CHECKED: "checked", Kind.PARKED: "parked", Kind.REOPENED: "reopened"}


def show_transaction(engine: Readable, identity: TransactionId) -> Shown:
    """A transaction with its messages and what happened to it when. Rejected(UNKNOWN_TRANSACTION, WRONG_SHARD)."""
    found: Any = engine.look(lambda: transaction(engine.shard.ledger, identity)).result()
    positions: Int64s = found.pop("positions")
    end = engine.look(lambda: engine.log.next_position).result()
    stored = engine.log.read(positions[:MAX_SHOWN])
    shown: Shown = found | {
        "message_count": len(positions),
        "messages": [describe(row) for row in _rows(engine, stored, positions[:MAX_SHOWN])],
        "timeline": _timeline(engine, identity, positions, end),
    }
    return shown


def _timeline(engine: Readable, identity: TransactionId, positions: Int64s, end: int) -> list[Event]:
    times = engine.log.time_at(positions)
    events: list[Event] = [
        {"time_us": int(time), "event": "prepared", "messages": int((times == time).sum())} for time in np.unique(times)
    ]
    asked = 0
    for frame in engine.log.frames_at(identity.position, [*_CHECKING, Kind.DECIDED, Kind.BATCH_DECIDED], end):
        at = np.flatnonzero(frame.batch.column("transaction").to_numpy() == identity.position)
        for row in at.tolist():
            event: Any = {"time_us": frame.time_us, "position": frame.position + row}
            if frame.kind not in _CHECKING:
                event["event"] = TransactionState(frame.batch.column("state")[row].as_py()).name.lower()
                event["by"] = DecidedBy(frame.batch.column("decided_by")[row].as_py()).name.lower()
                event["session"] = frame.batch.column("epoch")[row].as_py()
            else:
                event["event"] = _CHECKING[frame.kind]
                asked = 0 if frame.kind == Kind.REOPENED else asked + (frame.kind == Kind.CHECKED)
                if frame.kind == Kind.CHECKED:
                    event["attempt"] = asked
            events.append(event)
    return events


def find_messages(
    engine: Readable, message_id: bytes | None, key: str | None, topic: str | None, limit: int
) -> list[FoundMessage]:
    """Messages of an id, or with a key, newest first; each with its state and body."""
    found: list[FoundMessage] = []
    end = engine.look(lambda: engine.log.next_sequence).result()
    for frame in _newest_first(engine, end):
        wanted = {"message_id": pa.scalar(message_id, ID) if message_id else None, "key": key, "topic": topic}
        mask = np.ones(frame.batch.num_rows, bool)
        for column, value in wanted.items():
            if value is not None:
                same = pc.fill_null(pc.equal(frame.batch.column(column), value), False)
                mask &= same.to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(mask)[::-1][: limit - len(found)]
        if len(rows):
            found += _states(engine, rows + frame.position)
        if len(found) >= limit:
            break
    return found


def _newest_first(engine: Readable, end: int) -> Iterator[Frame]:
    while end > 0:
        start = max(end - SCAN_FRAMES, 0)
        frames = list(engine.log.frames(start, [Kind.PLAIN, Kind.HALF], end))
        yield from reversed(frames)
        if not frames and start and next(iter(engine.log.frames(0, None, start)), None) is None:
            return  # nothing below is stored any more
        end = start


def _states(engine: Readable, positions: Int64s) -> list[FoundMessage]:
    stored = engine.log.read(positions)
    half = stored.column("transaction").to_numpy() >= 0
    queue_ids = stored.column("queue_id").to_numpy().tolist()

    def look() -> tuple[list[int], list[int | None]]:
        ledger = engine.shard.ledger
        states = ledger.half_states(positions[half])[0].tolist() if half.any() else []
        offsets = [ledger.queue(q).find(p) for q, p in zip(queue_ids, positions.tolist(), strict=True)]
        return states, offsets

    states, offsets = engine.look(look).result()
    of_halves = iter(states)
    found: list[FoundMessage] = []
    for row, offset, is_half in zip(_rows(engine, stored, positions), offsets, half.tolist(), strict=True):
        state: Any = TransactionState(next(of_halves)).name.lower() if is_half else "plain"
        found.append({**describe(row), "state": state, "offset": offset, "visible": offset is not None})
    return found


def _rows(engine: Readable, stored: pa.RecordBatch, positions: Int64s) -> list[dict[str, Any]]:
    transactions = owners_of(stored, positions, engine.log.shard, engine.log.read)
    rows: list[dict[str, Any]] = stored.to_pylist()
    for row, position, owner in zip(rows, positions.tolist(), transactions.to_pylist(), strict=True):
        row["position"] = position
        row["transaction"] = None if owner is None else str(TransactionId.from_bytes(owner))
    return rows


def describe(row: dict[str, Any]) -> Message:
    """One stored message for JSON."""
    message: Message = {name: row[name] for name in MessageFields.__annotations__} | {  # type: ignore[assignment]
        "properties": dict(row["properties"] or ()),
        "message_id": row["message_id"].hex(),
        "body_base64": base64.b64encode(row["body"]).decode(),
    }
    return message
