"""Possible meanings of a search text: a message id, a key, a transaction, or a place in a queue."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escrowmq.errors import Code, Misuse
from escrowmq.model import TransactionId, message_id
from escrowmq.wire.values import LARGEST_NUMBER, MAX_QUEUE

MOST = 10_000
"""Maximum length of a search text, in characters. No key or id is longer."""
_TRANSACTION = re.compile(r"[0-9a-fA-F]{1,8}-[0-9a-fA-F]{1,8}-[0-9a-fA-F]{1,16}")
_PLACE = re.compile(r"([A-Za-z0-9._-]{1,127})/([0-9]{1,10})/([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class Sought:
    """A search text with each of its possible meanings."""

    text: str
    message_id: bytes
    """The id itself, or the id that is derived from the text."""
    transaction: TransactionId | None
    place: tuple[str, int, int] | None
    """Topic, queue and offset, written as in the names of dead letters."""


def parse_wanted(wanted: str) -> Sought:
    """Return the possible meanings of ``wanted``. Raises Misuse(BAD_ARGUMENT) for an empty or too long text."""
    if not isinstance(wanted, str) or not wanted.strip():
        raise Misuse(Code.BAD_ARGUMENT, "nothing to look for", "an id, a key, a transaction, or TOPIC/QUEUE/OFFSET")
    if len(wanted) > MOST:
        raise Misuse(Code.BAD_ARGUMENT, f"{len(wanted):,} characters are no id and no key", f"at most {MOST:,}")
    place = None
    if (match := _PLACE.fullmatch(wanted.strip())) is not None:
        queue, offset = int(match[2]), int(match[3])
        place = (match[1], queue, offset) if queue <= MAX_QUEUE and offset <= LARGEST_NUMBER else None
    printed = wanted.strip() if _TRANSACTION.fullmatch(wanted.strip()) else None
    identity = None
    if printed is not None:
        try:
            identity = TransactionId.parse(printed)
        except Misuse:
            identity = None
    return Sought(wanted, message_id(wanted), identity, place)
