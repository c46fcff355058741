"""JSON in requests and answers: one object, in UTF-8, with its size checked before parsing."""

from __future__ import annotations

import json
from typing import Any

from escrowmq.errors import Code, Rejected
from escrowmq.wire.bounded import check_json

Json = dict[str, Any]
"""A JSON object in a request or an answer; :mod:`escrowmq.wire.actions` defines the fields."""

LONGEST_MESSAGE = 1000
"""Maximum characters of an error's message and of its hint; they may quote long parts of a request."""
MAX_OPTIONS_BYTES = 1 << 20
"""Maximum size of a read request."""
MAX_REQUEST_BYTES = 16 << 20
"""Maximum size of an action's request: 100,000 ids with their fields."""
MAX_VALUES = 1_000_000
"""Maximum names and values of one request: 100,000 items of three fields, with reserve."""


def unpack_request(raw: bytes, most_bytes: int = MAX_OPTIONS_BYTES) -> Json:
    """Parse an untrusted JSON object; its size is checked first. Raises Rejected(BAD_REQUEST, BATCH_TOO_LARGE)."""
    check_json(raw, most_bytes=most_bytes, most_values=MAX_VALUES)
    return unpack_json(raw)


def unpack_json(raw: bytes) -> Json:
    """Parse one JSON object. Raises Rejected(BAD_REQUEST) for anything else."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise Rejected(Code.BAD_REQUEST, f"not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise Rejected(Code.BAD_REQUEST, "a JSON object is expected")
    return content
