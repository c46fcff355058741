"""The commands that the ledger accepts, and their answers. All plain values; times are microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.rules import ProducerRules as ProducerRules
from escrowmq.ledger.rules import Rules as Rules
from escrowmq.ledger.rules import TopicRules as TopicRules
from escrowmq.model import DecidedBy


@dataclass(frozen=True, slots=True)
class Configure:
    """Make ``rules`` those of the ledger. Answer: None."""

    rules: Rules


@dataclass(frozen=True, slots=True)
class CreateTopic:
    """Make a topic, or give it more queues. ``queues`` None: the default. Answer: {"name", "queues"}."""

    name: str
    queues: int | None = None
    may_exist: bool = False


@dataclass(frozen=True, slots=True)
class AlterTopic:
    """Give a topic more queues, or a retention of its own: what of ``rules`` is not None, while those named in
    ``reset`` go back to the broker's. What is beyond it then is released at once. Answer: {"name", "queues", "rules"}.
    """

    name: str
    queues: int | None = None
    rules: TopicRules = field(default_factory=TopicRules)
    reset: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """Delete a topic. CONFLICT if it has undecided half messages, or groups consume it, unless ``force``: then the
    transactions are rolled back by an operator, at most ``limit`` of them, and the groups lose its queues. ``check``:
    only refuse, and do nothing. Answer: {"name", "deleted", "queues", "messages", "delayed", "rolled_back", "groups",
    "dead_letters"}; not "deleted": there were more transactions, ask again."""

    name: str
    force: bool = False
    check: bool = False
    limit: int = 100_000


@dataclass(frozen=True, slots=True)
class Cut:
    """Let go of what is beyond the retention of its topic; ``retention_us``: of topics without one. Answer: how many
    queues were cut (int)."""

    retention_us: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begin a producer session; a newer one of the same group and instance fences the older. ``resume``: an epoch of
    this process that is forgotten; Fenced if a newer process has the name. ``rules``: what a new group is made with,
    and one that exists must have. ``process``: a random number of the process's own; a repeat is given the same
    session, and a process that a newer one has fenced is refused. Answer: epoch (int)."""

    group: str
    instance: str
    transactional: bool
    resume: int | None = None
    rules: ProducerRules | None = None
    process: int | None = None


@dataclass(frozen=True, slots=True)
class AlterProducers:
    """Give a producer group rules of its own, which is made if it does not exist: those of ``rules`` that are not None,
    while those named in ``reset`` go back to the shard's. Answer: the rules that it has now (:class:`ProducerRules`).
    """

    group: str
    rules: ProducerRules
    reset: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Plain messages: ``batch`` of schema OUTGOING, ``sessions`` one epoch per row (0: none). Answer: PRODUCED."""

    batch: pa.RecordBatch
    sessions: Int64s


@dataclass(frozen=True, slots=True)
class Prepare:
    """Half messages, else as :class:`Send`. ``replace``: only the last prepare of an id counts, while it is undecided
    (see ``messages/producing.py``); ``same``: the rows whose content is that of the message that their id names already
    (None: none is), found out by whoever has the log."""

    batch: pa.RecordBatch
    sessions: Int64s
    replace: bool = False
    same: Bools | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Decisions: ``batch`` of schema ENDING, ``sessions`` one epoch per row (0: an operator's). Answer: ENDED."""

    batch: pa.RecordBatch
    sessions: Int64s
    by: DecidedBy = DecidedBy.PRODUCER


class Part(Protocol):
    """The rows of one caller in a command of rows: sound ones, as :mod:`escrowmq.wire.parcels` has them."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]: ...
    @property
    def session(self) -> int:
        """The epoch under which they come; 0: none."""
        ...

    @property
    def first_id(self) -> tuple[int, int]:
        """SEND and PREPARE: the message id of the first row that has none, as instance and sequence; the others count
        on."""
        ...


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
"""Commands of a few rows. :meth:`Ledger.decide_rows` decides their plain cases; whatever is not plain goes as columns.
"""


@dataclass(frozen=True, slots=True)
class AskChecks:
    """Take up to ``limit`` due transactions of a producer group for asking. Answer: :class:`Asked`."""

    group: str
    limit: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Transactions to ask about (arrays of one length): positions, session epochs, attempt numbers from 1."""

    transactions: Int64s
    epochs: Int64s
    attempts: Int64s


@dataclass(frozen=True, slots=True)
class Tick:
    """Do what is due by the clock, except questions: delayed messages released, leases ended, transactions parked or
    rolled back whose checks are exhausted or whose half_retention is over. At most ``limit`` rows per kind. Answer:
    None."""

    limit: int = 100_000


@dataclass(frozen=True, slots=True)
class Park:
    """Park a transaction (the position of its first half message) of which nobody can be asked, if it is open. Answer:
    whether it was."""

    transaction: int


@dataclass(frozen=True, slots=True)
class Recheck:
    """Open parked or undecided transactions anew: no checks spent, due now. Answer: codes (uint8 array)."""

    transactions: pa.Array  # fixed_size_binary(16)


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Commit ``transactions`` as batch ``number`` of ``writer`` (16 bytes), once; see
    :mod:`escrowmq.ledger.transactions.writers`. Answer: {"status": COMMITTED or ALREADY_COMMITTED, "last": the writer's
    last batch, "rolled_back": losers}."""

    writer: bytes
    number: int
    transactions: pa.Array  # fixed_size_binary(16)
    session: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Make a consumer group, or join it (same subscription). Answer: {"group": ordinal, "created": bool, "start": where
    the group began}."""

    group: str
    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterGroup:
    """Give a consumer group another subscription; None: as it is. Its redelivery is one thing: whoever names delays
    takes the back-off away, and the other way round, and ``default_redelivery`` begins with the rules'. In queues that
    are new to the group it begins at ``start``. Answer: the :class:`Subscription`."""

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
class ResetGroup:
    """Set where a consumer group continues, in all its queues, in those of ``topic``, or in one ``queue`` of it: at
    ``start`` (as of :class:`Subscription`), at the ``offset`` of that queue, by ``shift`` offsets from where it is, or
    at ``places`` (queue id and offset); one of the four. ``force``: end leases of a group that holds what is in doubt,
    too. Answer: a dict for each queue (see ``groups/operating.py``)."""

    group: str
    topic: str | None = None
    queue: int | None = None
    start: str | None = None
    offset: int | None = None
    shift: int | None = None
    places: Sequence[tuple[int, int]] | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class PauseGroup:
    """Hand out nothing of these ``topics`` to a consumer group (none: of any), or continue with them (none: with all).
    Answer: what is paused now: {"all", "topics", "leased"}."""

    group: str
    topics: tuple[str, ...] = ()
    paused: bool = True


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Forget a consumer group with all that it did. ``number``: UNKNOWN_GROUP if that is not its number. ``force``:
    also while consumers hold messages. Answer: what went with it."""

    group: str
    number: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Be the named member of a group that holds what is in doubt; see :mod:`escrowmq.ledger.groups.members`.
    ``process`` is a random number of the process's own; ``resume``: it is the member already and lost an answer.
    ``keep``: leases that it has, with the offset behind the last message that reached it. Answer: {"member", "epoch"}.
    """

    group: str
    instance: str
    process: int
    resume: bool = False
    keep: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Fence:
    """Give what a named member holds back to its group. Answer: {"member", "messages"}, how many it held."""

    group: str
    instance: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Lease messages to a member. Answer: :class:`Leased` (empty when nothing is there)."""

    group: str
    member: int
    max_messages: int
    lease_us: int
    queue_ids: Sequence[int] | None = None  # restrict to these
    epoch: int | None = None  # of the member's Join; groups that hold what is in doubt want it
    one_by_one: bool = False  # the member takes messages one after the other (groups/reaching.py)


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased messages (arrays of one length), in the order they are to be delivered."""

    leases: Int64s
    queue_ids: Int64s
    offsets: Int64s
    attempts: Int64s
    positions: Int64s


def nothing_leased() -> Leased:
    """Return the answer of a receive that found nothing."""
    none = np.empty(0, np.int64)
    return Leased(none, none, none, none, none)


@dataclass(frozen=True, slots=True)
class Settle:
    """Acknowledgements of one consumer group: ``batch`` of schema SETTLING. Answer: ENDED (OK, LEASE_LOST,
    BAD_REQUEST)."""

    group: str
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Bury:
    """Make dead letters of leased messages that cannot be handed out, each a lease, an offset and a cause. The attempt
    is not counted. Answer: how many (int)."""

    group: str
    rows: Sequence[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class SettleDead:
    """Retry (deliver again, attempts counted anew) or discard dead letters. ``dead_us``: when each of them died, as
    whoever decided about it saw it; one that died at another time is not touched (None: whichever death it is). Answer:
    codes (uint8 array)."""

    group: str
    queue_ids: Int64s
    offsets: Int64s
    retry: bool
    dead_us: Int64s | None = None


@dataclass(frozen=True, slots=True)
class EditDead:
    """Give a group another message in place of a dead letter: ``batch``, one row of schema OUTGOING with a message id
    of its own. ``dead_us``: as of :class:`SettleDead`. Answer: OK, or ALREADY_EXISTS if the edit of this id was done
    before (code)."""

    group: str
    queue_id: int
    offset: int
    dead_us: int | None
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Retain:
    """Let go of what is older than ``visible_us``. ``limit_position``: segments reach no further; ``early_position``:
    as far as they may go before that time, where topics keep less. Answer: position (int) below which the log may drop
    whole segments; undecided half messages below it have been expired by the events."""

    visible_us: int
    limit_position: int
    early_position: int = 0


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget up to ``limit`` producer sessions that were used last before ``before_us``, but for those ``connected``
    (epochs); see :mod:`escrowmq.ledger.transactions.forgetting`. Answer: how many (int)."""

    before_us: int
    connected: Int64s
    limit: int = 10_000


@dataclass(frozen=True, slots=True)
class ForgetWriter:
    """Forget a writer (16 bytes) now, with its producer group. Answer: {"group", "sessions"}."""

    writer: bytes


Command = (
    Configure
    | CreateTopic
    | AlterTopic
    | DeleteTopic
    | Cut
    | OpenSession
    | AlterProducers
    | Send
    | Prepare
    | End
    | AskChecks
    | Tick
    | Recheck
    | Park
    | CommitBatch
    | Subscribe
    | AlterGroup
    | ResetGroup
    | PauseGroup
    | DeleteGroup
    | Join
    | Fence
    | Receive
    | Settle
    | Bury
    | SettleDead
    | EditDead
    | Retain
    | Forget
    | ForgetWriter
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The subscription of a consumer group, the same for all its members.

    ``start`` is ``"earliest"``, ``"latest"`` or microseconds since 1970 as a string; it is resolved once, when the
    group first meets a queue. ``max_attempts`` and the back-offs None: the rules'. ``retry_delays_us`` not empty: what
    to wait after each attempt, the last for all that follow, instead of a back-off; there is one attempt more than
    delays unless ``max_attempts`` says otherwise. ``tags`` empty: all.
    """

    topics: tuple[str, ...]
    tags: tuple[str, ...] = ()
    ordered: bool = False
    start: str = "earliest"
    max_attempts: int | None = None
    retry_backoff_us: int | None = None
    retry_backoff_max_us: int | None = None
    in_doubt: str = "redeliver"
    """What becomes of messages whose consumer is silent: ``"redeliver"`` when their lease ends, or ``"hold"`` until it
    comes back or is fenced."""
    starts: dict[str, int] = field(default_factory=dict)
    """Resolved first offsets by queue id (as text, for JSON); filled by ``decide``, never by a caller."""
    retry_delays_us: tuple[int, ...] = ()
