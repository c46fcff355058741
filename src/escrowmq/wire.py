"""The calls a client can make, whatever carries them: Arrow Flight, or a plain function call when embedded.

Three shapes (see :class:`Link`):

- *exchanges* carry batches both ways, pipelined, answered row for row; the answer's rows match the request's;
- *actions* are small questions and admin acts, JSON both ways;
- *reads* stream batches out: browsing topics and the system views.

The actions, with their requests and answers (JSON; ids as printed text, times in microseconds; ``?`` marks optional):

| action | request | answer |
| --- | --- | --- |
| hello | | protocol, version, shard, epoch, limits {max_body_bytes, max_batch_rows, ...} |
| health | | status ("ok", "full", "stopped", "stopping"), reason |
| stats | | one number a metric |
| session.open | group, instance, transactional, resume? (a session of this process that the broker has forgotten: Fenced if a newer process has its name) | session |
| topics.list | | topics [{name, queues [{queue, queue_id, head, end}]}] |
| topics.offsets | topic, queue?, time_us? | shard, queues [{queue, head, end, offset_at?}] (offset_at: the first that became visible at time_us or later, end without one); of %half, %op and %acks: their log positions |
| topics.wait | topic, after [[queue, offset]], every? (queues not named too, from 0 on), wait_ms? | queues [{queue, head, end}] that have messages there or later; none when the time is over |
| topics.create | name, queues?, may_exist? | name, queues |
| producers.list | | producers [{group, transactional, members, open, parked, oldest_us}] |
| groups.subscribe | group, topics, tags?, ordered?, start?, max_attempts?, retry_backoff?, retry_backoff_max?, in_doubt? ("redeliver", "hold") | group, created |
| groups.join | group (of in_doubt "hold"), instance, process (random int of the client's), resume?, keep? [[lease, offset behind the last that came]] | member, epoch: options of its receives |
| groups.members | group | members [{member, instance, epoch, fenced, joined_us, leases, messages, in_doubt, held [{lease, topic, queue, first, last, messages, in_doubt, attempt, deadline_us}]}] |
| groups.fence | group, instance | member, messages (given back to the group) |
| groups.list | | groups [{name, topics, tags, ordered, dead_letters, queues [{topic, queue, head, end, floor, next, ...}]}] |
| transactions.list | state?, group?, older_than?, limit?, after? | transactions [...], next? |
| transactions.show | id | the transaction, messages [...], timeline [{time_us, event, ...}] |
| transactions.settle | ids, outcome ("commit", "rollback") | codes [name] |
| transactions.recheck | ids | codes [name] |
| writers.commit | writer (any text), batch, transactions [id], session | status (COMMITTED, ALREADY_COMMITTED), last, rolled_back |
| writers.show | writer | batch (the last decided one, or null) |
| writers.list | limit, after? | writers [{writer (hex), group, batch, decided_us, used_us, open, parked, members}], next? |
| writers.forget | writer (as listed, or the text it was made of) | group, sessions; CONFLICT while it has undecided transactions |
| dead_letters.list | group, limit?, after? | dead_letters [{topic, queue, offset, attempts, cause, dead_us, key, tag, message_id}] |
| dead_letters.settle | group, items [{topic, queue, offset}] or all, act ("retry", "discard") | codes [name] |
| lookup | message_id? or key?, topic?, limit? | messages [{..., state, body_base64}] |
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Protocol

import pyarrow as pa

from escrowmq import schemas
from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error

PROTOCOL_VERSION = 1

HALF_VIEW_NAME = "%half"
OP_VIEW_NAME = "%op"
ACK_VIEW_NAME = "%acks"
VIEWS: dict[str, pa.Schema] = {
    HALF_VIEW_NAME: schemas.HALF_VIEW,
    OP_VIEW_NAME: schemas.OP_VIEW,
    ACK_VIEW_NAME: schemas.ACK_VIEW,
}
"""The system views that are read by log position."""
DEAD_LETTER_PREFIX = "%dead-letters."  # + consumer group: its dead-letter queue, readable like a topic


class Exchange(StrEnum):
    """Batch exchanges. Each has one request and one answer schema; the options are JSON."""

    SEND = "send"  # options: {"session": int, "flush": "sync"|"async"}
    PREPARE = "prepare"  # options: {"session": int}
    END = "end"  # options: {"session": int, "by": DecidedBy}
    SETTLE = "settle"  # options: {"group": str}
    RECEIVE = "receive"
    # options: {"group": str, "member": int, "max_messages": int, "max_bytes": int, "wait_ms": int, "lease_ms": int|None,
    #           "epoch": int|None}  (epoch: of groups.join, in groups that hold what is in doubt)
    # The answer is empty when nothing came within wait_ms (long poll). A member is a random int of the client's.


REQUEST: dict[Exchange, pa.Schema] = {
    Exchange.SEND: schemas.OUTGOING,
    Exchange.PREPARE: schemas.OUTGOING,
    Exchange.END: schemas.ENDING,
    Exchange.SETTLE: schemas.SETTLING,
    Exchange.RECEIVE: pa.schema([]),
}
ANSWER: dict[Exchange, pa.Schema] = {
    Exchange.SEND: schemas.PRODUCED,
    Exchange.PREPARE: schemas.PRODUCED,
    Exchange.END: schemas.ENDED,
    Exchange.SETTLE: schemas.ENDED,
    Exchange.RECEIVE: schemas.DELIVERY,
}


class CheckStream(Protocol):
    """A live check-back subscription; closing it takes the member off the list of those to ask."""

    def close(self) -> None: ...

    @property
    def broken(self) -> bool:
        """Whether the carrier lost it (the client should open another)."""
        ...

    @property
    def problem(self) -> EscrowError | None:
        """Why, if it is known."""
        ...


class Link(Protocol):
    """One broker, as a client sees it. Thread-safe. All errors are EscrowError."""

    @property
    def address(self) -> str: ...

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        """Start one exchange; the future's answer has schema ``ANSWER[kind]``, or raises EscrowError.

        Requests of one kind on one link keep their order. Unknown(DISCONNECTED) if the carrier broke after the request
        may have left; the link then reconnects by itself, with back-off, when it is used again.
        """
        ...

    def action(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One JSON question; raises EscrowError, Unknown(TIMED_OUT) after ``timeout`` seconds."""
        ...

    def read(self, request: dict[str, Any]) -> pa.RecordBatchReader:
        """Browse: {"source": topic or view, "queue": int, "start": int, "end": int|None, "max_rows": int|None,
        "columns": [..]|None}. Topics by queue and offset (schema DELIVERY), ``%half``, ``%op`` and ``%acks`` by position.

        Filters, all optional, are applied before rows are counted or sent: "tags" (a list: one of them), "key" (this
        one), "stored_from_us" (at that time or later), "stored_until_us" (before it; for ``%op``: decided, for ``%acks``:
        acked), "group" (``%acks`` only: of that consumer group). ``%op`` and ``%acks`` have neither tags nor keys.
        Columns that are not asked for are not read. Rejected(RANGE_PURGED) if a range has partly left the log, at once or
        in the middle of the stream.
        """
        ...

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """Be a member to ask: ``on_checks`` gets batches of schema CHECKS, on a thread of the link, until closed.

        Answers go back through ``exchange(Exchange.END, ..., {"session": s, "by": DecidedBy.CHECK})``.
        """
        ...

    def close(self) -> None: ...


_REQUEST_ID = struct.Struct("<Q")


def pack_metadata(request_id: int, content: dict[str, Any] | None = None) -> bytes:
    """The ``app_metadata`` of one chunk: the request's id (u64, little endian), then JSON; no bytes after the id: {}."""
    head = _REQUEST_ID.pack(request_id)
    return head + json.dumps(content, separators=(",", ":")).encode() if content else head


def unpack_metadata(raw: bytes) -> tuple[int, dict[str, Any]]:
    """The inverse of :func:`pack_metadata`; Rejected(BAD_REQUEST) for anything else."""
    if len(raw) < _REQUEST_ID.size:
        raise Rejected(Code.BAD_REQUEST, "app_metadata must begin with a request id of 8 bytes")
    (request_id,) = _REQUEST_ID.unpack_from(raw)
    rest = raw[_REQUEST_ID.size :]
    return request_id, unpack_json(rest) if rest else {}


def unpack_json(raw: bytes) -> dict[str, Any]:
    """One JSON object; Rejected(BAD_REQUEST) for anything else."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise Rejected(Code.BAD_REQUEST, f"not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise Rejected(Code.BAD_REQUEST, "a JSON object is expected")
    return content


def pack_error(problem: EscrowError) -> dict[str, Any]:
    """An error as it travels: {code (number), name, message, hint, retry_after?}."""
    content: dict[str, Any] = {
        "code": int(problem.code),
        "name": problem.code.name,
        "message": problem.message,
        "hint": problem.hint,
    }
    if isinstance(problem, Overloaded):
        content["retry_after"] = problem.retry_after
    return content


def unpack_error(content: dict[str, Any]) -> EscrowError:
    """The error that :func:`pack_error` was given; a code of a newer protocol becomes BAD_REQUEST with its text."""
    message, hint = content.get("message"), content.get("hint")
    try:
        code = Code(int(content["code"]))
        return error(code, message, hint, float(content.get("retry_after", 1.0)))
    except (KeyError, ValueError, TypeError):
        return Rejected(Code.BAD_REQUEST, f"{content.get('name', 'error')}: {message}", hint)
