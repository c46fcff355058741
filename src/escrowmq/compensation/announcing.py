"""The producer's side: half messages ended one way, and the unique-key topic with the ids of the committed ones.

Steps of a send (picture in docs/compensation.md):

1. The half messages are prepared; their ids, which are the unique keys, are now known.
2. One database transaction contains the local change *and* the announcement: an outbox row for the key topic, which a
   relay sends by any target (``announce="outbox"``). So an id is announced if and only if its change is committed.
3. The transactions end one way: commit, or rollback if the local change failed. If an end is lost, a half message is
   announced but not visible; the scheduler finds it.

``announce="direct"`` is the order of the oldest document: the database's commit, the one-way commit, then a plain send
of the key. After a crash in between nothing is announced: no process finds such an order.

Repeated sends (decision 0034). No other process knows an id generated here, so it cannot be sent again before the first
send is complete. An id of the caller can be: after a crash, by a retried request, by two processes at once. Then a mark
in ``trans_recv_log``, in the transaction of the local change, decides which send counts: a process that finds the mark
does not repeat the change. A rollback at the broker could harm another send of the same id, so it runs while the mark
is locked.
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
from escrowmq.outbox.modes.journal import to_batch
from escrowmq.outbox.modes.senders import Sender, sender_of
from escrowmq.outbox.sending import send_batch_tx
from escrowmq.outbox.session import AnySession
from escrowmq.outbox.targets.seam import Target
from escrowmq.platform.failpoints import reach

MARKS_PREFIX = "announced."
"""Prefix of the group name for marks of sends with caller-supplied ids in ``trans_recv_log``; the key topic follows."""

Business = Callable[[Session], object]
Flags = npt.NDArray[np.bool_]
Id = str | bytes
Messages: TypeAlias = Message | Iterable[Message] | pa.RecordBatch | pa.Table


@dataclass(frozen=True, slots=True)
class Prepared:
    """Half messages durable at the broker, one transaction each, not yet decided by this send."""

    ids: tuple[bytes, ...]
    """The unique keys: the message ids."""
    transactions: tuple[TransactionId, ...]
    given: bool
    """Whether an id was supplied by the caller, so that other sends of it may be in progress or complete."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Result of one send. The unique keys are always set, whatever the result of the local transaction."""

    ids: tuple[bytes, ...]
    """The unique keys, one per message."""
    transactions: tuple[TransactionId, ...]
    outcome: Outcome
    """Outcome of the local transaction. COMMIT: the database committed, now or, if ``repeated``, in an earlier send.
    ROLLBACK: it never will. UNKNOWN: the commit itself failed (or the local change ended the transaction); the half
    messages stay undecided, and if it did commit, the scheduler finds them."""
    ends: tuple[Code, ...]
    """Result of each end: SENT if it was not waited for, else the broker's response, or why it was not sent."""
    keys: Code = Code.OK
    """Result of the announcement. OK: it is in the outbox, or was acknowledged. With ``announce="direct"`` any other
    code is the failure, and :meth:`Announcing.announce` sends it again."""
    repeated: bool = False
    """Whether an earlier send of these ids had committed; then the local change was not repeated."""
    error: BaseException | None = field(default=None, compare=False)
    """Exception of the local change or of the commit."""

    @property
    def unique_keys(self) -> tuple[str, ...]:
        """The ids in the form of the key topic: 32 hexadecimal digits each."""
        return tuple(identity.hex() for identity in self.ids)

    def check(self) -> Announced:
        """Return itself if the local transaction committed; otherwise raise its exception."""
        if self.error is not None:
            raise self.error
        return self


class Announcing:
    """Sends half messages with a local transaction and announces the committed ids.

    ``Announcing(bus.producer("shop", unasked=True, confirm="oneway"), database=engine).send(message, business)``.

    ``producer`` sends the half messages; its ``confirm`` determines whether single ends are waited for. ``keys`` is the
    key topic, ``database`` an engine or a sessionmaker of the business tables, with the outbox's tables in it.
    ``announce="outbox"``: in the business transaction, sent by a relay; ``"direct"``: after it, ``by`` a plain producer
    (of another group: one with transactions sends no plain messages), a target of the relay, or a custom sender.

    ``on_failure`` controls the half messages of a failed local change. ``"rollback"``: they are rolled back, so an id
    of the caller cannot be used again. ``"keep"``: those with ids of the caller stay undecided and invisible, so that
    they can be sent again under the id; if that never happens, they are parked at the broker after ``half_retention``,
    and expire.

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
            text = "no sender of the keys" if by is None else "by= has no use with an outbox: its relay sends the keys"
            raise Misuse(Code.BAD_ARGUMENT, text, 'announce="direct", by=a plain producer or a target')
        self.producer = producer
        self.keys = keys
        self._sessions = sessionmaker(database) if isinstance(database, sa.Engine) else database
        self._sender = None if by is None else sender_of(by)
        self._keep_undecided = on_failure == "keep"

    # Complete sends

    def send(self, messages: Messages, business: Business) -> Announced:
        """Send a Message, or many in any form of the producer, with one local transaction ``business(session)``.

        Each message is a separate transaction at the broker and is announced by its own id. An exception of the local
        change is in the result, not raised. With ids of the caller a send may be repeated: a later one finds the mark
        of the first, does not call ``business``, and ends transactions that were left undecided.

        Raises before the local change runs, and announces nothing: the errors of a prepare; for ids of the caller also
        Rejected(CONFLICT) if one was rolled back before, Rejected(EXPIRED), Rejected(TRANSACTION_DECIDED) if it was
        committed outside of sends, or so long ago that its mark was purged, Rejected(MESSAGE_ID_TAKEN) if only some
        were sent before.
        """
        if self._sessions is None:
            hint = "database=engine, or prepare() and announce_tx()"
            raise Misuse(Code.BAD_ARGUMENT, "send() needs a database", hint)
        prepared = self.prepare(messages)
        reach("announcing.prepared")
        done = self._run_local(self._sessions, prepared, business)
        if done.outcome is not COMMIT:
            return done
        reach("announcing.committed")
        ends = self.commit(prepared)
        reach("announcing.ended")
        keys = Code.OK if self._sender is None else self.announce(prepared.ids)
        return replace(done, ends=ends, keys=keys)

    def resend(self, messages: Messages) -> Announced:
        """Send messages with committed local changes again under their ids, as a scheduler's ``resend`` does. Ends are
        waited for; nothing is announced. The broker's rules for repeats apply: an undecided half message is the same
        transaction and is committed; a committed one stays; one outside the broker's ``dedup_window`` is created again,
        so consumers must detect repeats by id. Raises Misuse(BAD_ARGUMENT) for a message without an id,
        Rejected(MESSAGE_ID_TAKEN) for different content under the id, Rejected(CONFLICT) for a rolled back one,
        Rejected(EXPIRED), Unknown: try again."""
        prepared = self._prepare(messages, only_given=True)
        results = self.producer.end_batch(prepared.transactions, COMMIT).check()
        return Announced(prepared.ids, prepared.transactions, COMMIT, tuple(results), repeated=True)

    # Single steps, for callers with their own session

    def prepare(self, messages: Messages) -> Prepared:
        """Prepare half messages and wait for the response. Raises the error of the first rejected one; the others are
        rolled back if their ids were generated here, and left undecided otherwise."""
        return self._prepare(messages)

    def announce_tx(self, session: AnySession, ids: Prepared | Iterable[Id]) -> bool:
        """Write the announcement inside your transaction, before your change. Returns True to continue. False: the mark
        shows that an earlier send of these ids has committed; roll your session back, and :meth:`commit`. With ids
        alone, or with ``announce="direct"`` (where :meth:`announce` follows your commit), no unneeded row is written,
        and there is no mark: True. Raises as ``outbox.send_batch_tx``, and as :meth:`send` for ids of the caller."""
        prepared = ids if isinstance(ids, Prepared) else None
        raw_ids = list(prepared.ids) if prepared is not None else [message_id(i) for i in ids]  # type: ignore[union-attr]
        if prepared is not None and prepared.given and not self._claim(session, prepared):
            return False
        if self._sender is None:
            send_batch_tx(session, self._make_key_messages(raw_ids))
        return True

    def commit(self, prepared: Prepared) -> tuple[Code, ...]:
        """End the transactions after your commit, one way if the producer does so. Returns one code each."""
        return self._end(prepared, COMMIT)

    def rollback(self, prepared: Prepared) -> tuple[Code, ...]:
        """Roll back after your change failed. With own ids call it before your session's rollback unlocks the mark."""
        return self._end(prepared, ROLLBACK, "answered" if prepared.given else None)

    def announce(self, ids: Iterable[Id]) -> Code:
        """Announce ids whose change is committed (with an outbox in a separate transaction); return OK or the
        failure."""
        raw_ids = [message_id(identity) for identity in ids]
        if self._sender is not None:
            batch = to_batch(self._make_key_messages(raw_ids))
            codes = self._sender.send(batch, self._sender.place(batch.column("key")))
            return Code(int(codes[np.flatnonzero(codes)[0]])) if codes.any() else Code.OK
        if self._sessions is None:
            raise Misuse(Code.BAD_ARGUMENT, "an outbox needs a database", "Announcing(..., database=engine)")
        with self._sessions() as session, session.begin():
            send_batch_tx(session, self._make_key_messages(raw_ids))
        return Code.OK

    # Internals

    def _make_key_messages(self, ids: Sequence[bytes]) -> list[Message]:
        return [Message(self.keys, i.hex().encode(), key=i.hex(), message_id=i) for i in ids]

    def _prepare(self, messages: Messages, *, only_given: bool = False) -> Prepared:
        data, has_id = _find_given_ids(messages)
        if only_given and not has_id.all():
            hint = "give it the message_id of the first time"
            raise Misuse(Code.BAD_ARGUMENT, "a message without an id cannot be sent again", hint)
        given = bool(has_id.any())
        # ids find the broker of a batch if all are given; a message without an id can go to any broker
        receipts = self.producer.prepare_batch(to_batch(data) if given else data)
        if not receipts.ok:
            taken = receipts.transactions.filter(pa.array(receipts.codes == 0))
            if not given and len(taken):
                with suppress(EscrowError):  # otherwise left undecided, and never announced
                    self.producer.end_batch(taken, ROLLBACK)
            receipts.check()
        ids, transactions = receipts.message_ids.to_pylist(), receipts.transactions.to_pylist()
        return Prepared(tuple(ids), tuple(map(TransactionId.from_bytes, transactions)), given)

    def _claim(self, session: AnySession, prepared: Prepared) -> bool:
        """Decide whether no send of these ids has committed. Other sends of them wait until the session has ended."""
        fresh = claim_batch_tx(session, prepared.ids, MARKS_PREFIX + self.keys)
        if not any(fresh):
            return not prepared.ids
        if not all(fresh):
            hint = "send together what was sent together, or resend() what is committed"
            raise Rejected(Code.MESSAGE_ID_TAKEN, "some of these messages were sent before, and some not", hint)
        for code in self.producer.end_batch(prepared.transactions, UNKNOWN).codes.tolist():  # queries only
            if code == Code.ALREADY_COMMITTED:
                text = "the message is committed without a mark here: the mark was purged, or an operator committed it"
                raise Rejected(Code.TRANSACTION_DECIDED, text, "see its state: escrowmq lookup")
            if code == Code.ALREADY_ROLLED_BACK:
                text = "the message was rolled back, so its id cannot be used again"
                raise Rejected(Code.CONFLICT, text, 'give it a new id; or Announcing(on_failure="keep")')
            if code != Code.NOTED:
                raise error(Code(code))
        return True

    def _run_local(self, sessions: Callable[[], Session], prepared: Prepared, business: Business) -> Announced:
        """Run announcement and local change in one transaction; end the half messages if it did not commit."""
        is_claimed = False
        result = Announced(prepared.ids, prepared.transactions, ROLLBACK, (Code.NOTED,) * len(prepared.ids))
        with sessions() as session:
            try:
                transaction = session.begin()
                first = self.announce_tx(session, prepared)
                is_claimed = True
                if not first:
                    return replace(result, outcome=COMMIT, repeated=True)
                business(session)
                session.flush()  # a change that the database rejects here certainly was not applied
                if session.get_transaction() is not transaction:
                    hint = "it commits when the local change returns, and rolls back when that raises"
                    raise Misuse(Code.NO_TRANSACTION, "the local change ended the transaction of the send", hint)
            except BaseException as problem:
                if is_claimed and session.get_transaction() is not transaction:  # ended with unknown result
                    return replace(result, outcome=UNKNOWN, error=problem)
                if is_claimed and prepared.given and not self._keep_undecided:
                    # before the mark is unlocked, so that waiting sends find it decided
                    result = replace(result, ends=self.rollback(prepared))
                failed = problem
            else:
                reach("announcing.changed")
                try:
                    session.commit()
                except Exception as problem:
                    return replace(result, outcome=UNKNOWN, error=problem)
                return replace(result, outcome=COMMIT)
        if not prepared.given:
            result = replace(result, ends=self.rollback(prepared))
        if not isinstance(failed, Exception) or (isinstance(failed, EscrowError) and not is_claimed):
            raise failed
        return replace(result, error=failed)

    def _end(self, prepared: Prepared, outcome: Outcome, confirm: Confirm | None = None) -> tuple[Code, ...]:
        """End each transaction; return one code per transaction."""
        codes: list[Code] = []
        for transaction in prepared.transactions:
            try:
                codes.append(self.producer.end(transaction, outcome, confirm=confirm))
            except EscrowError as problem:
                codes.append(problem.code)
        return tuple(codes)


def _find_given_ids(messages: Messages) -> tuple[list[Message] | pa.RecordBatch | pa.Table, Flags]:
    """Return the messages, and flags for caller-supplied ids. Raises Misuse(BAD_ARGUMENT) for a joining one."""
    if not isinstance(messages, pa.RecordBatch | pa.Table):
        listed = [messages] if isinstance(messages, Message) else list(messages)
        return listed, np.array([getattr(one, "message_id", None) is not None for one in listed], np.bool_)
    columns = messages.schema.names
    if "transaction" in columns and messages.column("transaction").null_count < messages.num_rows:
        raise Misuse(Code.BAD_ARGUMENT, "such a message is a separate transaction and cannot join another")
    if "message_id" not in columns:
        return messages, np.zeros(messages.num_rows, np.bool_)
    return messages, np.asarray(messages.column("message_id").is_valid())
