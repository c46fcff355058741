"""How metadata, JSON and errors travel."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error

Json = dict[str, Any]
"""A JSON object as it travels; :mod:`escrowmq.wire.actions` says what is in it."""

_REQUEST_ID = struct.Struct("<Q")


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
    return request_id, unpack_json(rest) if rest else {}


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
    """An error as it travels: {code (number), name, message, hint, retry_after?}."""
    content: Json = {
        "code": int(problem.code),
        "name": problem.code.name,
        "message": problem.message,
        "hint": problem.hint,
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
