"""Rows of the system views as messages, so that a program for messages reads them, too.

- ``%half`` and ``%dead-letters.GROUP`` hold messages. The ``offset`` of a half message is its log position: it has none
  in its queue.
- A row of ``%op`` is a message of the topic ``%op``, as RocketMQ's operation topic has them: its tag is what was
  decided, its key the transaction, its body the position of the half message, in digits.
- A row of ``%acks``: its tag is the consumer group, its key TOPIC/QUEUE, its body the run of offsets, FIRST-LAST.
- A row of ``%group-acts``: its tag is what was done (retry, discard, edit, reset), its key TOPIC/QUEUE/OFFSET, its body
  that of an edited message.

Of the last three the properties have every column as text, and ``message_id`` is the position in 16 bytes. ``queue`` is
0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.schemas import DELIVERY
from escrowmq.wire import ACK_VIEW_NAME, DAMAGED_COLUMN, GROUP_ACT_VIEW_NAME, HALF_VIEW_NAME, OP_VIEW_NAME, read_schema


def messages_of(source: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that were read of a source as columns of DELIVERY, as far as their columns are there;
    ``damaged`` stays."""
    if source == HALF_VIEW_NAME:
        return _with(rows, {"offset": rows.column("position")})
    if source in _MESSAGES:
        made = [_MESSAGES[source](row) for row in rows.to_pylist()]
        schema = read_schema("", damaged=DAMAGED_COLUMN in rows.schema.names)
        return pa.RecordBatch.from_pylist(made, schema=schema)
    return rows


def _with(rows: pa.RecordBatch, more: dict[str, pa.Array]) -> pa.RecordBatch:
    size = rows.num_rows
    every = more | {"lease": pa.array(np.full(size, -1)), "attempt": pa.array(np.zeros(size, np.int32))}
    for name, column in every.items():
        rows = rows.append_column(name, column)
    return rows


def _decision(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get(DAMAGED_COLUMN):
        return _message(row, OP_VIEW_NAME, "decided_us", {})
    told = {
        "transaction": str(TransactionId.from_bytes(row["transaction"])) if "transaction" in row else None,
        "state": TransactionState(row["state"]).name.lower() if "state" in row else None,
        "decided_by": DecidedBy(row["decided_by"]).name.lower() if "decided_by" in row else None,
        "half_position": row.get("half_position"),
    }
    more = {"tag": told["state"], "key": told["transaction"], "body": str(told["half_position"]).encode()}
    return _message(row, OP_VIEW_NAME, "decided_us", told) | more | {"transaction": row.get("transaction")}


def _acknowledgement(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get(DAMAGED_COLUMN):
        return _message(row, ACK_VIEW_NAME, "acked_us", {})
    told = {name: row.get(name) for name in ("group", "topic", "queue", "start", "count", "attempt", "lease")}
    known = told["topic"] is not None
    key = f"{told['topic']}/{told['queue']}" if known else None
    run = f"{told['start']}-{(told['start'] or 0) + (told['count'] or 1) - 1}".encode()
    return _message(row, ACK_VIEW_NAME, "acked_us", told) | {"tag": told["group"], "key": key, "body": run}


def _group_act(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get(DAMAGED_COLUMN):
        return _message(row, GROUP_ACT_VIEW_NAME, "acted_us", {})
    told = {name: row.get(name) for name in ("group", "topic", "queue", "offset", "act", "edited_from")}
    told["message_id"] = row["message_id"].hex() if row.get("message_id") else None
    place = f"{told['topic']}/{told['queue']}/{told['offset']}" if told["topic"] is not None else None
    more = {"tag": told["act"], "key": place, "body": row.get("body") or b""}
    return _message(row, GROUP_ACT_VIEW_NAME, "acted_us", told) | more


def _message(row: Mapping[str, Any], topic: str, time: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of DELIVERY; a damaged one (nothing is known of it) without content."""
    whole = bool(told)
    return {
        **dict.fromkeys(DELIVERY.names),
        "topic": topic,
        "properties": [(name, str(value)) for name, value in told.items() if value is not None] if whole else None,
        "message_id": row["position"].to_bytes(16, "big") if whole else None,
        "queue": 0,
        "offset": row["position"],
        "born_us": row.get(time, 0) if whole else None,
        "stored_us": row.get(time, 0),
        "position": row["position"],
        "lease": -1,
        "attempt": 0,
        DAMAGED_COLUMN: row.get(DAMAGED_COLUMN),
    }


_MESSAGES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    OP_VIEW_NAME: _decision,
    ACK_VIEW_NAME: _acknowledgement,
    GROUP_ACT_VIEW_NAME: _group_act,
}
