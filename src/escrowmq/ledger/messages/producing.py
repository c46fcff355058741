"""Messages on their way in: SEND and PREPARE become one event each, refused rows left out.

The answer to each accepted row is known before the log has it, because the log numbers rows one after the other: a
half message's transaction id *is* its position. A row whose message id is known gets the receipt of that first message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.commands import Decision, Event, Prepare, Send
from escrowmq.ledger.messages.admission import Placement, check_limits, group_by_queue, place
from escrowmq.ledger.transactions.decisions import NONE, OPEN
from escrowmq.message.ids import transaction_ids
from escrowmq.schemas import PRODUCED, STORED, Kind

if TYPE_CHECKING:
    from escrowmq.ledger.ledger import Ledger

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Answers:
    """The columns of PRODUCED while they are filled in."""

    codes: UInt8s
    positions: Int64s
    queues: npt.NDArray[np.int32]
    offsets: Int64s
    transactions: Int64s  # position of the transaction's first half message
    epochs: Int64s


def decide_produce(ledger: Ledger, command: Send | Prepare, now_us: int) -> Decision:
    """The events (topics to be made first, then the messages) and the answer, a row each."""
    half = isinstance(command, Prepare)
    batch, rules = command.batch, ledger.rules
    size = batch.num_rows
    if half and rules.reject_transactional:
        codes = np.full(size, code.NO_PERMISSION, np.uint8)
    else:
        codes = ledger.sessions.check(command.sessions, transactional=half, rules=rules)
        limits = check_limits(batch, ledger.topics, rules)
        codes = np.where(codes == code.OK, limits, codes)
    known, repeats = ledger.dedup.find(batch.column("message_id"))
    leaders = _leaders(repeats, codes)
    owners = (
        _join(ledger, command, codes, (known == NONE) & (leaders == np.arange(size)))
        if isinstance(command, Prepare)
        else np.empty(0, np.int64)
    )
    placement = place(batch, codes, ledger.topics, rules)
    none = np.full(size, NONE, np.int64)
    answers = _Answers(codes, none, placement.queues.copy(), none.copy(), none.copy(), np.zeros(size, np.int64))
    _repeat_known(ledger, batch, answers, known, half)
    if half:
        _limit_open(ledger, command.sessions, codes, owners, known, leaders)
    fresh = np.flatnonzero((codes == code.OK) & (known == NONE) & (leaders == np.arange(size)))
    base = ledger.next_position + len(placement.made)
    answers.positions[fresh] = np.arange(base, base + len(fresh))
    if half:
        _begin_or_join(ledger, command.sessions, answers, fresh, owners)
    else:
        _offsets(ledger, batch, answers, fresh, placement)
    _repeat_leaders(answers, known, leaders)
    events = []
    if len(fresh):
        if placement.made:
            events.append(ledger.topics.creation(placement.made))
        stored = _stored(batch, command.sessions, placement, answers, fresh, now_us, ledger)
        events.append(Event(Kind.HALF if half else Kind.PLAIN, stored))
    return Decision(tuple(events), _produced(ledger, answers, half))


def _leaders(repeats: Int64s, codes: UInt8s) -> Int64s:
    """The row that stands for each row: the first of its message id that is fit so far; itself if it is not fit."""
    leaders = np.arange(len(codes))
    if (codes == code.OK).all() or (repeats == leaders).all():
        return repeats
    fit = np.flatnonzero(codes == code.OK)
    _, first, back = np.unique(repeats[fit], return_index=True, return_inverse=True)
    leaders[fit] = fit[first][back]
    return leaders


def _join(ledger: Ledger, command: Prepare, codes: UInt8s, fresh: npt.NDArray[np.bool_]) -> Int64s:
    """The transaction (ordinal) that each row joins, -1 for those that begin one; unfit rows get their code.

    Only fresh rows: a row whose message is known has joined already, whatever became of the transaction since.
    """
    transactions = ledger.transactions
    owners = np.full(command.batch.num_rows, NONE, np.int64)
    ids = command.batch.column("transaction")
    if ids.null_count == len(ids):
        return owners
    joining = ids.is_valid().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(joining & (codes == code.OK) & fresh)
    found, wrong = transactions.find_ids(ids.take(pa.array(rows)))
    codes[rows] = wrong
    kept, found = rows[wrong == code.OK], found[wrong == code.OK]
    foreign = transactions.foreign(found, ledger.sessions.groups_of(command.sessions[kept]))
    codes[kept[foreign]] = code.WRONG_GROUP
    decided = transactions.column("state", found) != OPEN
    codes[kept[~foreign & decided]] = code.TRANSACTION_DECIDED
    _, place_of, sizes = np.unique(found, return_inverse=True, return_counts=True)
    full = transactions.column("messages", found) + sizes[place_of] > ledger.rules.max_transaction_messages
    codes[kept[~foreign & ~decided & full]] = code.TOO_MANY
    good = codes[kept] == code.OK
    owners[kept[good]] = found[good]
    return owners


def _limit_open(
    ledger: Ledger, sessions: Int64s, codes: UInt8s, owners: Int64s, known: Int64s, leaders: Int64s
) -> None:
    """Refuse what would give a producer group too many undecided transactions."""
    begins = (codes == code.OK) & (owners == NONE) & (known == NONE) & (leaders == np.arange(len(codes)))
    rows = np.flatnonzero(begins)
    if not len(rows):
        return
    groups = ledger.sessions.groups_of(sessions[rows])
    for group in np.unique(groups).tolist():
        mine = rows[groups == group]
        room = ledger.rules.max_open_transactions - ledger.transactions.open.get(group, 0)
        codes[mine[max(room, 0) :]] = code.TOO_MANY_OPEN


def _repeat_known(ledger: Ledger, batch: pa.RecordBatch, answers: _Answers, known: Int64s, half: bool) -> None:
    """Rows whose message id was stored before get that message's receipt (I9), or hear that it left the log since."""
    rows = np.flatnonzero((known != NONE) & (answers.codes == code.OK))
    if not len(rows):
        return
    if half:
        gone = known[rows] < ledger.trimmed_position
        answers.codes[rows[gone]] = code.UNKNOWN_TRANSACTION
        rows = rows[~gone]
    positions = known[rows]
    owners = ledger.transactions.owner_of(positions)
    answers.positions[rows] = positions
    was_half = owners != NONE
    answers.codes[rows[(was_half != half) & (positions >= ledger.trimmed_position)]] = code.MESSAGE_ID_TAKEN
    if half:
        rows, owners = rows[was_half], owners[was_half]
        answers.transactions[rows] = ledger.transactions.column("first", owners)
        answers.epochs[rows] = ledger.transactions.column("epoch", owners)
        answers.queues[rows] = ledger.topics.numbers_of(ledger.transactions.queue_ids_of(known[rows], owners))
        return
    rows, positions = rows[~was_half], positions[~was_half]
    answers.queues[rows] = ledger.topics.numbers_of(ledger.delays.queue_ids_of(positions))
    topics = np.array(batch.column("topic").take(pa.array(rows)).to_pylist(), object)
    for topic in set(topics.tolist()):
        mine = topics == topic
        queues, offsets = ledger.topics.find(topic, positions[mine])
        placed = offsets != NONE
        at = rows[mine][placed]
        answers.queues[at], answers.offsets[at] = queues[placed], offsets[placed]


def _repeat_leaders(answers: _Answers, known: Int64s, leaders: Int64s) -> None:
    """Rows that repeat an id of an earlier row of the same batch get that row's receipt."""
    rows = np.flatnonzero((leaders != np.arange(len(leaders))) & (known == NONE))
    for column in (
        answers.codes,
        answers.positions,
        answers.queues,
        answers.offsets,
        answers.transactions,
        answers.epochs,
    ):
        column[rows] = column[leaders[rows]]


def _begin_or_join(ledger: Ledger, sessions: Int64s, answers: _Answers, fresh: Int64s, owners: Int64s) -> None:
    """The transaction of each fresh row: the one it joins, else its own."""
    joining = owners[fresh] != NONE
    own = np.where(joining, NONE, answers.positions[fresh])
    epochs = sessions[fresh].copy()
    if joining.any():
        joined = owners[fresh][joining]
        own[joining] = ledger.transactions.column("first", joined)
        epochs[joining] = ledger.transactions.column("epoch", joined)
    answers.transactions[fresh] = own
    answers.epochs[fresh] = epochs


def _offsets(ledger: Ledger, batch: pa.RecordBatch, answers: _Answers, fresh: Int64s, placement: Placement) -> None:
    """Offsets that plain messages will get; delayed ones have none yet."""
    now = fresh[batch.column("delay_us").to_numpy()[fresh] == 0]
    queues = ledger.topics.queues
    for queue_id, rows in group_by_queue(placement.queue_ids[now]):
        at = now[rows]
        end = queues[queue_id].end if queue_id < len(queues) else 0
        answers.offsets[at] = np.arange(end, end + len(at))


def _stored(
    batch: pa.RecordBatch,
    sessions: Int64s,
    placement: Placement,
    answers: _Answers,
    fresh: Int64s,
    now_us: int,
    ledger: Ledger,
) -> pa.RecordBatch:
    """The rows of the event; bodies are copied only when some rows are left out."""
    whole = len(fresh) == batch.num_rows
    kept = batch if whole else batch.take(pa.array(fresh))
    delay = kept.column("delay_us").to_numpy()
    visible = np.where(delay > 0, now_us + delay, 0)
    half = answers.transactions[fresh] != NONE
    immunity = kept.column("immunity_us").to_numpy()
    due = np.where(half, now_us + np.where(immunity > 0, immunity, ledger.rules.transaction_timeout_us), 0)
    columns = {
        name: kept.column(name) for name in ("topic", "key", "tag", "properties", "body", "message_id", "born_us")
    }
    columns |= {
        "queue": pa.array(placement.queues[fresh]),
        "queue_id": pa.array(placement.queue_ids[fresh]),
        "visible_us": pa.array(visible),
        "due_us": pa.array(due),
        "transaction": pa.array(answers.transactions[fresh]),
        "epoch": pa.array(sessions[fresh].astype(np.uint32)),
    }
    schema = STORED[Kind.PLAIN]
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _produced(ledger: Ledger, answers: _Answers, half: bool) -> pa.RecordBatch:
    size = len(answers.codes)
    refused = answers.codes != code.OK
    answers.positions[refused] = NONE
    answers.offsets[refused] = NONE
    answers.queues[refused] = NONE
    if half:
        ids = transaction_ids(ledger.shard, answers.epochs, answers.transactions, ~refused)
    else:
        ids = pa.nulls(size, PRODUCED.field("transaction").type)
    columns = [
        pa.array(answers.codes),
        pa.array(answers.positions),
        pa.array(answers.queues),
        pa.array(answers.offsets),
        ids,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PRODUCED)
