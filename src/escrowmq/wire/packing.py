"""How calls travel over Arrow Flight (gRPC). Everything between ``<>`` is JSON: UTF-8, one object. Exchanges of a few rows can take the
[lean carrier](lean.md), too, with the same kinds, options, rows and codes; whoever speaks Flight can do everything.

**Exchanges** (``DoExchange``): one per kind and connection. Requests are pipelined.

| step | who | what |
| --- | --- | --- |
| 1 | client | the descriptor's command is ``<{"protocol": 1, "exchange": KIND, ...options that never change}>`` |
| 2 | client | begins the kind's request schema (for ``receive``: the schema without fields) |
| 3 | broker | begins the kind's answer schema at once |
| 4 | client | one chunk per request, with the metadata *id, options*; for ``receive`` a batch of no rows, or metadata alone |
| 5 | broker | one chunk per answer, with the metadata *id*; if the request is refused as a whole, metadata alone: *id*, ``<{"error": ERROR}>`` |
| 6 | client | one chunk with the metadata 0, ``<{"last": true}>`` alone, or is done writing; the broker answers what it has begun, then ends |

A chunk's metadata (``app_metadata``) is the request's id (8 bytes, unsigned, little endian), then a JSON object, or nothing for ``{}``.
Ids are the client's and need only be unique among its requests in flight on that exchange. Answers of ``send``, ``prepare``, ``end``
and ``settle`` may come in another order than their requests (they *take effect* in order); those of ``receive`` come when they come.
Options of the command and of the chunk are merged, the chunk's winning. When the exchange ends, for whatever reason, its waiting
receives are withdrawn.

**Checks** (``DoExchange``): the command is ``<{"protocol": 1, "exchange": "checks", "session": S}>``. The client begins the schema
without fields and then writes nothing but step 6; the broker begins the schema of checks and writes batches without being asked, each with the
metadata id 0. The broker may ask the session for as long as the exchange lasts; step 6, closing or losing it ends that.
When the session is fenced, the broker says so in a chunk with the metadata 0, ``<{"error": ERROR}>`` alone, and asks no more.
Answers go through an ``end`` exchange with the options ``{"session": S, "by": 1}``.

**Actions** (``DoAction``): the type is the action's name, the body ``<request>`` (empty: ``{}``); exactly one result, ``<answer>``.

**Reads** (``DoGet``): the ticket is ``<read request>``; the stream has the requested columns.

**Errors**: ``ERROR`` is ``<{"code", "name", "message", "hint", "retry_after"?}>``. An exchange that cannot begin, or whose chunk cannot
be read at all (garbage, another schema than begun, no request id), an action and a read fail as a Flight error whose ``extra_info`` is
``ERROR``; without ``extra_info`` the carrier itself failed. After such a failure writing may raise first: the read side then has the
error. A stopping broker answers SHARD_STOPPED.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error
from escrowmq.wire.bounded import check_json

Json = dict[str, Any]
"""A JSON object as it travels; :mod:`escrowmq.wire.actions` says what is in it."""

LAST: Json = {"last": True}
"""What a client says on an exchange when it wants no more. Clients on Arrow's C++ library say it instead of being done writing,
because that must not happen at the moment at which the exchange ends by itself: gRPC aborts the process."""

_REQUEST_ID = struct.Struct("<Q")

LONGEST_MESSAGE = 1000
"""Characters of an error's message: gRPC takes no more than 8 KiB of what goes with a failed call, escapes counted."""
MAX_OPTIONS_BYTES = 1 << 20
"""JSON that goes along with something else: a command, a ticket, a chunk's metadata."""
MAX_REQUEST_BYTES = 16 << 20
"""An action's request: 100,000 ids and what goes with them."""
MAX_VALUES = 1_000_000
"""Names and values of one request: 100,000 items of three fields, and room to spare."""


def pack_metadata(request_id: int, content: Mapping[str, object] | None = None) -> bytes:
    """The ``app_metadata`` of one chunk: the request's id (u64, little endian), then JSON; no bytes after the id: {}."""
    head = _REQUEST_ID.pack(request_id)
    return head + json.dumps(content, separators=(",", ":")).encode() if content else head


def unpack_metadata(raw: bytes) -> tuple[int, Json]:
    """The inverse of :func:`pack_metadata`; Rejected(BAD_REQUEST) for anything else."""
    if len(raw) < _REQUEST_ID.size:
        raise Rejected(Code.BAD_REQUEST, "app_metadata must begin with a request id of 8 bytes")
    (request_id,) = _REQUEST_ID.unpack_from(raw)
    rest = raw[_REQUEST_ID.size :]
    return request_id, unpack_request(rest) if rest else {}


def unpack_request(raw: bytes, most_bytes: int = MAX_OPTIONS_BYTES) -> Json:
    """One JSON object of somebody else's, its size checked before it is parsed; Rejected(BAD_REQUEST, BATCH_TOO_LARGE)."""
    check_json(raw, most_bytes=most_bytes, most_values=MAX_VALUES)
    return unpack_json(raw)


def unpack_json(raw: bytes) -> Json:
    """One JSON object; Rejected(BAD_REQUEST) for anything else."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise Rejected(Code.BAD_REQUEST, f"not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise Rejected(Code.BAD_REQUEST, "a JSON object is expected")
    return content


def pack_error(problem: EscrowError) -> Json:
    """An error as it travels: {code (number), name, message, hint, retry_after?}. What it quotes of a request may be long: it is cut."""
    content: Json = {
        "code": int(problem.code),
        "name": problem.code.name,
        "message": problem.message[:LONGEST_MESSAGE],
        "hint": problem.hint[:LONGEST_MESSAGE],
    }
    if isinstance(problem, Overloaded):
        content["retry_after"] = problem.retry_after
    return content


def unpack_error(content: Json) -> EscrowError:
    """The error that :func:`pack_error` was given; a code of a newer protocol becomes BAD_REQUEST with its text."""
    message, hint = content.get("message"), content.get("hint")
    try:
        code = Code(int(content["code"]))
        return error(code, message, hint, float(content.get("retry_after", 1.0)))
    except (KeyError, ValueError, TypeError):
        return Rejected(Code.BAD_REQUEST, f"{content.get('name', 'error')}: {message}", hint)
