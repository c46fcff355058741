"""Conversion of database errors into the errors of a set store."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from escrowmq.errors import Code, Corrupt, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.outbox.dialects import has_mark, in_a_line, is_busy, is_denied, is_full, may_repeat

_NO_TABLE = {"42P01", "3F000", 1146, "no such table"}
_OTHER_SHAPE = {"42703", "42804", "42809", "42P10", "42883", 1054, 1347, "has no column named", "no such column",
    "does not match any PRIMARY KEY", "datatype mismatch", "CHECK constraint failed", "NOT NULL constraint failed",
    "cannot modify", "values for"}  # fmt: skip
_DAMAGED = {"malformed", "file is not a database"}


def is_missing(problem: DBAPIError) -> bool:
    """Decide whether a table is missing."""
    return has_mark(problem, _NO_TABLE)


def failure(problem: DBAPIError) -> EscrowError:
    """Return the error to raise."""
    text = in_a_line(problem)
    if is_full(problem):
        what, hint = f"the set store's database is full: {text}", "free space there; nothing was recorded"
        return Overloaded(Code.DISK_FULL, what, hint)
    if may_repeat(problem) or is_busy(problem):
        what = f"the set store's database does not take this now: {text}"
        return Overloaded(Code.QUEUE_FULL, what, "repeat it; nothing was recorded")
    if is_denied(problem):
        return Denied(Code.DENIED, text, "may this user make tables there, and read and change them?")
    if has_mark(problem, _NO_TABLE) or has_mark(problem, _OTHER_SHAPE):
        return other_shape(text)
    if has_mark(problem, _DAMAGED):
        hint = "nothing was changed; name another database, and recover from the business tables"
        return Corrupt(Code.DAMAGED, f"the set store's database: {text}", hint)
    return Unknown(Code.DISCONNECTED, f"the set store's database: {text}")


def other_shape(text: str) -> Misuse:
    """Return the error for tables with the names of this store but other columns."""
    hint = "tables escrow_half_set, escrow_commit_set, escrow_set_run, escrow_taken, escrow_set_store are its own"
    return Misuse(Code.BAD_SETTING, f"the set store's tables are of another shape: {text}", hint)
