"""Names of topics, groups, instances and members: one pattern."""

from __future__ import annotations

import re
from typing import Any

from escrowmq.errors import Code, Misuse, Rejected

MAX_NAME = 127  # maximum characters of a name

EDITED_FROM = "ESCROWMQ_EDITED_FROM"
"""Property of a message that replaces a dead letter for one group: the id of the replaced message, 32 hex digits."""

_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def is_name(name: str) -> bool:
    """Decide whether ``name`` is valid for a topic or group: 1 to 127 of ``A-Z a-z 0-9 . _ -``, without a dot first."""
    return _NAME.fullmatch(name) is not None


def check_name(name: Any, code: Code) -> str:
    """Return ``name`` if it is valid for a topic or group. Raises ``code``: Misuse for a non-str, else Rejected."""
    if type(name) is not str or not is_name(name):
        raise Rejected(code, f"{name!r:.200}") if isinstance(name, str) else Misuse(code, f"{name!r:.200} is not a str")
    return name


def is_text(value: str) -> bool:
    """Decide whether ``value`` can be stored as UTF-8 (JSON can contain lone surrogates)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
