"""JSON that travels: one object, in UTF-8, bounded before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from escrowmq.errors import Code, Rejected
from escrowmq.wire.bounded import check_json

Json = dict[str, Any]
"""A JSON object as it travels; :mod:`escrowmq.wire.actions` says what is in it."""

LONGEST_MESSAGE = 1000
"""Characters of an error's message and of its hint; what they quote of a request may be long."""
MAX_OPTIONS_BYTES = 1 << 20
"""The request of a read."""
MAX_REQUEST_BYTES = 16 << 20
"""An action's request: 100,000 ids and what goes with them."""
MAX_VALUES = 1_000_000
"""Names and values of one request: 100,000 items of three fields, and room to spare."""


def unpack_request(raw: bytes, most_bytes: int = MAX_OPTIONS_BYTES) -> Json:
    """Parse a JSON object of a peer, its size checked first; Rejected(BAD_REQUEST, BATCH_TOO_LARGE)."""
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
