"""Names of topics, groups, instances and members: one pattern."""

from __future__ import annotations

import re
from typing import Any

from escrowmq.errors import Code, Misuse, Rejected

MAX_NAME = 127
"""Characters of a name."""

EDITED_FROM = "ESCROWMQ_EDITED_FROM"
"""The property of a message that one group gets in place of a dead letter: the id of the message that it replaces, as
32 hex digits.
"""

_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def is_name(name: str) -> bool:
    """Return whether ``name`` can name a topic or group: 1 to 127 of ``A-Z a-z 0-9 . _ -``, not starting with a dot."""
    return _NAME.fullmatch(name) is not None


def check_name(name: Any, code: Code) -> str:
    """``name`` itself if it can name a topic or group. Raises ``code``: Misuse if it is no str, Rejected otherwise."""
    if type(name) is not str or not is_name(name):
        raise Rejected(code, f"{name!r:.200}") if isinstance(name, str) else Misuse(code, f"{name!r:.200} is not a str")
    return name


def is_text(value: str) -> bool:
    """Return whether ``value`` can be stored as UTF-8 (JSON can carry half a character)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
