"""Result codes and exceptions: seven error classes, grouped by how the caller should react.

Every rejection, on the wire, in a log line or in an exception, carries one :class:`Code`. Only this enumeration defines
the number, error class, sentence and hint of a code. The error class has a :class:`Meaning`, from which callers derive
what to do: repeat the call, count it, delete a row. The number itself has no meaning.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import ClassVar


class Meaning(Enum):
    """Whether the requested change was applied, as far as a result shows."""

    DONE = "done"
    """Applied, now or before."""
    REFUSED = "refused"
    """Not applied because of its content: the same request will be rejected again."""
    NOT_NOW = "not now"
    """Not applied because of the time or the caller: the same request may succeed later or from another caller."""
    UNKNOWN = "unknown"
    """May have been applied."""


class EscrowError(Exception):
    """Base class of all EscrowMQ errors: a code, a sentence with the problem, a hint with the fix."""

    meaning: ClassVar[Meaning] = Meaning.UNKNOWN
    """Whether the requested change was applied, for errors of this class."""

    def __init__(self, code: Code, message: str | None = None, hint: str | None = None) -> None:
        self.code = code
        self.message = code.sentence if message is None else message
        self.hint = code.hint if hint is None else hint
        super().__init__(f"{self.code.name}: {self.message}" + (f" ({self.hint})" if self.hint else ""))


class Rejected(EscrowError):
    """Not applied; the same request will be rejected again."""

    meaning = Meaning.REFUSED


class Unknown(EscrowError):
    """May have been applied; query or repeat with the same message id or transaction id."""

    meaning = Meaning.UNKNOWN

    message_id: bytes | None = None
    """Id of the message in doubt, if the client knows it: a repeated send under this id cannot duplicate the
    message."""
    left: bool = True
    """Whether data may have left this process; False if there was no connection."""


class Fenced(EscrowError):
    """A newer process took over this name: stop."""

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
    """The calling program has an error; the message describes the fix."""

    meaning = Meaning.NOT_NOW


class Denied(EscrowError):
    """The principal lacks the permission for this operation."""

    meaning = Meaning.NOT_NOW


class Code(IntEnum):
    """Result of one row or one call: the number on the wire (``uint8``), the error class (None: no error), the standard
    sentence and the hint."""

    branch: type[EscrowError] | None
    sentence: str
    hint: str

    def __new__(cls, number: int, branch: type[EscrowError] | None = None, sentence: str = "", hint: str = "") -> Code:
        code = int.__new__(cls, number)
        code._value_ = number
        code.branch, code.sentence, code.hint = branch, sentence, hint
        return code

    @property
    def meaning(self) -> Meaning:
        """Return whether the requested change was applied."""
        if self.branch is None:
            return Meaning.UNKNOWN if self.name == "SENT" else Meaning.DONE
        return self.branch.meaning

    # fmt: off
    OK = 0, None, "done"

    # Results of a decision; none is an error.
    COMMITTED = 1, None, "this call committed the transaction"
    ROLLED_BACK = 2, None, "this call rolled the transaction back"
    ALREADY_COMMITTED = 3, None, "it was committed before; repeating a commit is harmless"
    ALREADY_ROLLED_BACK = 4, None, "it was rolled back before; repeating a rollback is harmless"
    NOTED = 5, None, "the answer UNKNOWN was recorded; nothing is decided"

    # Returned by a client that does not wait for the broker's response. Never on the wire, and not an error.
    SENT = 6, None, "the decision was sent; the producer does not wait for the response"

    # Rejected: not applied.
    CONFLICT = (16, Rejected, "the transaction was already decided the other way",
        "the first durable decision is final; `escrowmq transactions show ID` shows its origin")
    UNKNOWN_TRANSACTION = (17, Rejected, "no such transaction on this broker",
        "ids come from a prepare on the same broker; retention may also have removed it")
    WRONG_GROUP = (18, Rejected, "the transaction belongs to another producer group",
        "end it with a producer of the group that prepared it, which `escrowmq transactions show ID` names")
    EXPIRED = (19, Rejected, "the transaction expired undecided",
        "raise half_retention or retention if decisions can come this late")
    TRANSACTION_DECIDED = (20, Rejected, "a message cannot join a transaction that is already decided",
        "begin a new transaction")
    UNKNOWN_TOPIC = (21, Rejected, "no such topic, and it is not created on first use",
        "create it with `escrowmq topics create NAME`; auto_create_topics is off, or a topic of this name was deleted")
    UNKNOWN_GROUP = (22, Rejected, "no such group",
        "`escrowmq groups list` shows consumer groups, with --producers producer groups")
    UNKNOWN_SESSION = 23, Rejected, "no such producer session on this broker", "open a new session"
    GROUP_KIND = (24, Rejected, "a producer group serves plain or transactional messages, not both",
        "use another producer group; `escrowmq groups list --producers` shows the kinds,"
        " `escrowmq groups alter-producers` changes one")
    NO_PERMISSION = (25, Rejected, "this broker refuses transactional messages",
        "unset reject_transactional on the broker, or use another broker")
    MESSAGE_ID_TAKEN = (26, Rejected, "this message id names another message of the topic",
        "its first use had other content, another kind, group or transaction: use a new id for each message of a topic")
    LEASE_LOST = (27, Rejected, "the lease on these messages ended; they are being delivered again",
        "acknowledge within the lease, extend it, or raise lease_seconds")
    NOT_FOUND = 28, Rejected, "not found"
    ALREADY_EXISTS = 29, Rejected, "already exists"
    RANGE_PURGED = (30, Rejected, "retention has removed part of the range",
        "start from the queue's first offset")
    TOO_MANY = 31, Rejected, "the limit on the number of these is reached", "see the settings table for the limit"
    BODY_TOO_LARGE = (32, Rejected, "the body is over the limit",
        "max_body_bytes is 4 MiB by default; store large content elsewhere")
    KEY_TOO_LARGE = 33, Rejected, "the key is over the limit", "max_key_bytes"
    TAG_TOO_LARGE = 34, Rejected, "the tag is over the limit", "max_tag_bytes"
    PROPERTIES_TOO_LARGE = 35, Rejected, "the properties are over the limit", "max_properties_bytes"
    BAD_TOPIC_NAME = 36, Rejected, "not a topic name", "1 to 127 of A-Z a-z 0-9 . _ - and not starting with % or ."
    BAD_GROUP_NAME = 37, Rejected, "not a group name", "1 to 127 of A-Z a-z 0-9 . _ - and not starting with % or ."
    BAD_QUEUE = 38, Rejected, "the topic has no such queue", "queues count from 0; -1 lets the broker choose"
    BAD_DELAY = 39, Rejected, "the delay is negative or over the limit", "max_delay; of check_immunity, half_retention"
    BAD_BATCH = 40, Rejected, "the batch is not of the expected schema, or is damaged", "see escrowmq.schemas"
    BATCH_TOO_LARGE = (41, Rejected, "the batch is over the limit",
        "send fewer rows at a time: max_batch_rows, max_batch_bytes")
    BAD_REQUEST = 42, Rejected, "the request is malformed or unknown"
    SUBSCRIPTION_MISMATCH = (43, Rejected, "the consumer group exists with another subscription",
        "all consumers of a group use the same; alter the group with `escrowmq groups alter` or bus.admin.alter_group,"
        " or use another name")
    GROUP_RULES = (44, Rejected, "the producer group exists with other rules",
        "leave them out, or alter the group with `escrowmq groups alter-producers` or bus.admin.alter_producers")
    BAD_IMMUNITY = (45, Rejected,
        "the property CheckImmunityTimeInSeconds is not whole seconds as text, at most half_retention",
        'give it as text such as "60"; if check_immunity is given, too, they must agree')

    # Fenced: a newer process took over.
    FENCED = (64, Fenced, "a newer session of the same producer instance took over",
        "stop this process, or give it another name: bus.producer(..., instance=NAME)")
    LATE_COMMIT = (65, Fenced, "the check-back already answered that this transaction rolled back",
        "roll the local transaction back and do the work again in a new one")

    # Overloaded: retry later.
    DISK_FULL = 80, Overloaded, "the broker's disk is full", "free space; no restart is needed"
    TOO_MANY_OPEN = (81, Overloaded, "the producer group has too many undecided transactions",
        "decide some first, or raise max_open_transactions")
    QUEUE_FULL = 82, Overloaded, "too many requests are waiting", "slow down; retry after a moment"
    OUT_OF_RESOURCES = (83, Overloaded, "the broker has no file descriptors or memory left",
        "no restart is needed; raise its file limit (ulimit -n), or find the clients with many connections")
    BROKER_AWAY = (84, Overloaded, "the broker of this record is unreachable; nothing was sent to it",
        'repeat it when that broker is back, or let calls wait for it: producer(..., absent="wait")')

    NOT_LEADER = (85, Overloaded, "this broker does not lead its shard; nothing was applied",
        "send it to the leader; `hello` of any broker of the shard names it")

    # Unknown: may have been applied.
    TIMED_OUT = 96, Unknown, "no answer in time", "it may have been applied; repeat with the same id"
    DISCONNECTED = (97, Unknown, "the connection broke before the answer",
        "it may have been applied; repeat with the same id")
    SHARD_STOPPED = 98, Unknown, "the shard stopped", "see the broker's log for the cause, then restart it"
    CLOSED = 99, Unknown, "closed before the answer"
    BROKER_FAILED = (100, Unknown, "the broker failed on this request",
        "a bug in the broker, its log has the traceback; it may have been applied, repeat with the same id")

    # Corrupt.
    DAMAGED = 112, Corrupt, "the log is damaged", "nothing was deleted; run `escrowmq log dump --check` on the folder"
    NEWER_FORMAT = 113, Corrupt, "the data folder is of a newer version", "upgrade escrowmq"
    LOG_FAILED = (114, Corrupt, "a write or sync of the log failed; the shard stopped",
        "check the disk, then restart the broker")

    # Misuse: a bug in the calling program.
    BAD_URL = 128, Misuse, "not a broker URL", "use escrow://HOST:PORT[,HOST:PORT...] or file:FOLDER"
    NO_CHECKER = (129, Misuse, "a transactional producer must have a checker",
        "decorate a function with @producer.checker before the first transaction, or give bus.producer(...,"
        " checker=...) an outbox.Barrier; with unasked=True there is no check-back")
    BAD_SETTING = 130, Misuse, "bad setting"
    BAD_ARGUMENT = 131, Misuse, "bad argument"
    FOLDER_IN_USE = (132, Misuse, "the data folder is in use by another process",
        "stop that process, or connect to it by its URL")
    NOT_A_DATA_FOLDER = (133, Misuse, "not an EscrowMQ data folder",
        "name an empty or new folder, or an existing data folder")
    WRONG_SHARD = (134, Rejected, "the transaction lives on another broker",
        "a transaction stays on the broker that took its prepare")
    NO_TABLES = (135, Misuse, "the database has no EscrowMQ tables",
        "create them with `escrowmq outbox migrate --database-url URL` or outbox.migrate(engine)")
    SCHEMA_VERSION = (136, Misuse, "the tables are of another schema version",
        "run `escrowmq outbox migrate`, or upgrade escrowmq if the tables are newer")
    NO_TRANSACTION = (137, Misuse, "the session has no transaction that could hold this",
        "use a session that commits (not AUTOCOMMIT) and has not failed; roll a failed one back first")
    MISSING_PACKAGE = 138, Misuse, "a package that this needs is not installed", "install the extra that is named"
    NO_OUTCOME = (139, Misuse, "this is not a transaction outcome",
        "return mq.COMMIT, mq.ROLLBACK or mq.UNKNOWN, on every path; the check-back repeats until then")

    # Denied.
    DENIED = 144, Denied, "no right to do this"
    UNAUTHENTICATED = (145, Denied, "the token or certificate is missing, unknown or expired",
        "set ESCROWMQ_TOKEN_FILE, or give connect() a token; `escrowmq whoami` tries it")
    # fmt: on


def error(code: Code, message: str | None = None, hint: str | None = None, retry_after: float = 1.0) -> EscrowError:
    """Return an error of the class of ``code``. Raises KeyError if ``code`` is not an error."""
    if code.branch is None:
        raise KeyError(code)
    if code.branch is Overloaded:
        return Overloaded(code, message, hint, retry_after)
    return code.branch(code, message, hint)


def unsent(message: str) -> Unknown:
    """Return DISCONNECTED for a request that certainly never left this process."""
    problem = Unknown(Code.DISCONNECTED, message)
    problem.left = False
    return problem


def flags(codes: Collection[Code]) -> bytes:
    """Return 256 bytes, one per possible code number: 1 for the given codes, else 0. ``np.frombuffer(flags(DONE),
    np.bool_)[column]`` classifies a whole column of codes. An unknown number is in no set, so it counts as UNKNOWN."""
    return bytes(number in codes for number in range(256))


DONE = frozenset(code for code in Code if code.meaning is Meaning.DONE)
"""Broker results that are not errors."""
REFUSED = frozenset(code for code in Code if code.meaning is Meaning.REFUSED)
"""Not applied, and the same request will be rejected again."""
NOT_APPLIED = REFUSED | {code for code in Code if code.meaning is Meaning.NOT_NOW}
"""Not applied."""
AWAY = frozenset({Code.DISCONNECTED, Code.TIMED_OUT, Code.BROKER_AWAY})
"""No response: the broker may be back soon, and the call can be repeated."""
STANDS_COMMITTED = frozenset({Code.COMMITTED, Code.ALREADY_COMMITTED})
STANDS_ROLLED_BACK = frozenset({Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK})
FIRST_ANSWER = {Code.ALREADY_COMMITTED: Code.COMMITTED, Code.ALREADY_ROLLED_BACK: Code.ROLLED_BACK}
"""Maps the result of a repeated decision to the result of the first one."""
