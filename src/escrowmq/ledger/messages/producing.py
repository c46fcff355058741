"""Decides SEND and PREPARE: the accepted rows of a batch become one event, rejected rows get a code.

The answer to each accepted row is known before the log has it, because the log numbers rows consecutively: a half
message's transaction id *is* its position.

Rules:

1. A row whose message id its topic knows gets the receipt of that first message (I9), if it can be the same message: of
   the same kind, and, half, from the same group and in the same transaction. Else MESSAGE_ID_TAKEN. The contents are
   compared by the holder of the log, from the decision's :class:`~escrowmq.ledger.events.Repeats`.
2. ``replace`` (a choice of the request): a prepare of a known id whose transaction is undecided, has no other message
   and other content, replaces it: the earlier transaction is rolled back, then the new half message is stored. If a
   crash keeps only the first of the two events, the next prepare of the id begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(slots=True)
class _Answers:
    """The columns of PRODUCED while they are filled in."""

    codes: UInt8s
    positions: Int64s
    offsets: Int64s
    transactions: Int64s  # position of the transaction's first half message
    epochs: Int64s
    queues: Int32s


@dataclass(frozen=True, slots=True)
class Producing:
    """Decides SEND and PREPARE. It has no state of its own."""

    topics: Topics
    sessions: Sessions
    dedup: Dedup
    delays: Delays
    transactions: TransactionTable

    def decide(
        self, command: Send | Prepare, rules: Rules, now_us: int, next_position: int, trimmed_position: int
    ) -> Decision:
        """Decide a SEND or PREPARE. Events: new topics, rollbacks of replaced transactions, the accepted messages.
        Answer: a row of PRODUCED per row. ``repeats``: rows whose content is to be compared with a stored message."""
        half, batch, sessions = isinstance(command, Prepare), command.batch, command.sessions
        size = batch.num_rows
        codes, immunity = self._refusals(command, rules)
        named = topics_of(batch, self.topics)
        found = self.dedup.find(batch.column("message_id"), named.numbers)
        known, leaders = found.positions, _leaders(found.firsts, codes)
        leads = leaders == np.arange(size)
        replacing, replaced = self._replaceable(command, found, codes, leads)
        if len(replacing):
            known[np.isin(leaders, replacing)] = NONE
        new = (known == NONE) & leads
        owners = self._join(command, codes, new, rules) if half else None
        places = place(batch, named, codes, self.topics, rules)
        positions, offsets, begun = np.full((3, size), NONE, np.int64)
        answers = _Answers(codes, positions, offsets, begun, np.zeros(size, np.int64), places.queues.copy())
        if not all_true(new):
            self._repeat_known(command, answers, found, half, trimmed_position)
        if half:
            begins = (codes == code.OK) & new
            if owners is not None:
                begins &= owners == NONE
            if len(replacing):  # what is replaced makes room
                begins[replacing[self.transactions.column("state", replaced) == OPEN]] = False
            self._limit_open(sessions, codes, begins, rules)
        entering = (codes == code.OK) & new
        # All of them: a slice, so that nothing of a batch that enters as a whole is gathered row by row.
        fresh = slice(None) if all_true(entering) else np.flatnonzero(entering)
        count = size if isinstance(fresh, slice) else len(fresh)
        if len(replacing):
            kept = (codes[replacing] == code.OK) & self._undecided(replaced)
            replacing, replaced = replacing[kept], replaced[kept]
        base = next_position + len(places.made) + len(replaced)
        answers.positions[fresh] = np.arange(base, base + count)
        if half:
            self._begin_or_join(sessions, answers, fresh, owners)
        else:
            self._offsets(batch, answers, np.arange(size)[fresh], places)
        followers = np.flatnonzero((known == NONE) & ~leads)
        if len(followers):
            self._follow(command, answers, followers, leaders, half)
        events = []
        if count and places.made:
            events.append(self.topics.creation(places.made))
        if count and len(replaced):
            first = self.transactions.column("first", replaced)
            events.append(decided(first, ROLLED_BACK, DecidedBy.REPLACED, sessions[replacing]))
        if count:
            due = np.zeros(count, np.int64)
            if half:
                due[:] = self.sessions.timeouts_us(sessions[fresh], rules)
                wished = immunity[fresh]
                np.copyto(due, wished, where=wished > 0)
                due += now_us
            stored = _make_stored(batch, sessions, places, answers, fresh, now_us, due)
            events.append(Event(Kind.HALF if half else Kind.PLAIN, stored))
        again = np.flatnonzero((codes == code.OK) & ~new & (answers.positions >= trimmed_position))
        repeats = Repeats(again, answers.positions[again]) if len(again) else None
        return Decision(tuple(events), self._make_answer(answers, half), repeats)

    def _refusals(self, command: Send | Prepare, rules: Rules) -> tuple[UInt8s, Int64s]:
        """Return the first error code of each row, and its wished time (µs) before the first check (0: none)."""
        batch, half = command.batch, isinstance(command, Prepare)
        if half and rules.reject_transactional:
            codes = np.full(batch.num_rows, code.NO_PERMISSION, np.uint8)
        else:
            codes = self.sessions.check(command.sessions, transactional=half, rules=rules)
            codes = _first(codes, check_limits(batch, self.topics, rules))
        if not half:
            return codes, batch.column("immunity_us").to_numpy()
        immunity, wrong = read_immunities(batch, rules)
        return _first(codes, wrong), immunity

    def repeats_of(self, command: Prepare, trimmed_position: int) -> Repeats | None:
        """Return the rows whose message ids are stored, and the log positions of those messages; None: no row."""
        topics = topics_of(command.batch, self.topics).numbers
        positions = self.dedup.find(command.batch.column("message_id"), topics).positions
        rows = np.flatnonzero((positions != NONE) & (positions >= trimmed_position))
        return Repeats(rows, positions[rows]) if len(rows) else None

    def _replaceable(self, command: Send | Prepare, found: Found, codes: UInt8s, leads: Bools) -> tuple[Int64s, Int64s]:
        """Return the rows that replace an earlier prepare of their id, and the transactions (ordinals) that they
        replace. ``leads``: rows that are the first of the batch with their id."""
        none = np.empty(0, np.int64)
        if not (isinstance(command, Prepare) and command.replace):
            return none, none
        fit = (codes == code.OK) & (found.positions != NONE) & found.halves & leads
        rows = np.flatnonzero(fit & pc.is_null(command.batch.column("transaction")).to_numpy(zero_copy_only=False))
        table = self.transactions
        owners = table.owner_of(found.positions[rows])
        rows, owners = rows[owners != NONE], owners[owners != NONE]
        own = ~table.foreign(owners, self.sessions.groups_of(command.sessions[rows]))
        alone = table.column("messages", owners) == 1
        other = np.ones(len(rows), np.bool_) if command.same is None else ~command.same[rows]
        lost = (table.column("state", owners) == ROLLED_BACK) & (table.column("by", owners) == int(DecidedBy.REPLACED))
        chosen = own & alone & ((self._undecided(owners) & other) | lost)
        return rows[chosen], owners[chosen]

    def _undecided(self, owners: Int64s) -> Bools:
        undecided: Bools = np.isin(self.transactions.column("state", owners), (OPEN, PARKED))
        return undecided

    def _join(self, command: Send | Prepare, codes: UInt8s, new: Bools, rules: Rules) -> Int64s | None:
        """Return the transaction (ordinal) that each row joins, -1 if it begins one; None: all rows begin one. Sets the
        codes of rows that may not join.

        Only new rows are checked: a row whose message is known has joined already, whatever the outcome since.
        """
        transactions = self.transactions
        ids = command.batch.column("transaction")
        if ids.null_count == len(ids):
            return None
        owners = np.full(command.batch.num_rows, NONE, np.int64)
        joining = ids.is_valid().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(joining & (codes == code.OK) & new)
        found, wrong = transactions.find_ids(ids.take(pa.array(rows)))
        codes[rows] = wrong
        kept, found = rows[wrong == code.OK], found[wrong == code.OK]
        foreign = transactions.foreign(found, self.sessions.groups_of(command.sessions[kept]))
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
        """Set TOO_MANY_OPEN for rows that begin a transaction when their producer group has too many open."""
        rows = np.flatnonzero(begins)
        groups = self.sessions.groups_of(sessions[rows])
        for group in groups[:1].tolist() if all_equal(groups) else np.unique(groups).tolist():
            room = max(rules.max_open_transactions - self.transactions.open.get(group, 0), 0)
            if room < len(rows):
                codes[rows[groups == group][room:]] = code.TOO_MANY_OPEN

    def _repeat_known(self, command: Send | Prepare, answers: _Answers, found: Found, half: bool, trimmed: int) -> None:
        """Give repeats the receipt of the first message (I9); reject rows that are another message, and repeats of
        messages below log position ``trimmed``."""
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
        answers.queues[rows] = self.topics.numbers_of(self.delays.queue_ids_of(positions))
        topics = np.array(command.batch.column("topic").take(pa.array(rows)).to_pylist(), object)
        for topic in set(topics.tolist()):
            mine = topics == topic
            queues, offsets = self.topics.find(topic, positions[mine])
            placed = offsets != NONE
            at = rows[mine][placed]
            answers.queues[at], answers.offsets[at] = queues[placed], offsets[placed]

    def _repeat_halves(
        self, command: Send | Prepare, answers: _Answers, rows: Int64s, positions: Int64s, trimmed: int
    ) -> None:
        """As :meth:`_repeat_known`: a repeat comes from the first one's group, and names its transaction."""
        table = self.transactions
        owners = table.owner_of(positions)
        gone = (positions < trimmed) | (owners == NONE)
        answers.codes[rows[gone]] = code.UNKNOWN_TRANSACTION
        answers.codes[rows[table.expired(positions)]] = code.EXPIRED
        rows, positions, owners = rows[~gone], positions[~gone], owners[~gone]
        first = table.column("first", owners)
        taken = table.foreign(owners, self.sessions.groups_of(command.sessions[rows]))
        names = command.batch.column("transaction").take(pa.array(rows))
        named = names.is_valid().to_numpy(zero_copy_only=False)
        taken |= ~named & (first != positions)
        taken[named] |= table.find_ids(names.filter(pa.array(named)))[0] != owners[named]
        answers.codes[rows[taken]] = code.MESSAGE_ID_TAKEN
        rows, positions, owners = rows[~taken], positions[~taken], owners[~taken]
        answers.positions[rows] = positions
        answers.transactions[rows] = first[~taken]
        answers.epochs[rows] = table.column("epoch", owners)
        answers.queues[rows] = self.topics.numbers_of(table.queue_ids_of(positions, owners))

    def _follow(self, command: Send | Prepare, answers: _Answers, rows: Int64s, leaders: Int64s, half: bool) -> None:
        """Give ``rows``, repeats of an earlier row of the batch (``leaders``), the answer of that row; a half message
        of another group or transaction gets MESSAGE_ID_TAKEN."""
        for column in (getattr(answers, name) for name in _Answers.__slots__):
            column[rows] = column[leaders[rows]]
        if half:
            rows = rows[answers.codes[rows] == code.OK]
            pairs = (rows, leaders[rows])
            groups = (self.sessions.groups_of(command.sessions[at]) for at in pairs)
            names = [command.batch.column("transaction").take(pa.array(at)).to_pylist() for at in pairs]
            other = np.not_equal(*groups) | np.array([a != b for a, b in zip(*names, strict=True)], np.bool_)
            answers.codes[rows[other]] = code.MESSAGE_ID_TAKEN

    def _begin_or_join(self, sessions: Int64s, answers: _Answers, fresh: Int64s | slice, owners: Int64s | None) -> None:
        """Set the transaction of each fresh row: the one it joins, else its own."""
        own, epochs = answers.positions[fresh], sessions[fresh]
        if owners is not None:
            joining = owners[fresh] != NONE
            joined = owners[fresh][joining]
            own, epochs = own.copy(), epochs.copy()
            own[joining] = self.transactions.column("first", joined)
            epochs[joining] = self.transactions.column("epoch", joined)
        answers.transactions[fresh] = own
        answers.epochs[fresh] = epochs

    def _offsets(self, batch: pa.RecordBatch, answers: _Answers, fresh: Int64s, places: Placement) -> None:
        """Set the offsets that plain messages, the rows ``fresh``, will get; delayed ones have none yet."""
        now = fresh[batch.column("delay_us").to_numpy()[fresh] == 0]
        queues = self.topics.queues
        for queue_id, rows in group_by_queue(places.queue_ids[now]):
            at = now[rows]
            end = queues[queue_id].end if queue_id < len(queues) else self.topics.first_begin
            answers.offsets[at] = np.arange(end, end + len(at))

    def _make_answer(self, answers: _Answers, half: bool) -> pa.RecordBatch:
        size, valid = len(answers.codes), None
        if np.count_nonzero(answers.codes):
            refused = answers.codes != code.OK
            for column in (answers.positions, answers.offsets, answers.queues):
                column[refused] = NONE
            valid = ~refused
        if half:
            ids = transaction_ids(self.transactions.shard, answers.epochs, answers.transactions, valid)
        else:
            ids = pa.nulls(size, PRODUCED.field("transaction").type)
        columns = map(pa.array, (answers.codes, answers.positions, answers.queues, answers.offsets))
        return pa.RecordBatch.from_arrays([*columns, ids], schema=PRODUCED)


def _first(codes: UInt8s, more: UInt8s) -> UInt8s:
    """Return the codes, with the code of ``more`` where a row is OK so far."""
    return np.where(codes == code.OK, more, codes) if np.count_nonzero(more) else codes


def _leaders(repeats: Int64s | None, codes: UInt8s) -> Int64s:
    """For each row, return the first valid row with the same message id; the row itself if it is invalid."""
    leaders = np.arange(len(codes))
    if repeats is not None:
        fit = np.flatnonzero(codes == code.OK)
        _, first, back = np.unique(repeats[fit], return_index=True, return_inverse=True)
        leaders[fit] = fit[first][back]
    return leaders


def _make_stored(
    batch: pa.RecordBatch, sessions: Int64s, places: Placement, answers: _Answers, fresh: Any, now_us: int, due: Int64s
) -> pa.RecordBatch:
    """Return the rows ``fresh`` in the schema of the log; ``due``: the time (µs) of their first check. Bodies are
    copied only if some rows are left out."""
    kept = batch if isinstance(fresh, slice) else batch.take(pa.array(fresh))
    delay = kept.column("delay_us").to_numpy()
    visible = np.where(delay > 0, now_us + delay, 0) if np.count_nonzero(delay) else np.zeros(len(delay), np.int64)
    columns = {
        **{name: kept.column(name) for name in ("topic", "key", "tag", "properties", "body", "message_id", "born_us")},
        "queue": pa.array(places.queues[fresh]),
        "queue_id": pa.array(places.queue_ids[fresh]),
        "visible_us": pa.array(visible),
        "due_us": pa.array(due),
        "transaction": pa.array(answers.transactions[fresh]),
        "epoch": pa.array(sessions[fresh].astype(np.uint32)),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in _STORED.names], schema=_STORED)
