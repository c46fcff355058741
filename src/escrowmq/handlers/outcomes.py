"""What a handler raises to settle its message, what became of a message, and the cause that a dead letter keeps."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Literal

import msgspec

from escrowmq.client.consuming.options import delay_us
from escrowmq.message.limits import MAX_CAUSE

_HERE = str(Path(__file__).parent)
MAX_HEAD = MAX_CAUSE // 2
"""Maximum characters of an exception's own text in a cause; the rest is for its traceback."""
_CUT = "  ...\n"


class Retry(Exception):
    """Raised by a handler: redeliver the message. ``after``: seconds until then, None: the back-off of the group.

    It is a failed attempt: after the last one the message is a dead letter.
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, after: float | None = None) -> None:
        super().__init__(reason)
        delay_us(after)  # raises Misuse(BAD_ARGUMENT)
        self.after = after


class Discard(Exception):
    """Raised by a handler: the message becomes a dead letter now, with this reason, whatever its attempt."""


class Undecodable(Discard):
    """A body that is not of the annotated type: a dead letter at once, because a repeat cannot succeed."""


class Unavailable(Exception):
    """The database of ``once=`` could not begin a transaction: no attempt of the message, which is given back."""


Outcome = Literal["acked", "retried", "dead", "released"]
"""``released``: given back without an attempt."""


class Handled(msgspec.Struct, frozen=True):
    """What became of a message (of a handler with ``batch``: of a batch, except in ``run_available``)."""

    handler: str
    message: Any
    outcome: Outcome
    seconds: float
    error: BaseException | None = None


def cause_of(problem: BaseException) -> str:
    """Return an exception with its traceback as a cause: at most ``MAX_CAUSE`` characters, the exception first.

    The frames of this package and, if there is no room for all, the outer ones are left out.
    """
    head = "".join(traceback.format_exception_only(problem)).strip()[:MAX_HEAD]
    found = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in found if not frame.filename.startswith(_HERE)]
    kept: list[str] = []
    left = MAX_CAUSE - len(head) - len(_CUT) - 1
    for number, text in enumerate(reversed(traceback.format_list(own))):
        if len(text) > left:
            kept.append(text[:left] if number == 0 else _CUT)
            break
        kept.append(text)
        left -= len(text)
    return "\n".join([head, "".join(reversed(kept)).rstrip()]).rstrip()


def reason_of(problem: BaseException) -> str:
    """Return the reason of a :class:`Retry` or :class:`Discard`, which need no traceback."""
    return (str(problem) or type(problem).__name__)[:MAX_CAUSE]
