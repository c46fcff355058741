"""Decides SEND and PREPARE: the accepted rows of a batch become one event, rejected rows get a code.

The answer to each accepted row is known before the log has it, because the log numbers rows one after the other: a
half message's transaction id *is* its position.

Rules:

1. A row whose message id its topic knows gets the receipt of that first message (I9), if it can be the same message: of
   the same kind, and, half, from the same group and in the same transaction. Else MESSAGE_ID_TAKEN. Whether the
   contents are the same is not known here: the decision names the :class:`~escrowmq.ledger.events.Repeats`, and whoever
   has the log compares.
2. ``replace`` (a choice of the request): a prepare of a known id whose transaction is undecided, has no other message
   and other content, takes its place: the earlier transaction is rolled back, the new half message is stored, in this
   order. Should a crash keep only the first of the two events, the next prepare of the id begins anew: nothing stands
   in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.ledger.columns import codes as code
from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s, UInt8s, all_equal, all_true
from escrowmq.ledger.commands import Prepare, Rules, Send
from escrowmq.ledger.events import Decision, Event, Repeats
from escrowmq.ledger.messages.admission import Placement, check_limits, group_by_queue, place, topics_of
from escrowmq.ledger.messages.dedup import Dedup, Found
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import NONE, OPEN, PARKED, ROLLED_BACK, TransactionTable, decided
from escrowmq.message.ids import transaction_ids
from escrowmq.message.immunity import read_immunities
from escrowmq.model import DecidedBy
from escrowmq.schemas import PRODUCED, STORED, Kind

_STORED = STORED[Kind.PLAIN]
_STORED_NAMES = _STORED.names


@dataclass(slots=True)
class _Answers:
    """The columns of PRODUCED while they are filled in."""

    codes: UInt8s
    positions: Int64s
    offsets: Int64s
    transactions: Int64s  # position of the transaction's first half message
    epochs: Int64s
    queues: Int32s


class Producing:
    """Decides SEND and PREPARE. It has no state of its own."""

    def __init__(
        self, topics: Topics, sessions: Sessions, dedup: Dedup, delays: Delays, transactions: TransactionTable
    ) -> None:
        self._topics = topics
        self._sessions = sessions
        self._dedup = dedup
        self._delays = delays
        self._transactions = transactions

    def decide(
        self, command: Send | Prepare, rules: Rules, now_us: int, next_position: int, trimmed_position: int
    ) -> Decision:
        """Return the events (topics to be made, transactions that are replaced, the messages), the answer, one row
        per message, and which rows are repeats."""
        half = isinstance(command, Prepare)
        batch = command.batch
        size = batch.num_rows
        codes, immunity = self._refusals(command, rules)
        named = topics_of(batch, self._topics)
        found = self._dedup.find(batch.column("message_id"), named.numbers)
        known = found.positions
        leaders = _leaders(found.firsts, codes)
        leads = None if leaders is None else leaders == np.arange(size)
        replacing, replaced = self._replaceable(command, found, codes, leads)
        if len(replacing):
            known[replacing if leaders is None else np.isin(leaders, replacing)] = NONE
        new = known == NONE if leads is None else (known == NONE) & leads
        owners = self._join(command, codes, new, rules) if half else None
        placement = place(batch, named, codes, self._topics, rules)
        answers = _Answers(codes, *_nothing(size), placement.queues.copy())
        if not all_true(new):
            self._repeat_known(command, answers, found, half, trimmed_position)
        if half:
            begins = (codes == code.OK) & new
            if owners is not None:
                begins &= owners == NONE
            if len(replacing):  # what is replaced makes room
                begins[replacing[self._transactions.column("state", replaced) == OPEN]] = False
            self._limit_open(command.sessions, codes, begins, rules)
        entering = (codes == code.OK) & new
        # All of them: a slice, so that nothing of a batch that enters as a whole is gathered row by row.
        fresh = slice(None) if all_true(entering) else np.flatnonzero(entering)
        count = size if isinstance(fresh, slice) else len(fresh)
        if len(replacing):
            kept = (codes[replacing] == code.OK) & self._undecided(replaced)
            replacing, replaced = replacing[kept], replaced[kept]
        base = next_position + len(placement.made) + len(replaced)
        answers.positions[fresh] = np.arange(base, base + count)
        if half:
            self._begin_or_join(command.sessions, answers, fresh, owners)
        else:
            self._offsets(batch, answers, np.arange(size)[fresh], placement)
        if leads is not None and not all_true(leads):
            followers = np.flatnonzero((known == NONE) & ~leads)
            assert leaders is not None  # some row follows one of them
            _repeat_leaders(answers, followers, leaders)
            if half and len(followers):
                self._follow(command, answers, followers, leaders)
        events = []
        if count:
            if placement.made:
                events.append(self._topics.creation(placement.made))
            if len(replaced):
                first = self._transactions.column("first", replaced)
                events.append(decided(first, ROLLED_BACK, DecidedBy.REPLACED, command.sessions[replacing]))
            due = np.zeros(count, np.int64)
            if half:
                due[:] = self._sessions.timeouts_us(command.sessions[fresh], rules)
                wished = immunity[fresh]
                np.copyto(due, wished, where=wished > 0)
                due += now_us
            stored = _make_stored(batch, command.sessions, placement, answers, fresh, now_us, due)
            events.append(Event(Kind.HALF if half else Kind.PLAIN, stored))
        repeats = None
        if count < size:
            again = np.flatnonzero((codes == code.OK) & ~new & (answers.positions >= trimmed_position))
            repeats = Repeats(again, answers.positions[again]) if len(again) else None
        return Decision(tuple(events), self._make_answer(answers, half), repeats)

    def _refusals(self, command: Send | Prepare, rules: Rules) -> tuple[UInt8s, Int64s]:
        """One code per row, of the first thing that is wrong with it alone or with its session; and how long each wants
        not to be asked about (microseconds, 0: it says nothing)."""
        batch, half = command.batch, isinstance(command, Prepare)
        if half and rules.reject_transactional:
            codes = np.full(batch.num_rows, code.NO_PERMISSION, np.uint8)
        else:
            codes = self._sessions.check(command.sessions, transactional=half, rules=rules)
            codes = _first(codes, check_limits(batch, self._topics, rules))
        if not half:
            return codes, batch.column("immunity_us").to_numpy()
        immunity, wrong = read_immunities(batch, rules)
        return _first(codes, wrong), immunity

    def repeats_of(self, command: Prepare, trimmed_position: int) -> Repeats | None:
        """Return the rows whose message ids are known, and where those messages stand in the log."""
        topics = topics_of(command.batch, self._topics).numbers
        positions = self._dedup.find(command.batch.column("message_id"), topics).positions
        rows = np.flatnonzero((positions != NONE) & (positions >= trimmed_position))
        return Repeats(rows, positions[rows]) if len(rows) else None

    def _replaceable(
        self, command: Send | Prepare, found: Found, codes: UInt8s, leads: Bools | None
    ) -> tuple[Int64s, Int64s]:
        """Return rows that take the place of an earlier prepare, and the transactions (ordinals) that they replace."""
        none = np.empty(0, np.int64)
        if not (isinstance(command, Prepare) and command.replace):
            return none, none
        fit = (codes == code.OK) & (found.positions != NONE) & found.halves
        if leads is not None:
            fit &= leads
        rows = np.flatnonzero(fit & pc.is_null(command.batch.column("transaction")).to_numpy(zero_copy_only=False))
        table = self._transactions
        owners = table.owner_of(found.positions[rows])
        rows, owners = rows[owners != NONE], owners[owners != NONE]
        own = ~table.foreign(owners, self._sessions.groups_of(command.sessions[rows]))
        alone = table.column("messages", owners) == 1
        other = np.ones(len(rows), np.bool_) if command.same is None else ~command.same[rows]
        lost = (table.column("state", owners) == ROLLED_BACK) & (table.column("by", owners) == int(DecidedBy.REPLACED))
        chosen = own & alone & ((self._undecided(owners) & other) | lost)
        return rows[chosen], owners[chosen]

    def _undecided(self, owners: Int64s) -> Bools:
        undecided: Bools = np.isin(self._transactions.column("state", owners), (OPEN, PARKED))
        return undecided

    def _join(self, command: Send | Prepare, codes: UInt8s, new: Bools, rules: Rules) -> Int64s | None:
        """Return the transaction (ordinal) that each row joins, -1 for those that begin one; None: all do. Unfit rows
        get their code.

        Only new rows: a row whose message is known has joined already, whatever became of the transaction since.
        """
        transactions = self._transactions
        ids = command.batch.column("transaction")
        if ids.null_count == len(ids):
            return None
        owners = np.full(command.batch.num_rows, NONE, np.int64)
        joining = ids.is_valid().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(joining & (codes == code.OK) & new)
        found, wrong = transactions.find_ids(ids.take(pa.array(rows)))
        codes[rows] = wrong
        kept, found = rows[wrong == code.OK], found[wrong == code.OK]
        foreign = transactions.foreign(found, self._sessions.groups_of(command.sessions[kept]))
        codes[kept[foreign]] = code.WRONG_GROUP
        decided = transactions.column("state", found) != OPEN
        codes[kept[~foreign & decided]] = code.TRANSACTION_DECIDED
        _, place_of, sizes = np.unique(found, return_inverse=True, return_counts=True)
        full = transactions.column("messages", found) + sizes[place_of] > rules.max_transaction_messages
        codes[kept[~foreign & ~decided & full]] = code.TOO_MANY
        good = codes[kept] == code.OK
        owners[kept[good]] = found[good]
        return owners

    def _limit_open(self, sessions: Int64s, codes: UInt8s, begins: Bools, rules: Rules) -> None:
        """Refuse what would give a producer group too many undecided transactions."""
        rows = np.flatnonzero(begins)
        if not len(rows):
            return
        groups = self._sessions.groups_of(sessions[rows])
        if (
            all_equal(groups)
            and self._transactions.open.get(int(groups[0]), 0) + len(rows) <= rules.max_open_transactions
        ):
            return
        for group in np.unique(groups).tolist():
            mine = rows[groups == group]
            room = rules.max_open_transactions - self._transactions.open.get(group, 0)
            codes[mine[max(room, 0) :]] = code.TOO_MANY_OPEN

    def _repeat_known(self, command: Send | Prepare, answers: _Answers, found: Found, half: bool, trimmed: int) -> None:
        """Rows whose topic knows their message id get that message's receipt (I9), or are refused because it is another
        message, or that it left the log since."""
        known = found.positions
        rows = np.flatnonzero((known != NONE) & (answers.codes == code.OK))
        if not len(rows):
            return
        taken = found.halves[rows] != half
        answers.codes[rows[taken]] = code.MESSAGE_ID_TAKEN
        rows = rows[~taken]
        if half:
            self._repeat_halves(command, answers, rows, known[rows], trimmed)
            return
        positions = known[rows]
        answers.positions[rows] = positions
        answers.queues[rows] = self._topics.numbers_of(self._delays.queue_ids_of(positions))
        topics = np.array(command.batch.column("topic").take(pa.array(rows)).to_pylist(), object)
        for topic in set(topics.tolist()):
            mine = topics == topic
            queues, offsets = self._topics.find(topic, positions[mine])
            placed = offsets != NONE
            at = rows[mine][placed]
            answers.queues[at], answers.offsets[at] = queues[placed], offsets[placed]

    def _repeat_halves(
        self, command: Send | Prepare, answers: _Answers, rows: Int64s, positions: Int64s, trimmed: int
    ) -> None:
        """As :meth:`_repeat_known`: a repeat comes from the first one's group, and names its transaction."""
        owners = self._transactions.owner_of(positions)
        gone = (positions < trimmed) | (owners == NONE)
        answers.codes[rows[gone]] = code.UNKNOWN_TRANSACTION
        answers.codes[rows[self._transactions.expired(positions)]] = code.EXPIRED
        rows, positions, owners = rows[~gone], positions[~gone], owners[~gone]
        first = self._transactions.column("first", owners)
        taken = self._transactions.foreign(owners, self._sessions.groups_of(command.sessions[rows]))
        names = command.batch.column("transaction").take(pa.array(rows))
        named = names.is_valid().to_numpy(zero_copy_only=False)
        taken |= ~named & (first != positions)
        taken[named] |= self._transactions.find_ids(names.filter(pa.array(named)))[0] != owners[named]
        answers.codes[rows[taken]] = code.MESSAGE_ID_TAKEN
        rows, positions, owners = rows[~taken], positions[~taken], owners[~taken]
        answers.positions[rows] = positions
        answers.transactions[rows] = first[~taken]
        answers.epochs[rows] = self._transactions.column("epoch", owners)
        answers.queues[rows] = self._topics.numbers_of(self._transactions.queue_ids_of(positions, owners))

    def _follow(self, command: Send | Prepare, answers: _Answers, rows: Int64s, leaders: Int64s) -> None:
        """Half messages that repeat an earlier row of their batch: they must be of its group and transaction."""
        rows = rows[answers.codes[rows] == code.OK]
        before = leaders[rows]
        groups = (self._sessions.groups_of(command.sessions[at]) for at in (rows, before))
        names = [command.batch.column("transaction").take(pa.array(at)).to_pylist() for at in (rows, before)]
        other = np.not_equal(*groups) | np.array([a != b for a, b in zip(*names, strict=True)], np.bool_)
        answers.codes[rows[other]] = code.MESSAGE_ID_TAKEN

    def _begin_or_join(self, sessions: Int64s, answers: _Answers, fresh: Int64s | slice, owners: Int64s | None) -> None:
        """Set the transaction of each fresh row: the one it joins, else its own."""
        own, epochs = answers.positions[fresh], sessions[fresh]
        if owners is not None:
            joining = owners[fresh] != NONE
            joined = owners[fresh][joining]
            own, epochs = own.copy(), epochs.copy()
            own[joining] = self._transactions.column("first", joined)
            epochs[joining] = self._transactions.column("epoch", joined)
        answers.transactions[fresh] = own
        answers.epochs[fresh] = epochs

    def _offsets(self, batch: pa.RecordBatch, answers: _Answers, fresh: Int64s, placement: Placement) -> None:
        """Offsets that plain messages will get; delayed ones have none yet."""
        now = fresh[batch.column("delay_us").to_numpy()[fresh] == 0]
        queues = self._topics.queues
        for queue_id, rows in group_by_queue(placement.queue_ids[now]):
            at = now[rows]
            end = queues[queue_id].end if queue_id < len(queues) else self._topics.first_begin
            answers.offsets[at] = np.arange(end, end + len(at))

    def _make_answer(self, answers: _Answers, half: bool) -> pa.RecordBatch:
        size, valid = len(answers.codes), None
        if np.count_nonzero(answers.codes):
            refused = answers.codes != code.OK
            for column in (answers.positions, answers.offsets, answers.queues):
                column[refused] = NONE
            valid = ~refused
        if half:
            ids = transaction_ids(self._transactions.shard, answers.epochs, answers.transactions, valid)
        else:
            ids = pa.nulls(size, PRODUCED.field("transaction").type)
        columns = map(pa.array, (answers.codes, answers.positions, answers.queues, answers.offsets))
        return pa.RecordBatch.from_arrays([*columns, ids], schema=PRODUCED)


def _first(codes: UInt8s, more: UInt8s) -> UInt8s:
    """Return the code that each row got first."""
    if not np.count_nonzero(more):
        return codes
    return np.where(codes == code.OK, more, codes)


def _nothing(size: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return positions, offsets, transactions and epochs of rows that have none yet."""
    none = np.full((3, size), NONE, np.int64)
    return none[0], none[1], none[2], np.zeros(size, np.int64)


def _leaders(repeats: Int64s | None, codes: UInt8s) -> Int64s | None:
    """Return the row that stands for each row: the first of its message id that is fit so far; itself if it is not
    fit. None: every row
    stands for itself."""
    if repeats is None or not np.count_nonzero(codes):
        return repeats
    leaders = np.arange(len(codes))
    fit = np.flatnonzero(codes == code.OK)
    _, first, back = np.unique(repeats[fit], return_index=True, return_inverse=True)
    leaders[fit] = fit[first][back]
    return leaders


def _repeat_leaders(answers: _Answers, rows: Int64s, leaders: Int64s) -> None:
    """Rows that repeat an id of an earlier row of the same batch get that row's receipt."""
    for column in (getattr(answers, name) for name in _Answers.__slots__):
        column[rows] = column[leaders[rows]]


def _make_stored(
    batch: pa.RecordBatch,
    sessions: Int64s,
    placement: Placement,
    answers: _Answers,
    fresh: Int64s | slice,
    now_us: int,
    due: Int64s,
) -> pa.RecordBatch:
    """Return the rows of the event; ``due``: when each is asked about first; bodies are copied only when some rows
    are left out."""
    kept = batch if isinstance(fresh, slice) else batch.take(pa.array(fresh))
    delay = kept.column("delay_us").to_numpy()
    visible = np.where(delay > 0, now_us + delay, 0) if np.count_nonzero(delay) else np.zeros(len(delay), np.int64)
    columns = {
        **{name: kept.column(name) for name in ("topic", "key", "tag", "properties", "body", "message_id", "born_us")},
        "queue": pa.array(placement.queues[fresh]),
        "queue_id": pa.array(placement.queue_ids[fresh]),
        "visible_us": pa.array(visible),
        "due_us": pa.array(due),
        "transaction": pa.array(answers.transactions[fresh]),
        "epoch": pa.array(sessions[fresh].astype(np.uint32)),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in _STORED_NAMES], schema=_STORED)
