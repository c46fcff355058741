"""The producer's side: half messages that end one way, and the unique-key topic that says which of them were committed.

A send goes like this (docs/compensation.md has the picture):

1. The half messages are prepared; their ids, which are the unique keys, are known from here on.
2. One database transaction has the local change *and* the announcement: a row of the outbox for the key topic, which a
   relay sends by any target (``announce="outbox"``). So an id is announced if and only if its change is committed.
3. The transactions end one way: commit, or rollback where the local change failed. An end that is lost leaves a half
   message that was announced and is not visible; the scheduler finds it.

``announce="direct"`` is the order of the oldest document: the database's commit, the one-way commit, then a plain send
of the key. A producer that dies in between announces nothing: such an order is found by nobody.

Sending again (decision 0034). An id made here is known to nobody else, so nothing can be sent again under it before the
first send is over. An id of the caller's may be: after a crash, by a retry of a request, by two processes at once. Then
the database says which send counts, by a mark in ``trans_recv_log``, in the transaction of the local change: whoever
finds the mark does not change anything again. Everything that could hurt another send of the same id, a rollback at the
broker, happens while the mark is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.client.producing.oneway import Confirm
from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.names import check_name
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Message, Outcome, TransactionId, message_id
from escrowmq.outbox.inbox import claim_batch_tx
from escrowmq.outbox.modes.journal import Intake
from escrowmq.outbox.modes.senders import Sender, sender_of
from escrowmq.outbox.sending import send_batch_tx
from escrowmq.outbox.session import AnySession
from escrowmq.outbox.targets.seam import Target
from escrowmq.platform.failpoints import reach

MARKS_PREFIX = "announced."
"""Of the name under which marks of sends with ids of the caller's stand in ``trans_recv_log``; the key topic's name
follows.
"""

Business = Callable[[Session], object]
Flags = npt.NDArray[np.bool_]
Id = str | bytes
Messages: TypeAlias = Message | Iterable[Message] | pa.RecordBatch | pa.Table


@dataclass(frozen=True, slots=True)
class Prepared:
    """Half messages that are durable at the broker, one transaction each, and not decided by this send yet."""

    ids: tuple[bytes, ...]
    """The unique keys: the message ids."""
    transactions: tuple[TransactionId, ...]
    given: bool
    """Whether an id was the caller's own, so that other sends of it may be under way, or over."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The result of one send. The unique keys are always there, whatever became of the local transaction."""

    ids: tuple[bytes, ...]
    """The unique keys, one per message."""
    transactions: tuple[TransactionId, ...]
    outcome: Outcome
    """Of the local transaction. COMMIT: the database committed, now or, if ``repeated``, in an earlier send. ROLLBACK:
    it did not, and never will. UNKNOWN: the commit itself failed (or the local change ended the transaction itself), so
    that nobody here knows; the half messages are left as they are, and if it did commit the scheduler finds them."""
    ends: tuple[Code, ...]
    """What is known of the end of each transaction: SENT where it was not waited for, else the broker's answer, or why
    it was not sent."""
    keys: Code = Code.OK
    """Of the announcement. OK: it stands in the outbox, or was acknowledged; with ``announce="direct"`` anything else
    is why it was not, and :meth:`Announcing.announce` sends it again."""
    repeated: bool = False
    """Whether an earlier send of these ids had committed; the local change was not done again."""
    error: BaseException | None = field(default=None, compare=False)
    """What the local change, or the commit, raised."""

    @property
    def unique_keys(self) -> tuple[str, ...]:
        """The ids as the key topic has them: 32 hexadecimal digits each."""
        return tuple(identity.hex() for identity in self.ids)

    def check(self) -> Announced:
        """Itself, if the local transaction committed; raises what it raised otherwise."""
        if self.error is not None:
            raise self.error
        return self


class Announcing:
    """``Announcing(bus.producer("shop", unasked=True, confirm="oneway"), database=engine).send(message, business)``.

    ``producer`` makes the half messages; the single ends are waited for, or not, as it says (``confirm``). ``keys`` is
    the key topic, ``database`` an engine or a sessionmaker of the business tables, with the outbox's tables in it.
    ``announce="outbox"``: in the transaction of the business, sent by a relay; ``"direct"``: after it, ``by`` a plain
    producer (another group: one with transactions sends no plain messages), a target of the relay, or a sender of your
    own.

    ``on_failure`` says what becomes of the half messages where the local change failed. ``"rollback"``: they are rolled
    back, so an id of the caller's is spent: it needs a new one to be done again. ``"keep"``: those with ids of the
    caller's are left undecided, invisible, so that the same can be sent again under its id; what is never sent again is
    parked at the broker after ``half_retention``, and expires.

    Thread-safe, as far as ``by`` is. It closes nothing. Raises Misuse(BAD_ARGUMENT), Rejected(BAD_TOPIC_NAME).
    """

    def __init__(
        self,
        producer: Producer,
        keys: str = "order-keys",
        *,
        database: sa.Engine | sessionmaker[Session] | None = None,
        announce: Literal["outbox", "direct"] = "outbox",
        by: Producer | Target | Sender | None = None,
        on_failure: Literal["rollback", "keep"] = "rollback",
    ) -> None:
        check_name(keys, Code.BAD_TOPIC_NAME)
        check_name(MARKS_PREFIX + keys, Code.BAD_TOPIC_NAME)  # the marks' name has the same limit
        if announce not in ("outbox", "direct"):
            raise Misuse(Code.BAD_ARGUMENT, f"announce = {announce!r}", '"outbox" or "direct"')
        if on_failure not in ("rollback", "keep"):
            raise Misuse(Code.BAD_ARGUMENT, f"on_failure = {on_failure!r}", '"rollback" or "keep"')
        if (announce == "direct") != (by is not None):
            text = "who sends the keys?" if by is None else "by= has no use with an outbox: its relay sends the keys"
            raise Misuse(Code.BAD_ARGUMENT, text, 'announce="direct", by=a plain producer or a target')
        self.producer = producer
        self.keys = keys
        self._sessions = sessionmaker(database) if isinstance(database, sa.Engine) else database
        self._sender = None if by is None else sender_of(by)
        self._keeps = on_failure == "keep"
        self._intake = Intake()

    # The whole of it

    def send(self, messages: Messages, business: Business) -> Announced:
        """One Message, or many in any form that a producer takes, and one local transaction ``business(session)``.

        Each message is a transaction of its own at the broker and is announced by its own id. What the local change
        raises is in the result, not raised. Under ids of the caller's a send may be repeated: a later one finds the
        mark of the first, does not call ``business``, and ends what was left undecided.

        Raises before the local change is done, and nothing is announced: what a prepare raises; for ids of the caller's
        also Rejected(CONFLICT) if one was rolled back before, Rejected(EXPIRED), Rejected(TRANSACTION_DECIDED) if it
        was committed by somebody else or so long ago that its mark was purged, Rejected(MESSAGE_ID_TAKEN) if only some
        of the ids were sent before.
        """
        if self._sessions is None:
            raise Misuse(
                Code.BAD_ARGUMENT, "send() needs a database", "database=engine, or prepare() and announce_tx()"
            )
        prepared = self.prepare(messages)
        reach("announcing.prepared")
        done = self._local(self._sessions, prepared, business)
        if done.outcome is not COMMIT:
            return done
        reach("announcing.committed")
        ends = self.commit(prepared)
        reach("announcing.ended")
        keys = Code.OK if self._sender is None else self.announce(prepared.ids)
        return replace(done, ends=ends, keys=keys)

    def resend(self, messages: Messages) -> Announced:
        """Send again, under their ids, messages whose local change is committed: what a scheduler's ``resend`` calls.
        The ends are waited for; nothing is announced.

        By the broker's rules of repeats a half message that is still undecided is the same transaction, and is
        committed; one that is committed stays as it is; one that the broker does not remember (``dedup_window``) is
        made anew, so its consumers must know repeats by id.

        Raises Misuse(BAD_ARGUMENT) for a message without an id, Rejected(MESSAGE_ID_TAKEN) for another content under
        the id, Rejected(CONFLICT) for one that was rolled back, Rejected(EXPIRED), Unknown: try again.
        """
        prepared = self._prepare(messages, only_given=True)
        results = self.producer.end_batch(prepared.transactions, COMMIT).check()
        return Announced(prepared.ids, prepared.transactions, COMMIT, tuple(results), repeated=True)

    # Its parts, for those who hold their own session

    def prepare(self, messages: Messages) -> Prepared:
        """Prepare half messages, answered. Raises what became of the first that was refused; those beside it are rolled
        back if their ids were made here, and left undecided if not."""
        return self._prepare(messages)

    def announce_tx(self, session: AnySession, ids: Prepared | Iterable[Id]) -> bool:
        """Write the announcement inside your transaction; call it before your change. True: continue. False: the mark
        says that an earlier send of these ids has committed; roll your session back, and :meth:`commit`.

        Given ids alone, or with ``announce="direct"`` (where :meth:`announce` follows your commit), no row is written
        that is not needed, and there is no mark: True. Raises as ``outbox.send_batch_tx``, and as :meth:`send` for ids
        of the caller's.
        """
        prepared = ids if isinstance(ids, Prepared) else None
        named = list(prepared.ids) if prepared is not None else [message_id(identity) for identity in ids]  # type: ignore[union-attr]
        if prepared is not None and prepared.given and not self._first(session, prepared):
            return False
        if self._sender is None:
            send_batch_tx(session, self._key_messages(named))
        return True

    def commit(self, prepared: Prepared) -> tuple[Code, ...]:
        """After your commit: end the transactions, one way if the producer does so. Raises nothing that became of one:
        the codes say it."""
        return self._end(prepared, COMMIT)

    def rollback(self, prepared: Prepared) -> tuple[Code, ...]:
        """Roll back the announced messages, because your change failed. With ids of your own call it before your
        session is rolled back: the mark keeps others
        away until then."""
        return self._end(prepared, ROLLBACK, "answered" if prepared.given else None)

    def announce(self, ids: Iterable[Id]) -> Code:
        """Announce ids whose change is committed, again if need be: OK, or why it is not done. With an outbox in a
        transaction of its own."""
        named = [message_id(identity) for identity in ids]
        if self._sender is not None:
            batch = self._intake(self._key_messages(named))
            codes = self._sender.send(batch, self._sender.place(batch.column("key")))
            return Code(int(codes[np.flatnonzero(codes)[0]])) if codes.any() else Code.OK
        if self._sessions is None:
            raise Misuse(Code.BAD_ARGUMENT, "an outbox needs a database", "Announcing(..., database=engine)")
        with self._sessions() as session, session.begin():
            send_batch_tx(session, self._key_messages(named))
        return Code.OK

    # Inside

    def _key_messages(self, ids: Sequence[bytes]) -> list[Message]:
        return [Message(self.keys, i.hex().encode(), key=i.hex(), message_id=i) for i in ids]

    def _prepare(self, messages: Messages, *, only_given: bool = False) -> Prepared:
        data, own = _with_ids(messages)
        if only_given and not own.all():
            hint = "give it the message_id of the first time"
            raise Misuse(Code.BAD_ARGUMENT, "what has no id cannot be sent again", hint)
        given = bool(own.any())
        # a batch whose ids are all given has its broker by them; without ids any broker may take a message
        receipts = self.producer.prepare_batch(self._intake(data) if given else data)
        if not receipts.ok:
            taken = receipts.transactions.filter(pa.array(receipts.codes == 0))
            if not given and len(taken):
                with suppress(EscrowError):  # left undecided, and announced by nobody
                    self.producer.end_batch(taken, ROLLBACK)
            receipts.check()
        ids, transactions = receipts.message_ids.to_pylist(), receipts.transactions.to_pylist()
        return Prepared(tuple(ids), tuple(map(TransactionId.from_bytes, transactions)), given)

    def _first(self, session: AnySession, prepared: Prepared) -> bool:
        """Return whether no send of these ids has committed before. From here on other sends of them wait until the
        session
        has ended."""
        fresh = claim_batch_tx(session, prepared.ids, MARKS_PREFIX + self.keys)
        if not any(fresh):
            return not prepared.ids
        if not all(fresh):
            hint = "send together what was sent together, or resend() what is committed"
            raise Rejected(Code.MESSAGE_ID_TAKEN, "some of these messages were sent before, and some not", hint)
        for code in self.producer.end_batch(prepared.transactions, UNKNOWN).codes.tolist():  # asks, and changes nothing
            if code == Code.ALREADY_COMMITTED:
                text = (
                    "the message is committed, and this database does not know of it: its mark was purged, or a "
                    "person committed it"
                )
                raise Rejected(Code.TRANSACTION_DECIDED, text, "look what became of it: escrowmq lookup")
            if code == Code.ALREADY_ROLLED_BACK:
                text = "the message was rolled back, and its id is spent with that"
                raise Rejected(Code.CONFLICT, text, 'give it a new id; or Announcing(on_failure="keep")')
            if code != Code.NOTED:
                raise error(Code(code))
        return True

    def _local(self, sessions: Callable[[], Session], prepared: Prepared, business: Business) -> Announced:
        """Announcement and local change in one transaction; of what did not commit the half messages are dealt with,
        too."""
        begun = False
        left = Announced(prepared.ids, prepared.transactions, ROLLBACK, (Code.NOTED,) * len(prepared.ids))
        with sessions() as session:
            try:
                transaction = session.begin()
                first = self.announce_tx(session, prepared)
                begun = True
                if not first:
                    return replace(left, outcome=COMMIT, repeated=True)
                business(session)
                session.flush()  # what the database refuses here surely did not happen
                if session.get_transaction() is not transaction:
                    hint = "it commits when the local change returns, and rolls back when that raises"
                    raise Misuse(Code.NO_TRANSACTION, "the local change ended the transaction of the send", hint)
            except BaseException as problem:
                if (
                    begun and session.get_transaction() is not transaction
                ):  # ended by the local change, nobody knows how
                    return replace(left, outcome=UNKNOWN, error=problem)
                if begun and prepared.given and not self._keeps:
                    # before the mark is released: who waits for it finds it decided
                    left = replace(left, ends=self.rollback(prepared))
                failed = problem
            else:
                reach("announcing.changed")
                try:
                    session.commit()
                except Exception as problem:
                    return replace(left, outcome=UNKNOWN, error=problem)
                return replace(left, outcome=COMMIT)
        if not prepared.given:
            left = replace(left, ends=self.rollback(prepared))
        if not isinstance(failed, Exception) or (isinstance(failed, EscrowError) and not begun):
            raise failed
        return replace(left, error=failed)

    def _end(self, prepared: Prepared, outcome: Outcome, confirm: Confirm | None = None) -> tuple[Code, ...]:
        """One code per transaction."""
        codes: list[Code] = []
        for transaction in prepared.transactions:
            try:
                codes.append(self.producer.end(transaction, outcome, confirm=confirm))
            except EscrowError as problem:
                codes.append(problem.code)
        return tuple(codes)


def _with_ids(messages: Messages) -> tuple[list[Message] | pa.RecordBatch | pa.Table, Flags]:
    """Return the messages, and which of them have an id of the caller's. Raises Misuse(BAD_ARGUMENT) for one that
    joins a transaction."""
    if not isinstance(messages, pa.RecordBatch | pa.Table):
        listed = [messages] if isinstance(messages, Message) else list(messages)
        return listed, np.array([getattr(one, "message_id", None) is not None for one in listed], np.bool_)
    columns = messages.schema.names
    if "transaction" in columns and messages.column("transaction").null_count < messages.num_rows:
        raise Misuse(Code.BAD_ARGUMENT, "such a message is a transaction of its own and joins no other")
    if "message_id" not in columns:
        return messages, np.zeros(messages.num_rows, np.bool_)
    return messages, np.asarray(messages.column("message_id").is_valid())
