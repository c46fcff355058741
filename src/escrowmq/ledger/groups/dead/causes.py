"""The kind of a cause: what is left of a consumer's words without the numbers and ids in them, so that like causes are
counted together.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

MOST_TEXT = 200
"""Characters of a kind."""

_ATTEMPT = re.compile(r",? attempt \d+ of \d+\s*$")
_TRACEBACK = "Traceback (most recent call last)"
_HEX = r"[0-9a-fA-F]"
_IDS = re.compile(
    rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"  # a UUID
    rf"|\b(?={_HEX}*[0-9]){_HEX}{{8,}}\b"
    r"|\b(?=\w*\d)\w{16,}\b"
    r"|\d+"
)
_JOINED = re.compile(r"#(?:[.,:/-]#)+")


@lru_cache(4096)
def cause_and_kind(text: str) -> tuple[str, str]:
    """Return a cause as one and the same text for equal ones, mostly, and its kind as one and the same object for
    equal ones, always: kinds can be compared by their addresses, however many causes there are."""
    return text, sys.intern(kind_of(text))


def kind_of(cause: str) -> str:
    """Return the first line (of a traceback the last one) without the attempt, ``#`` instead of numbers and ids, at
    most :data:`MOST_TEXT` characters. The kind of a kind is itself."""
    lines = [line for line in cause.splitlines() if line.strip()] or [""]
    line = lines[-1 if lines[0].startswith(_TRACEBACK) else 0]
    masked = _JOINED.sub("#", _IDS.sub("#", _ATTEMPT.sub("", line)))
    return " ".join(masked.split())[:MOST_TEXT].strip()
