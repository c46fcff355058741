"""The ledger: ``decide(command, now) → events and answer``, ``apply(event)``; state is nothing but applied events.

Both are pure in the sense of the design: no clock, disk, socket or randomness, and ``decide`` changes no state. Times
come in with the call, keys of stored messages (which never change) from the holder (:meth:`Ledger.ask_keys_of`).
Whoever holds a ledger appends a decision's events to the log in order, makes them durable, applies them, and answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code, error
from escrowmq.ledger import commands
from escrowmq.ledger.columns.arrays import Int32s, Int64s, UInt8s, all_equal
from escrowmq.ledger.commands import Command, RowsCommand, Rules
from escrowmq.ledger.events import Decision, Few, Repeats, event_of
from escrowmq.ledger.groups import operating
from escrowmq.ledger.groups.consuming import Consuming
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.order import KeysOf
from escrowmq.ledger.keeping import Keeping
from escrowmq.ledger.messages.admission import group_by_queue
from escrowmq.ledger.messages.by_rows import ProducingRows
from escrowmq.ledger.messages.dedup import Dedup
from escrowmq.ledger.messages.editing import decide_edit
from escrowmq.ledger.messages.entering import EnteringRows
from escrowmq.ledger.messages.places import places_of
from escrowmq.ledger.messages.producing import Producing
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.ending import DecidedRow, Ending
from escrowmq.ledger.transactions.forgetting import Forgetting
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import COMMITTED, EXPIRED, NONE, ROLLED_BACK, TransactionTable
from escrowmq.ledger.transactions.writers import Writers
from escrowmq.schemas import Kind

FORMAT = 4
"""Of snapshots; 1 had every session that ever was, 1 and 2 message ids without topics and no rules of producer groups,
1 to 3 consumer groups numbered as they are listed, no deleted topics and no retention of topics. A newer one is not
read: the frames are, or, where they left with retention, the log is refused.
"""


_POSITIONS = ("next_position", "trimmed_position", "last_time_us")
_COUNTERS = (
    "messages_total",
    "half_messages_total",
    "committed_total",
    "rolled_back_total",
    "expired_total",
    "checks_asked_total",
    "parked_total",
)


class Ledger:
    """All state of one shard. Not thread-safe: the shard's one writer owns it."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.rules = Rules()
        self.next_position = 0
        self.trimmed_position = 0
        self.last_time_us = 0
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.topics = Topics()
        self.sessions = Sessions()
        self.dedup = Dedup()
        self.delays = Delays()
        self.transactions = TransactionTable(shard, self.sessions)
        self.checkback = CheckBack(self.transactions, self.sessions)
        self.writers = Writers(self.sessions, self.transactions)
        self.groups = Groups()
        self._consuming = Consuming(self.groups, self.topics)
        self._producing = Producing(self.topics, self.sessions, self.dedup, self.delays, self.transactions)
        self._producing_rows = ProducingRows(self.topics, self.sessions, self.dedup, self.transactions)
        self._entering = EnteringRows(
            self.topics, self.sessions, self.dedup, self.delays, self.transactions, self.checkback, self.counters
        )
        self._ending = Ending(self.transactions, self.sessions)
        self._keeping = Keeping(self.topics, self.delays, self.transactions, self.groups, self._ending)
        self._forgetting = Forgetting(self.sessions, self.transactions, self.checkback, self.writers)

    def ask_keys_of(self, keys_of: KeysOf) -> None:
        """Ask ``keys_of`` for the keys of stored messages when ordered groups need them; see
        :mod:`escrowmq.ledger.groups.order`.

        Deciding only: what was decided names the keys, and applying asks nobody. Without it no key is known, and an
        ordered group's whole queue waits for a message that failed.
        """
        self._consuming.keys_of = keys_of

    # Deciding

    def decide(self, command: Command, now_us: int) -> Decision:
        """Decide what follows from ``command`` at ``now_us``. Raises EscrowError when the command as a whole is
        refused."""
        match command:
            case commands.Send() | commands.Prepare():
                return self._producing.decide(command, self.rules, now_us, self.next_position, self.trimmed_position)
            case commands.End():
                return self._ending.decide_end(command, self.rules)
            case commands.Receive():
                return self._consuming.decide_receive(command, self.rules, now_us, self.next_position)
            case commands.Join():
                return self._consuming.decide_join(command, self.rules, self.next_position)
            case commands.Fence():
                return self._consuming.decide_fence(command, self.rules, now_us, self.next_position)
            case commands.Settle():
                return self._consuming.decide_settle(command, self.rules, now_us)
            case commands.Bury():
                return self._consuming.decide_bury(command)
            case commands.AskChecks():
                return self.checkback.decide_ask(command, now_us)
            case commands.Tick():
                return self._decide_tick(now_us, command.limit)
            case commands.OpenSession():
                return self.sessions.decide_open(command, self.rules)
            case commands.AlterProducers():
                return self.sessions.decide_alter(command, self.rules)
            case commands.Subscribe():
                return self._decide_subscribe(command)
            case commands.AlterGroup():
                return self._with_topics(
                    command.topics or (), lambda known: self._consuming.decide_alter(command, known)
                )
            case commands.ResetGroup():
                return operating.decide_reset(self.groups, command, self.topics)
            case commands.PauseGroup():
                return operating.decide_pause(self.groups, command)
            case commands.DeleteGroup():
                return operating.decide_delete(self.groups, command, self.next_position)
            case commands.CreateTopic():
                return self.topics.decide_create(command, self.rules)
            case commands.CommitBatch():
                return self.writers.decide_commit(command, self.rules)
            case commands.Park():
                return self.checkback.decide_park(command)
            case commands.Recheck():
                return self.checkback.decide_recheck(command.transactions)
            case commands.SettleDead():
                return self._consuming.decide_settle_dead(command)
            case commands.EditDead():
                return decide_edit(command, self.groups, self.topics, self.dedup, self.rules, self.next_position)
            case commands.Retain():
                return self._keeping.decide_retain(command, self.trimmed_position)
            case commands.Cut():
                return self._keeping.decide_cut(command, now_us)
            case commands.AlterTopic():
                return self._keeping.decide_alter(command, self.rules, now_us)
            case commands.DeleteTopic():
                return self._keeping.decide_delete(command)
            case commands.Forget():
                return self._forgetting.decide_forget(command)
            case commands.ForgetWriter():
                return self._forgetting.decide_forget_writer(command)
            case commands.Configure():
                return self._decide_configure(command)

    def decide_rows(self, command: RowsCommand, now_us: int) -> Decision | None:
        """As :meth:`decide`, of a few rows, if they are a plain case; None: decide them as columns.

        The events carry what applying them needs; :meth:`apply` takes it, or only the batch, to the same effect. So a
        log is replayed by columns alone.
        """
        match command:
            case commands.SendRows() | commands.PrepareRows():
                return self._producing_rows.decide(command, self.rules, now_us, self.next_position)
            case commands.EndRows():
                return self._ending.decide_few(command, self.rules)
            case commands.SettleRows():
                return self._consuming.decide_settle_few(command, self.rules, now_us)
        return None

    def _decide_configure(self, command: commands.Configure) -> Decision:
        if command.rules == self.rules:
            return Decision()
        text = json.dumps(dataclasses.asdict(command.rules), sort_keys=True)
        return Decision((event_of(Kind.RULES, [text]),))

    def _decide_tick(self, now_us: int, limit: int) -> Decision:
        events = self.delays.decide_release(now_us, limit)
        events += self.checkback.decide_tick(now_us, limit)
        events += self._consuming.decide_tick(self.rules, now_us, limit)
        return Decision(tuple(events))

    def _decide_subscribe(self, command: commands.Subscribe) -> Decision:
        topics, consuming = command.subscription.topics, self._consuming
        return self._with_topics(topics, lambda known: consuming.decide_subscribe(command, known, self.rules))

    def _with_topics(self, names: Sequence[str], decide: Callable[[Topics], Decision]) -> Decision:
        """Return a subscription makes topics that are missing, if the rules say so, and begins at their first
        message."""
        missing = [name for name in names if not self.topics.has(name) and self.topics.may_be_made(name)]
        if not missing or not self.rules.auto_create_topics:
            return decide(self.topics)
        made = [self.topics.decide_create(commands.CreateTopic(name), self.rules) for name in dict.fromkeys(missing)]
        if len(self.topics.by_name) + len(made) > self.rules.max_topics:
            raise error(Code.TOO_MANY, f"there are {len(self.topics.by_name)} topics", "max_topics")
        creation = self.topics.creation([(d.answer["name"], d.answer["queues"]) for d in made])
        decision = decide(self.topics.with_created(creation))
        return Decision((creation, *decision.events), decision.answer)

    # Applying

    def apply(self, kind: Kind, batch: pa.RecordBatch | Few, position: int, time_us: int, rows: Any = None) -> None:
        """Take one event of the log in. ``position`` is that of its first row, ``time_us`` the broker's time of it;
        ``rows``: of an event that was decided as rows, the same as the batch, of which then nothing but the number of
        rows is looked at."""
        self.next_position = position + batch.num_rows
        self.last_time_us = time_us
        if kind in Groups.KINDS:
            self.groups.apply(kind, batch, time_us, self.topics, self.rules, rows)
        elif rows is not None:
            self._row_acts[kind](self, rows, position, time_us)
        elif (act := self._acts.get(kind)) is not None:
            act(self, batch, position, time_us)

    def _apply_plain(self, batch: pa.RecordBatch, position: int, time_us: int) -> None:
        tags = self._enter(batch, position, time_us, half=False)
        positions = np.arange(position, position + batch.num_rows)
        queue_ids, visible = batch.column("queue_id").to_numpy(), batch.column("visible_us").to_numpy()
        self.counters["messages_total"] += batch.num_rows
        self.sessions.sent(batch.column("epoch").to_numpy())
        self._place(positions, queue_ids, tags, visible, sizes_of(batch.column("body")), time_us)

    def _apply_half(self, batch: pa.RecordBatch, position: int, time_us: int) -> None:
        tags = self._enter(batch, position, time_us, half=True)
        self.counters["half_messages_total"] += batch.num_rows
        begun = self.transactions.enter(batch, tags, sizes_of(batch.column("body")), position, time_us)
        self.checkback.begin(begun, time_us)

    def _enter(self, batch: pa.RecordBatch, position: int, time_us: int, *, half: bool) -> Int32s:
        """Update what every new message changes: remembered ids, the rotation of its topic, the last use of its
        session. The
        tag number of each row."""
        self.sessions.note(batch.column("epoch").to_numpy(), time_us)
        of_row = batch.column("queue_id").to_numpy()
        one = all_equal(of_row)
        topics = self.topics.numbers_of_queues(of_row[:1] if one else of_row)
        self.dedup.add(batch.column("message_id"), topics, position, time_us, self.rules, half=half)
        queue_ids = of_row[:1] if one else np.flatnonzero(np.bincount(of_row))
        for name in {self.topics.queues[queue_id].place.topic for queue_id in queue_ids.tolist()}:
            self.topics.by_name[name].turn += 1
        return self.topics.number_tags(batch.column("tag"))

    def _place(
        self, positions: Int64s, queue_ids: Int32s, tags: Int32s, visible: Int64s, sizes: Int32s, time_us: int
    ) -> None:
        """Put messages at the end of their queues; those with a time still to come wait for it."""
        late = visible > time_us
        if np.count_nonzero(late):
            self.delays.add(positions[late], queue_ids[late], tags[late], visible[late], sizes[late])
            positions, queue_ids, tags, sizes = positions[~late], queue_ids[~late], tags[~late], sizes[~late]
        self._append(positions, queue_ids, tags, sizes, time_us)

    def _append(self, positions: Int64s, queue_ids: Int32s, tags: Int32s, sizes: Int32s, time_us: int) -> None:
        for queue_id, rows in group_by_queue(queue_ids):
            size = int(sizes[rows].sum(dtype=np.int64))
            self.topics.queues[queue_id].append(positions[rows], tags[rows], time_us, size)

    def _apply_decided(self, batch: pa.RecordBatch, _position: int, time_us: int) -> None:
        self.sessions.note(batch.column("epoch").to_numpy(), time_us)
        _, positions, queue_ids, tags, sizes = self._ending.apply_decided(batch)
        self._place(positions, queue_ids, tags, self.transactions.visible_us(positions), sizes, time_us)
        for state, size in enumerate(np.bincount(batch.column("state").to_numpy()).tolist()):
            if size:
                self.counters[_STATE_COUNTERS[state]] += size

    def _apply_few_decided(self, rows: Sequence[DecidedRow], _position: int, time_us: int) -> None:
        for session in {session for _, _, _, session in rows}:
            self.sessions.note_one(session, time_us)
        self._place_few(self._ending.apply_few(rows), time_us)
        for _, state, _, _ in rows:
            self.counters[_STATE_COUNTERS[state]] += 1

    def _place_few(self, messages: Sequence[tuple[int, int, int, int]], time_us: int) -> None:
        """As :meth:`_place`, of the half messages of a few transactions: position, queue id, tag and size of each."""
        if self.transactions.holds_back and messages:
            positions, *others = (np.array(column, np.int64) for column in zip(*messages, strict=True))
            queue_ids, tags, sizes = (column.astype(np.int32) for column in others)
            self._place(positions, queue_ids, tags, self.transactions.visible_us(positions), sizes, time_us)
            return
        by_queue: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for position, queue_id, tag, size in messages:
            places = by_queue.get(queue_id)
            if places is None:
                by_queue[queue_id] = ([position], [tag], [size])
            else:
                places[0].append(position)
                places[1].append(tag)
                places[2].append(size)
        for number, (at, numbers, sizes_) in by_queue.items():
            self.topics.queues[number].append(at, numbers, time_us, sum(sizes_))

    def _apply_batch_decided(self, batch: pa.RecordBatch, position: int, time_us: int) -> None:
        self.sessions.note(batch.column("epoch").to_numpy(), time_us)
        self.writers.apply_decided(batch, time_us)
        decided = batch.filter(pc.greater_equal(batch.column("transaction"), 0))
        if decided.num_rows:
            self._apply_decided(decided, position, time_us)

    def _apply_released(self, batch: pa.RecordBatch, _position: int, time_us: int) -> None:
        self._append(*self.delays.take(batch.column("delayed").to_numpy()), time_us)

    def _apply_checked(self, batch: pa.RecordBatch, _position: int, time_us: int) -> None:
        self.counters["checks_asked_total"] += batch.num_rows
        self.checkback.apply_checked(batch, time_us)

    def _apply_parked(self, batch: pa.RecordBatch, _position: int, _time_us: int) -> None:
        self.counters["parked_total"] += batch.num_rows
        self.checkback.apply_parked(batch)

    def _apply_trimmed(self, batch: pa.RecordBatch, _position: int, _time_us: int) -> None:
        self.trimmed_position = batch.column("position")[0].as_py()
        self._keeping.apply_trimmed(self.trimmed_position)

    def _apply_producers(self, batch: pa.RecordBatch, _position: int, _time_us: int) -> None:
        self.sessions.apply_producers(batch)
        self.checkback.apply_rules(self.rules)

    def _apply_rules(self, batch: pa.RecordBatch, _position: int, _time_us: int) -> None:
        self.rules = _read_rules(json.loads(batch.column("rules")[0].as_py()))
        self.checkback.apply_rules(self.rules)

    _acts: ClassVar[dict[Kind, Callable[[Ledger, pa.RecordBatch, int, int], None]]] = {
        Kind.PLAIN: _apply_plain,
        Kind.HALF: _apply_half,
        Kind.DECIDED: _apply_decided,
        Kind.BATCH_DECIDED: _apply_batch_decided,
        Kind.CHECKED: _apply_checked,
        Kind.PARKED: _apply_parked,
        Kind.REOPENED: lambda self, batch, _, time_us: self.checkback.apply_reopened(batch, time_us),
        Kind.RELEASED: _apply_released,
        Kind.TOPIC: lambda self, batch, _, __: self._keeping.apply_topic(batch),
        Kind.TOPIC_ALTERED: lambda self, batch, _, __: self.topics.apply_altered(batch),
        Kind.TOPIC_DELETED: lambda self, batch, position, _: self._keeping.apply_deleted(batch, position),
        Kind.CUT: lambda self, batch, _, __: self._keeping.apply_cut(batch),
        Kind.SESSION: lambda self, batch, _, time_us: self.sessions.apply_session(batch, time_us),
        Kind.OWNED: lambda self, batch, _, time_us: self.sessions.apply_owned(batch, time_us),
        Kind.FORGOTTEN: lambda self, batch, _, __: self._forgetting.apply(batch),
        Kind.PRODUCERS: _apply_producers,
        Kind.RULES: _apply_rules,
        Kind.TRIMMED: _apply_trimmed,
    }

    _row_acts: ClassVar[dict[Kind, Callable[[Ledger, Any, int, int], None]]] = {
        Kind.PLAIN: lambda self, rows, position, time_us: self._entering.apply(rows, position, time_us, self.rules),
        Kind.HALF: lambda self, rows, position, time_us: self._entering.apply(rows, position, time_us, self.rules),
        Kind.DECIDED: _apply_few_decided,
    }
    """As ``_acts``, of what :meth:`decide_rows` gave with its events."""

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        """Return the whole state as Arrow tables (copies: they may be written while the ledger continues)."""
        return self.freeze()()

    def freeze(self) -> Callable[[], dict[str, pa.Table]]:
        """Return the snapshot as of now. What takes long, and is of parts that never change, is done when it is
        called: on any thread, while the ledger continues."""
        scalars = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _POSITIONS},
            "counters": self.counters,
            "rules": dataclasses.asdict(self.rules),
        }
        tables = {"ledger": pa.table({"state": pa.array([json.dumps(scalars, sort_keys=True)], pa.utf8())})}
        for part in (self.topics, self.sessions, self.dedup, self.delays, self.transactions, self.writers):
            tables |= part.snapshot()
        groups = self.groups.freeze()
        return lambda: tables | groups()

    @staticmethod
    def can_restore(tables: dict[str, pa.Table]) -> bool:
        """Return whether this version knows the snapshot's format."""
        return json.loads(tables["ledger"]["state"][0].as_py()).get("format") in (1, 2, 3, FORMAT)

    @classmethod
    def restore(cls, shard: int, tables: dict[str, pa.Table]) -> Ledger:
        """Return a ledger that is equal to the one that gave the snapshot."""
        ledger = cls(shard)
        scalars = json.loads(tables["ledger"]["state"][0].as_py())
        for name in _POSITIONS:
            setattr(ledger, name, scalars[name])
        ledger.counters |= scalars["counters"]
        ledger.rules = _read_rules(scalars["rules"])
        for part in (ledger.topics, ledger.delays, ledger.groups):
            part.restore(tables)
        ledger.sessions.restore(tables, ledger.last_time_us)
        ledger.transactions.restore(tables)
        ledger.dedup.restore(tables, lambda: places_of(ledger.topics, ledger.delays, ledger.transactions), ledger.rules)
        ledger.checkback.restore(ledger.rules)
        ledger.writers.restore(tables, ledger.last_time_us)
        return ledger

    # Looking

    @property
    def wake_us(self) -> int:
        """:class:`~escrowmq.ledger.commands.Tick` has nothing to do before this; ``NEVER_US``: nothing waits for a
        time. A Tick that finds nothing moves it."""
        return min(self.delays.wake_us, self.checkback.wake_us, self.groups.wake_us)

    def repeats_of(self, command: commands.Prepare) -> Repeats | None:
        """Return the rows of a command whose message ids are known, and where their messages stand in the log."""
        return self._producing.repeats_of(command, self.trimmed_position)

    def queue_id(self, topic: str, queue: int) -> int:
        """Return the id of a queue; Rejected(UNKNOWN_TOPIC or BAD_QUEUE)."""
        return self.topics.queue_id(topic, queue)

    def queue(self, queue_id: int) -> QueueIndex:
        """One consume queue."""
        return self.topics.queues[queue_id]

    def half_states(self, positions: Int64s) -> tuple[UInt8s, Int32s, Int64s, Int64s, Int64s]:
        """For half messages: state, checks, due_us, first position and epoch of their transactions.

        Those that left with retention come as EXPIRED with position -1 (nothing undecided ever leaves).
        """
        owners = self.transactions.owner_of(positions)
        known = owners != NONE

        def column(name: str, gone: int, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
            values = np.full(len(positions), gone, dtype)
            values[known] = self.transactions.column(name, owners[known])
            return values

        states, checks = column("state", EXPIRED, np.uint8), column("checks", 0, np.int32)
        due, first, epochs = (
            column(name, gone, np.int64) for name, gone in (("due_us", 0), ("first", NONE), ("epoch", 0))
        )
        return states, checks, due, first, epochs

    def open_transactions(self, session: int) -> int:
        """Return the undecided transactions of a session's producer group. From any thread."""
        return self.transactions.open.get(self.sessions.group_number(session), 0)

    def stats(self, now_us: int) -> dict[str, float]:
        """One number per metric."""
        oldest = self.transactions.oldest_open()
        age = 0.0
        if oldest < self.transactions.rows.end:
            first = self.transactions.column("first", np.array([oldest])).astype(np.int64)
            age = max(now_us - int(self.transactions.prepared_us(first)[0]), 0) / 1e6
        return {
            **self.counters,
            "delivered_total": self.groups.delivered,
            "acked_messages_total": self.groups.acked,
            "open_half_messages": sum(self.transactions.open.values()),
            "oldest_half_age_seconds": age,
            "parked": sum(self.transactions.parked.values()),
            "delayed_waiting": self.delays.waiting,
            "dedup_runs": len(self.dedup),
            "writers": len(self.writers),
            "topics": len(self.topics.by_name),
            "producer_groups": len(self.sessions.groups),
            "producer_sessions": len(self.sessions),
        }


def sizes_of(bodies: pa.Array) -> Int32s:
    """Return the bytes of each body; 0 of one that is damaged."""
    sizes = pc.binary_length(bodies)
    sizes = sizes.fill_null(0) if sizes.null_count else sizes
    return np.asarray(sizes.to_numpy(zero_copy_only=False), np.int32)


_STATE_COUNTERS = {COMMITTED: "committed_total", ROLLED_BACK: "rolled_back_total", EXPIRED: "expired_total"}


def _read_rules(values: dict[str, Any]) -> Rules:
    """Rules by name; a name that this version does not know is of no effect, a missing one has its default."""
    known = {f.name for f in dataclasses.fields(Rules)}
    return Rules(**{name: value for name, value in values.items() if name in known})
