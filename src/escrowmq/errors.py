"""Results and errors: every code, what it means, and the error tree of seven branches, by what the caller can do next.

Every refusal, on the wire, in a log line or in an exception, carries one :class:`Code`. The two tables at the end of this
file are the only place where a code gets its sentence, its hint and its branch. The branch has a :class:`Meaning`, from
which all code derives what it does about a result: repeat it, count it, delete a row. A code's number says nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import ClassVar


class Code(IntEnum):
    """One result of one row or one call; the number is what travels (``uint8``)."""

    OK = 0

    # What a decision did. None of these is an error.
    COMMITTED = 1
    ROLLED_BACK = 2
    ALREADY_COMMITTED = 3
    ALREADY_ROLLED_BACK = 4
    NOTED = 5  # the producer answered UNKNOWN: nothing is decided

    # Rejected: surely not applied.
    CONFLICT = 16
    UNKNOWN_TRANSACTION = 17
    WRONG_GROUP = 18
    EXPIRED = 19
    TRANSACTION_DECIDED = 20
    UNKNOWN_TOPIC = 21
    UNKNOWN_GROUP = 22
    UNKNOWN_SESSION = 23
    GROUP_KIND = 24
    NO_PERMISSION = 25
    MESSAGE_ID_TAKEN = 26
    LEASE_LOST = 27
    NOT_FOUND = 28
    ALREADY_EXISTS = 29
    RANGE_PURGED = 30
    TOO_MANY = 31
    BODY_TOO_LARGE = 32
    KEY_TOO_LARGE = 33
    TAG_TOO_LARGE = 34
    PROPERTIES_TOO_LARGE = 35
    BAD_TOPIC_NAME = 36
    BAD_GROUP_NAME = 37
    BAD_QUEUE = 38
    BAD_DELAY = 39
    BAD_BATCH = 40
    BATCH_TOO_LARGE = 41
    BAD_REQUEST = 42
    SUBSCRIPTION_MISMATCH = 43

    # Fenced: someone newer took over.
    FENCED = 64
    LATE_COMMIT = 65

    # Overloaded: come back later.
    DISK_FULL = 80
    TOO_MANY_OPEN = 81
    QUEUE_FULL = 82

    # Unknown: may have been applied.
    TIMED_OUT = 96
    DISCONNECTED = 97
    SHARD_STOPPED = 98
    CLOSED = 99
    BROKER_FAILED = 100

    # Corrupt.
    DAMAGED = 112
    NEWER_FORMAT = 113
    LOG_FAILED = 114

    # Misuse: a bug in the calling program.
    BAD_URL = 128
    NO_CHECKER = 129
    BAD_SETTING = 130
    BAD_ARGUMENT = 131
    FOLDER_IN_USE = 132
    NOT_A_DATA_FOLDER = 133
    WRONG_SHARD = 134
    NO_TABLES = 135
    SCHEMA_VERSION = 136
    NO_TRANSACTION = 137
    MISSING_PACKAGE = 138

    # Denied.
    DENIED = 144


class Meaning(Enum):
    """What a result says about the change that was asked for."""

    DONE = "done"
    """It took effect, now or before."""
    REFUSED = "refused"
    """Surely not applied, because of what was asked: the same again would be refused again."""
    NOT_NOW = "not now"
    """Surely not applied, because of the moment or the caller: the same may be taken later, or from another caller."""
    UNKNOWN = "unknown"
    """It may have been applied."""


class EscrowError(Exception):
    """Base of every error that EscrowMQ raises: a code, a sentence that says what happened, a hint that says the fix."""

    meaning: ClassVar[Meaning] = Meaning.UNKNOWN
    """What errors of this branch say about the change that was asked for."""

    def __init__(self, code: Code, message: str | None = None, hint: str | None = None) -> None:
        entry = _TABLE.get(code)
        self.code = code
        self.message = message if message is not None else (entry[1] if entry else code.name)
        self.hint = hint if hint is not None else (entry[2] if entry else "")
        super().__init__(f"{self.code.name}: {self.message}" + (f" ({self.hint})" if self.hint else ""))


class Rejected(EscrowError):
    """Surely not applied; sending the same again will be refused again."""

    meaning = Meaning.REFUSED


class Unknown(EscrowError):
    """May have been applied: ask again with the same message id or transaction id."""

    meaning = Meaning.UNKNOWN

    message_id: bytes | None = None
    """The id of the message in doubt, where the client gave it one: sending it again under this id cannot double it."""


class Fenced(EscrowError):
    """Someone newer took over this name: stop."""

    meaning = Meaning.NOT_NOW


class Overloaded(EscrowError):
    """Not applied; the same call can succeed after ``retry_after`` seconds."""

    meaning = Meaning.NOT_NOW

    def __init__(
        self, code: Code, message: str | None = None, hint: str | None = None, retry_after: float = 1.0
    ) -> None:
        super().__init__(code, message, hint)
        self.retry_after = retry_after


class Corrupt(EscrowError):
    """Stored data is damaged or unreadable; nothing was deleted."""

    meaning = Meaning.UNKNOWN


class Misuse(EscrowError):
    """The calling program is wrong; the message says the fix."""

    meaning = Meaning.NOT_NOW


class Denied(EscrowError):
    """The principal has no right to do this."""

    meaning = Meaning.NOT_NOW


def error(code: Code, message: str | None = None, hint: str | None = None, retry_after: float = 1.0) -> EscrowError:
    """The error object of the branch that ``code`` belongs to."""
    branch = _TABLE[code][0]
    if branch is Overloaded:
        return Overloaded(code, message, hint, retry_after)
    return branch(code, message, hint)


def explain(code: Code) -> tuple[str, str]:
    """The standard sentence and hint of ``code``."""
    entry = _TABLE.get(code)
    return (entry[1], entry[2]) if entry else (_RESULTS[code], "")


def meaning(code: Code) -> Meaning:
    """What ``code`` says about the change that was asked for."""
    entry = _TABLE.get(code)
    return entry[0].meaning if entry else Meaning.DONE


def flags(codes: Collection[Code]) -> bytes:
    """256 bytes, one per number that a code can have: 1 for ``codes``, else 0.

    ``np.frombuffer(flags(DONE), np.bool_)[column]`` judges a whole column of codes. A number that this version does not
    know is in no set, so it is judged as UNKNOWN.
    """
    return bytes(number in codes for number in range(256))


_RESULTS: dict[Code, str] = {
    Code.OK: "done",
    Code.COMMITTED: "this call committed the transaction",
    Code.ROLLED_BACK: "this call rolled the transaction back",
    Code.ALREADY_COMMITTED: "it was committed before; repeating a commit is harmless",
    Code.ALREADY_ROLLED_BACK: "it was rolled back before; repeating a rollback is harmless",
    Code.NOTED: "the answer UNKNOWN was heard; nothing is decided",
}
"""The results that are no error."""

_TABLE: dict[Code, tuple[type[EscrowError], str, str]] = {
    Code.CONFLICT: (
        Rejected,
        "the transaction was already decided the other way",
        "the first durable decision is final; look the transaction up to see it",
    ),
    Code.UNKNOWN_TRANSACTION: (
        Rejected,
        "no such transaction on this broker",
        "ids come from a prepare on the same broker; it may also have left with the log's retention",
    ),
    Code.WRONG_GROUP: (
        Rejected,
        "the transaction belongs to another producer group",
        "end it with a producer of the group that prepared it",
    ),
    Code.EXPIRED: (
        Rejected,
        "the transaction expired undecided",
        "raise half_retention or retention if decisions can come this late",
    ),
    Code.TRANSACTION_DECIDED: (
        Rejected,
        "a message cannot join a transaction that is already decided",
        "begin a new transaction",
    ),
    Code.UNKNOWN_TOPIC: (
        Rejected,
        "no such topic, and auto-creation is off",
        "create it with `escrowmq topics create NAME` or set auto_create_topics",
    ),
    Code.UNKNOWN_GROUP: (Rejected, "no such group", "list groups with `escrowmq groups list`"),
    Code.UNKNOWN_SESSION: (Rejected, "no such producer session on this broker", "open a new session"),
    Code.GROUP_KIND: (
        Rejected,
        "a producer group of transactional messages serves no other kind of message",
        "send plain messages under another producer group",
    ),
    Code.NO_PERMISSION: (
        Rejected,
        "this broker refuses transactional messages",
        "unset reject_transactional on the broker, or use another broker",
    ),
    Code.MESSAGE_ID_TAKEN: (
        Rejected,
        "this message id was used for a message of another kind",
        "a message id names one message for ever; use a new id",
    ),
    Code.LEASE_LOST: (
        Rejected,
        "the lease on these messages ended; they are being delivered again",
        "acknowledge within the lease, extend it, or raise lease_seconds",
    ),
    Code.NOT_FOUND: (Rejected, "not found", ""),
    Code.ALREADY_EXISTS: (Rejected, "already exists", ""),
    Code.RANGE_PURGED: (
        Rejected,
        "part of the range has left the log by retention",
        "start from the queue's first offset",
    ),
    Code.TOO_MANY: (
        Rejected,
        "a limit on how many of these may exist is reached",
        "see the settings table for the limit",
    ),
    Code.BODY_TOO_LARGE: (
        Rejected,
        "the body is over the limit",
        "max_body_bytes is 4 MiB by default; store large content elsewhere",
    ),
    Code.KEY_TOO_LARGE: (Rejected, "the key is over the limit", "max_key_bytes"),
    Code.TAG_TOO_LARGE: (Rejected, "the tag is over the limit", "max_tag_bytes"),
    Code.PROPERTIES_TOO_LARGE: (Rejected, "the properties are over the limit", "max_properties_bytes"),
    Code.BAD_TOPIC_NAME: (Rejected, "not a topic name", "1 to 127 of A-Z a-z 0-9 . _ - and not starting with % or ."),
    Code.BAD_GROUP_NAME: (Rejected, "not a group name", "1 to 127 of A-Z a-z 0-9 . _ - and not starting with % or ."),
    Code.BAD_QUEUE: (Rejected, "the topic has no such queue", "queues count from 0; -1 lets the broker choose"),
    Code.BAD_DELAY: (
        Rejected,
        "the delay is negative or over the limit",
        "max_delay; of check_immunity, half_retention",
    ),
    Code.BAD_BATCH: (Rejected, "the batch is not of the expected schema, or is damaged", "see escrowmq.schemas"),
    Code.BATCH_TOO_LARGE: (
        Rejected,
        "the batch is over the limit",
        "send fewer rows at a time: max_batch_rows, max_batch_bytes",
    ),
    Code.BAD_REQUEST: (Rejected, "the request is not understood", ""),
    Code.SUBSCRIPTION_MISMATCH: (
        Rejected,
        "the consumer group exists with another subscription",
        "all consumers of a group use the same topics, tags and order; alter the group or use another name",
    ),
    Code.FENCED: (
        Fenced,
        "a newer session of the same producer instance took over",
        "stop this process, or give it another instance name",
    ),
    Code.LATE_COMMIT: (
        Fenced,
        "the check-back already answered that this transaction rolled back",
        "roll the local transaction back and do the work again in a new one",
    ),
    Code.DISK_FULL: (Overloaded, "the broker's disk is full", "free space; no restart is needed"),
    Code.TOO_MANY_OPEN: (
        Overloaded,
        "the producer group has too many undecided transactions",
        "decide some first, or raise max_open_transactions",
    ),
    Code.QUEUE_FULL: (Overloaded, "too many requests are waiting", "slow down; retry after a moment"),
    Code.TIMED_OUT: (Unknown, "no answer in time", "it may have been applied; repeat with the same id"),
    Code.DISCONNECTED: (
        Unknown,
        "the connection broke before the answer",
        "it may have been applied; repeat with the same id",
    ),
    Code.SHARD_STOPPED: (Unknown, "the shard stopped", "see the broker's log for the cause, then restart it"),
    Code.CLOSED: (Unknown, "closed before the answer", ""),
    # Unknown and not Rejected: deciding changes nothing, but a call can also fail when its change is made and only the
    # answer is not. And the fault is the broker's: a caller that waits and repeats it, under the same id, is served as soon
    # as the broker is mended, whereas a refusal would make it give the message up.
    Code.BROKER_FAILED: (
        Unknown,
        "the broker failed on this request",
        "a bug in the broker, its log has the traceback; it may have been applied, repeat with the same id",
    ),
    Code.DAMAGED: (Corrupt, "the log is damaged", "nothing was deleted; run `escrowmq log dump --check` on the folder"),
    Code.NEWER_FORMAT: (Corrupt, "the data folder is of a newer version", "upgrade escrowmq"),
    Code.LOG_FAILED: (
        Corrupt,
        "a write or sync of the log failed; the shard stopped",
        "check the disk, then restart the broker",
    ),
    Code.BAD_URL: (Misuse, "not a broker URL", "use escrow://HOST:PORT[,HOST:PORT...] or file:FOLDER"),
    Code.NO_CHECKER: (
        Misuse,
        "a transactional producer must have a checker",
        "decorate a function with @producer.checker before the first transaction",
    ),
    Code.BAD_SETTING: (Misuse, "bad setting", ""),
    Code.BAD_ARGUMENT: (Misuse, "bad argument", ""),
    Code.FOLDER_IN_USE: (
        Misuse,
        "the data folder is in use by another process",
        "stop that process, or connect to it by its URL",
    ),
    Code.NOT_A_DATA_FOLDER: (
        Misuse,
        "not an EscrowMQ data folder",
        "name an empty or new folder, or an existing data folder",
    ),
    Code.WRONG_SHARD: (
        Rejected,
        "the transaction lives on another broker",
        "a transaction stays on the broker that took its prepare",
    ),
    Code.NO_TABLES: (
        Misuse,
        "the database has no EscrowMQ tables",
        "create them with `escrowmq outbox migrate --database-url URL` or outbox.migrate(engine)",
    ),
    Code.SCHEMA_VERSION: (
        Misuse,
        "the tables are of another schema version",
        "run `escrowmq outbox migrate`, or upgrade escrowmq if the tables are newer",
    ),
    Code.NO_TRANSACTION: (
        Misuse,
        "the session has no transaction that could hold this",
        "use a session that commits (not AUTOCOMMIT) and has not failed; roll a failed one back first",
    ),
    Code.MISSING_PACKAGE: (Misuse, "a package that this needs is not installed", "install the extra that is named"),
    Code.DENIED: (Denied, "no right to do this", ""),
}

DONE = frozenset(_RESULTS)
"""Results that are no error."""
REFUSED = frozenset(code for code in Code if meaning(code) is Meaning.REFUSED)
"""Surely not applied, and the same again would be refused again."""
NOT_APPLIED = REFUSED | {code for code in Code if meaning(code) is Meaning.NOT_NOW}
"""Surely not applied."""
AWAY = frozenset({Code.DISCONNECTED, Code.TIMED_OUT})
"""Nobody answered: the broker may be back in a moment, and the call can be made again."""
STANDS_COMMITTED = frozenset({Code.COMMITTED, Code.ALREADY_COMMITTED})
STANDS_ROLLED_BACK = frozenset({Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK})
FIRST_ANSWER = {Code.ALREADY_COMMITTED: Code.COMMITTED, Code.ALREADY_ROLLED_BACK: Code.ROLLED_BACK}
"""What the first answer to a decision was, of which this is the answer to a repetition."""
