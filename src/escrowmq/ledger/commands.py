"""The commands that the ledger accepts, and their answers. All plain values; times are microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.model import DecidedBy, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that the fold of the log depends on. They are events themselves, so replay needs no settings."""

    transaction_timeout_us: int = 6_000_000
    check_interval_us: int = 30_000_000
    check_max: int = 15
    half_retention_us: int = 72 * 3600 * 1_000_000
    exhausted_rollback: bool = False
    reject_transactional: bool = False
    mixed_groups: bool = False
    auto_create_topics: bool = True
    default_queues: int = 4
    max_attempts: int = 16
    retry_backoff_us: int = 1_000_000
    retry_backoff_max_us: int = 300_000_000
    dedup_window_us: int = 3_600_000_000
    dedup_max: int = 1 << 20
    max_body_bytes: int = 4 << 20
    max_key_bytes: int = 1024
    max_tag_bytes: int = 128
    max_tags: int = 65_536
    max_properties_bytes: int = 32 << 10
    max_delay_us: int = 40 * 86400 * 1_000_000
    max_topics: int = 4096
    max_queues: int = 1024
    max_groups: int = 4096
    max_open_transactions: int = 4_000_000
    max_transaction_messages: int = 10_000
    max_leases: int = 10_000
    max_writers: int = 1_000_000
    max_sessions: int = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRules:
    """One producer group's own rules instead of the shard's :class:`Rules`; None: nothing.

    ``kind`` is ``"plain"``, ``"transactional"`` or ``"mixed"``; None: what the group did first says it (or
    ``mixed_groups``).
    """

    kind: str | None = None
    transaction_timeout_us: int | None = None
    check_interval_us: int | None = None
    check_max: int | None = None
    exhausted_rollback: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRules:
    """One topic's retention: of messages since they became visible, and in bytes of each queue (None: the log's)."""

    retention_us: int | None = None
    retention_bytes: int | None = None

    @property
    def is_own(self) -> bool:
        """Return whether the topic has a retention of its own, by time or by bytes."""
        return self.retention_us is not None or self.retention_bytes is not None


class Command:
    """A request that :meth:`Ledger.decide` answers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Configure(Command):
    """Set the rules of the ledger. Answer: None."""

    rules: Rules


@dataclass(frozen=True, slots=True)
class CreateTopic(Command):
    """Create a topic, or give it more queues. ``queues`` None: the default. Answer: {"name", "queues"}."""

    name: str
    queues: int | None = None
    may_exist: bool = False


@dataclass(frozen=True, slots=True)
class AlterTopic(Command):
    """Give a topic more queues, or its own retention: ``rules`` that are not None are set, those named in ``reset``
    return to the broker's. Messages beyond it are dropped at once. Answer: {"name", "queues", "rules"}."""

    name: str
    queues: int | None = None
    rules: TopicRules = field(default_factory=TopicRules)
    reset: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DeleteTopic(Command):
    """Delete a topic. CONFLICT if it has undecided half messages, or groups consume it, unless ``force``: then at most
    ``limit`` transactions are rolled back by an operator, and the groups lose its queues. ``check``: validate only.
    Answer: {"name", "deleted" (False: repeat it), "queues", "messages", "delayed", "rolled_back", "groups",
    "dead_letters"}."""

    name: str
    force: bool = False
    check: bool = False
    limit: int = 100_000


@dataclass(frozen=True, slots=True)
class Cut(Command):
    """Drop messages beyond their topic's retention; ``retention_us``: the default. Answer: the queues cut (int)."""

    retention_us: int


@dataclass(frozen=True, slots=True)
class OpenSession(Command):
    """Open a producer session; it fences an older one of the same group and instance. ``resume``: the forgotten epoch
    of this process; FENCED if a newer process has the name. ``rules``: those a new group gets, and an existing one must
    have. ``process``: a random number of the process; a repeat gets the same session, a fenced process is rejected.
    Answer: epoch (int)."""

    group: str
    instance: str
    transactional: bool
    resume: int | None = None
    rules: ProducerRules | None = None
    process: int | None = None


@dataclass(frozen=True, slots=True)
class AlterProducers(Command):
    """Give a producer group its own rules (it is created if missing): ``rules`` that are not None are set, those named
    in ``reset`` return to the shard's. Answer: its own rules now (:class:`ProducerRules`)."""

    group: str
    rules: ProducerRules
    reset: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Send(Command):
    """Plain messages: ``batch`` of schema OUTGOING, ``sessions`` one epoch per row (0: none). Answer: PRODUCED."""

    batch: pa.RecordBatch
    sessions: Int64s


@dataclass(frozen=True, slots=True)
class Prepare(Command):
    """Half messages, else as :class:`Send`. ``replace``: only the last prepare of an id counts, while it is undecided
    (see ``messages/producing.py``); ``same``: rows whose content equals the stored message of their id, as the holder
    of the log found (None: no row)."""

    batch: pa.RecordBatch
    sessions: Int64s
    replace: bool = False
    same: Bools | None = None


@dataclass(frozen=True, slots=True)
class End(Command):
    """Decisions: ``batch`` of schema ENDING, ``sessions`` one epoch per row (0: an operator's). Answer: ENDED."""

    batch: pa.RecordBatch
    sessions: Int64s
    by: DecidedBy = DecidedBy.PRODUCER


class Part(Protocol):
    """The rows of one caller in a command of rows, validated by :mod:`escrowmq.wire.parcels`."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]: ...
    @property
    def session(self) -> int:
        """The epoch of the rows; 0: none."""

    @property
    def first_id(self) -> tuple[int, int]:
        """Of SEND and PREPARE: instance and sequence of the first row without a message id; the next rows count on."""


@dataclass(frozen=True, slots=True)
class SendRows:
    """As :class:`Send`, of rows. Answer: a tuple with the columns of PRODUCED for each row."""

    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class PrepareRows:
    """As :class:`Prepare` without ``replace``, of rows. Answer: a tuple with the columns of PRODUCED for each row."""

    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class EndRows:
    """As :class:`End`, of rows. Answer: bytes, a code for each row."""

    parts: Sequence[Part]
    by: DecidedBy = DecidedBy.PRODUCER


@dataclass(frozen=True, slots=True)
class SettleRows:
    """As :class:`Settle`, of rows. Answer: bytes, a code for each row."""

    group: str
    parts: Sequence[Part]


RowsCommand = SendRows | PrepareRows | EndRows | SettleRows
"""Commands of a few rows. :meth:`Ledger.decide_rows` decides the plain ones; others are decided as columns."""


@dataclass(frozen=True, slots=True)
class AskChecks(Command):
    """Choose up to ``limit`` due transactions of a producer group to check. Answer: :class:`Asked`."""

    group: str
    limit: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Transactions to check (arrays of one length): positions, session epochs, attempt numbers from 1."""

    transactions: Int64s
    epochs: Int64s
    attempts: Int64s


@dataclass(frozen=True, slots=True)
class Tick(Command):
    """Do what is due by the clock, except checks: release delayed messages, end leases, end the waiting of
    transactions. At most ``limit`` rows per kind. Answer: None."""

    limit: int = 100_000


@dataclass(frozen=True, slots=True)
class Park(Command):
    """Park an open transaction (position of its first message) that nobody can check. Answer: whether it was open."""

    transaction: int


@dataclass(frozen=True, slots=True)
class Recheck(Command):
    """Reopen parked or undecided transactions: no checks spent, due now. Answer: codes (uint8 array)."""

    transactions: pa.Array  # fixed_size_binary(16)


@dataclass(frozen=True, slots=True)
class CommitBatch(Command):
    """Commit ``transactions`` as batch ``number`` of ``writer`` (16 bytes), once; see ``transactions/writers.py``.
    Answer: {"status": COMMITTED or ALREADY_COMMITTED, "last": the writer's last batch, "rolled_back": losers}."""

    writer: bytes
    number: int
    transactions: pa.Array  # fixed_size_binary(16)
    session: int


@dataclass(frozen=True, slots=True)
class Subscribe(Command):
    """Create a consumer group, or join it. Answer: {"group": ordinal, "created": bool, "start": its first start}."""

    group: str
    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterGroup(Command):
    """Change a consumer group's subscription; None: unchanged. Delays and a back-off exclude each other: setting one
    removes the other, and ``default_redelivery`` removes both first. ``start``: where the group begins in queues that
    are new to it. Answer: the :class:`Subscription`."""

    group: str
    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    ordered: bool | None = None
    in_doubt: str | None = None
    start: str = "earliest"
    max_attempts: int | None = None
    retry_backoff_us: int | None = None
    retry_backoff_max_us: int | None = None
    retry_delays_us: tuple[int, ...] | None = None
    default_redelivery: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetGroup(Command):
    """Set where a consumer group continues, in all its queues, those of ``topic``, or one ``queue`` of it: at ``start``
    (as of :class:`Subscription`), at the ``offset`` of that queue, by ``shift`` offsets, or at ``places`` (queue id and
    offset); one of the four. ``force``: also end leases of a group that holds what is in doubt. Answer: a dict for each
    queue (see ``groups/operating.py``)."""

    group: str
    topic: str | None = None
    queue: int | None = None
    start: str | None = None
    offset: int | None = None
    shift: int | None = None
    places: Sequence[tuple[int, int]] | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class PauseGroup(Command):
    """Pause ``topics`` for a consumer group (empty: all), or resume. Answer: {"all", "topics", "leased"}."""

    group: str
    topics: tuple[str, ...] = ()
    paused: bool = True


@dataclass(frozen=True, slots=True)
class LimitGroup(Command):
    """Replace all limits of a consumer group. Answer: the :class:`Limits` as a dict, and "leased"."""

    group: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class DeleteGroup(Command):
    """Delete a consumer group, if its number is ``number``; ``force``: although it has leases. Answer: counts."""

    group: str
    number: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Join(Command):
    """Become the named member of a group that holds what is in doubt; see ``groups/members.py``. ``process``: a random
    number of the process; ``resume``: it is the member already and lost a response. ``keep``: its leases, each with the
    offset after the last message received. Answer: {"member", "epoch"}."""

    group: str
    instance: str
    process: int
    resume: bool = False
    keep: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Fence(Command):
    """Give back the messages that a named member holds. Answer: {"member", "messages"}, how many it held."""

    group: str
    instance: str


@dataclass(frozen=True, slots=True)
class Receive(Command):
    """Lease messages to a member. Answer: :class:`Leased` (empty when nothing is available)."""

    group: str
    member: int
    max_messages: int
    lease_us: int
    queue_ids: Sequence[int] | None = None  # restrict to these
    epoch: int | None = None  # of the member's Join; required by groups that hold what is in doubt
    one_by_one: bool = False  # the member handles messages one after the other (groups/members.py)


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased messages (arrays of one length), in the order of delivery."""

    leases: Int64s
    queue_ids: Int64s
    offsets: Int64s
    attempts: Int64s
    positions: Int64s


def nothing_leased() -> Leased:
    """Return the answer of a receive that leased no message: empty arrays."""
    return Leased(*[np.empty(0, np.int64)] * 5)


@dataclass(frozen=True, slots=True)
class Settle(Command):
    """Acknowledgements of a group: ``batch`` of schema SETTLING. Answer: ENDED (OK, LEASE_LOST, BAD_REQUEST)."""

    group: str
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Bury(Command):
    """Bury undeliverable leased messages: lease, offset, cause. The attempt is not counted. Answer: how many (int)."""

    group: str
    rows: Sequence[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Recall(Command):
    """Drop the messages at ``positions`` that wait for their time in ``topic``. Answer: how many (int)."""

    topic: str
    positions: Int64s


@dataclass(frozen=True, slots=True)
class SettleDead(Command):
    """Retry (attempts counted anew) or discard dead letters. ``dead_us``: when each died, as the caller saw it; others
    are not changed (None: no such check). Answer: codes (uint8 array)."""

    group: str
    queue_ids: Int64s
    offsets: Int64s
    retry: bool
    dead_us: Int64s | None = None


@dataclass(frozen=True, slots=True)
class EditDead(Command):
    """Replace a dead letter for one group: ``batch``, one row of schema OUTGOING with a message id of its own.
    ``dead_us``: as of :class:`SettleDead`. Answer: OK, or ALREADY_EXISTS if this id was applied before (code)."""

    group: str
    queue_id: int
    offset: int
    dead_us: int | None
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Retain(Command):
    """Drop what is older than ``visible_us``. ``limit_position``: where the last complete segment ends;
    ``early_position``: how far to go before that time if topics keep less. Answer: the position (int) below which the
    log may drop whole segments; the events expire undecided half messages below it."""

    visible_us: int
    limit_position: int
    early_position: int = 0


@dataclass(frozen=True, slots=True)
class Forget(Command):
    """Forget up to ``limit`` sessions last used before ``before_us``, except ``connected``. Answer: their number."""

    before_us: int
    connected: Int64s
    limit: int = 10_000


@dataclass(frozen=True, slots=True)
class ForgetWriter(Command):
    """Forget a writer (16 bytes) now, with its producer group. Answer: {"group", "sessions"}."""

    writer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The subscription of a consumer group, the same for all its members.

    ``start`` is ``"earliest"``, ``"latest"`` or microseconds since 1970 as a string, resolved when the group first
    meets a queue. ``max_attempts`` and back-offs None: the rules'. ``retry_delays_us``, if not empty, replace the
    back-off: the delay after each attempt, the last one repeated; the default ``max_attempts`` is then one more than
    delays. ``tags`` empty: all.
    """

    topics: tuple[str, ...]
    tags: tuple[str, ...] = ()
    ordered: bool = False
    start: str = "earliest"
    max_attempts: int | None = None
    retry_backoff_us: int | None = None
    retry_backoff_max_us: int | None = None
    in_doubt: str = "redeliver"
    """For messages whose consumer is silent: ``"redeliver"`` when the lease ends, or ``"hold"`` until it returns or is
    fenced."""
    starts: dict[str, int] = field(default_factory=dict)
    """Resolved first offsets by queue id (as text, for JSON); set by ``decide``, never by a caller."""
    retry_delays_us: tuple[int, ...] = ()
