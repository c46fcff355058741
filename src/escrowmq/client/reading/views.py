"""The rows of system views as messages.

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

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.schemas import DELIVERY
from escrowmq.wire import ACK_VIEW_NAME, DAMAGED_COLUMN, GROUP_ACT_VIEW_NAME, HALF_VIEW_NAME, OP_VIEW_NAME, read_schema


def messages_of(source: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the rows of a source, as far as their columns were read, to messages with columns of DELIVERY. Rows of a
    topic stay as they are; ``damaged`` stays."""
    if source == HALF_VIEW_NAME:
        return _with(rows, {"offset": rows.column("position")})
    if source in _MESSAGES:
        time, convert = _MESSAGES[source]
        made = [_message(row, source, time, convert) for row in rows.to_pylist()]
        schema = read_schema("", damaged=DAMAGED_COLUMN in rows.schema.names)
        return pa.RecordBatch.from_pylist(made, schema=schema)
    return rows


def _with(rows: pa.RecordBatch, more: dict[str, pa.Array]) -> pa.RecordBatch:
    size = rows.num_rows
    every = more | {"lease": pa.array(np.full(size, -1)), "attempt": pa.array(np.zeros(size, np.int32))}
    for name, column in every.items():
        rows = rows.append_column(name, column)
    return rows


Columns = dict[str, Any]


def _decision(row: Columns) -> tuple[Columns, Columns]:
    known = {
        "transaction": str(TransactionId.from_bytes(row["transaction"])) if "transaction" in row else None,
        "state": TransactionState(row["state"]).name.lower() if "state" in row else None,
        "decided_by": DecidedBy(row["decided_by"]).name.lower() if "decided_by" in row else None,
        "half_position": row.get("half_position"),
    }
    more = {"tag": known["state"], "key": known["transaction"], "body": str(known["half_position"]).encode()}
    return known, more | {"transaction": row.get("transaction")}


def _acknowledgement(row: Columns) -> tuple[Columns, Columns]:
    known = {name: row.get(name) for name in ("group", "topic", "queue", "start", "count", "attempt", "lease")}
    run = f"{known['start']}-{(known['start'] or 0) + (known['count'] or 1) - 1}".encode()
    return known, {"tag": known["group"], "key": _place(known, "topic", "queue"), "body": run}


def _group_act(row: Columns) -> tuple[Columns, Columns]:
    known = {name: row.get(name) for name in ("group", "topic", "queue", "offset", "act", "edited_from")}
    known["message_id"] = row["message_id"].hex() if row.get("message_id") else None
    body = row.get("body") or b""
    return known, {"tag": known["act"], "key": _place(known, "topic", "queue", "offset"), "body": body}


def _place(known: Columns, *names: str) -> str | None:
    return None if known["topic"] is None else "/".join(str(known[name]) for name in names)


def _message(row: Columns, topic: str, time: str, convert: Callable[[Columns], tuple[Columns, Columns]]) -> Columns:
    """Convert a row of a view to a row of DELIVERY. ``time``: the column with its time; ``convert`` returns its
    properties and other fields. A damaged row, of which nothing is known, gets no content."""
    position, time_us, damaged = row["position"], row.get(time, 0), row.get(DAMAGED_COLUMN)
    message = dict.fromkeys(DELIVERY.names) | {"lease": -1, "attempt": 0, DAMAGED_COLUMN: damaged}
    message |= {"topic": topic, "queue": 0, "offset": position, "position": position, "stored_us": time_us}
    if not damaged:
        properties, more = convert(row)
        texts = [(name, str(value)) for name, value in properties.items() if value is not None]
        message |= {"properties": texts, "message_id": position.to_bytes(16, "big"), "born_us": time_us, **more}
    return message


_MESSAGES = {
    OP_VIEW_NAME: ("decided_us", _decision),
    ACK_VIEW_NAME: ("acked_us", _acknowledgement),
    GROUP_ACT_VIEW_NAME: ("acted_us", _group_act),
}
