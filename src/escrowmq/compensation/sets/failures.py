"""What a database's error means to whoever called a set store."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from escrowmq.errors import Code, Corrupt, Denied, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.outbox.dialects import has_mark, in_a_line

_NO_TABLE = {"42P01", "3F000", 1146, "no such table"}
_OTHER_SHAPE = {"42703", "42804", "42809", "42P10", "42883", 1054, 1347, "has no column named", "no such column",
    "does not match any PRIMARY KEY", "datatype mismatch", "CHECK constraint failed", "NOT NULL constraint failed",
    "cannot modify", "values for"}  # fmt: skip
_FULL = {"53100", "53200", 1021, 1041, 1114, "database or disk is full"}
_AGAIN = {"40001", "40P01", 1205, 1213}
"""A serialization failure, a deadlock, a lock that was waited for in vain: nothing was done, and the same may be done now."""
_NOT_NOW = {
    "55P03",
    "57014",
    "25006",
    "57P03",
    "53300",
    1040,
    1203,
    1290,
    1836,
    "database is locked",
    "table is locked",
}
_DENIED = {"42501", "28000", "28P01", 1044, 1045, 1142, 1143, 1227, "readonly database", "not authorized"}
_DAMAGED = {"malformed", "file is not a database"}
_DENIED_WORDS = ("password authentication failed", "permission denied", "no pg_hba.conf entry")


def is_missing(problem: DBAPIError) -> bool:
    """Whether a table is not there."""
    return has_mark(problem, _NO_TABLE)


def may_repeat(problem: DBAPIError) -> bool:
    """Whether the database undid the transaction only because of others at the same moment."""
    return has_mark(problem, _AGAIN)


def failure(problem: DBAPIError) -> EscrowError:
    """The error to raise."""
    text = in_a_line(problem)
    if has_mark(problem, _FULL):
        return Overloaded(
            Code.DISK_FULL, f"the set store's database is full: {text}", "free space there; nothing was recorded"
        )
    if has_mark(problem, _AGAIN) or has_mark(problem, _NOT_NOW):
        return Overloaded(
            Code.QUEUE_FULL,
            f"the set store's database does not take this now: {text}",
            "repeat it; nothing was recorded",
        )
    if has_mark(problem, _DENIED) or any(word in text for word in _DENIED_WORDS):
        return Denied(Code.DENIED, text, "may this user make tables there, and read and change them?")
    if has_mark(problem, _NO_TABLE) or has_mark(problem, _OTHER_SHAPE):
        return other_shape(text)
    if has_mark(problem, _DAMAGED):
        return Corrupt(
            Code.DAMAGED,
            f"the set store's database: {text}",
            "nothing was changed; name another database, and recover from the business tables",
        )
    return Unknown(Code.DISCONNECTED, f"the set store's database: {text}")


def other_shape(text: str) -> Misuse:
    """For tables that have the names of ours, and are others."""
    hint = "tables named escrow_half_set, escrow_commit_set, escrow_set_run, escrow_taken and escrow_set_store are the store's own"
    return Misuse(Code.BAD_SETTING, f"the set store's tables are of another shape: {text}", hint)
