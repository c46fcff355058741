"""The ledger: ``decide(command, now) → events and answer``, ``apply(event)``; state is nothing but applied events.

Both are pure: no clock, disk, socket or randomness, and ``decide`` changes no state. Times come with the call, keys of
stored messages (which never change) from the holder (:meth:`Ledger.ask_keys_of`). The holder appends a decision's
events to the log in order, makes them durable, applies them, and answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
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
from escrowmq.ledger.messages.dedup import Dedup, places_of
from escrowmq.ledger.messages.editing import decide_edit
from escrowmq.ledger.messages.producing import Producing
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.ending import DecidedRow, Ending
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import COMMITTED, EXPIRED, NONE, ROLLED_BACK, TransactionTable
from escrowmq.ledger.transactions.writers import Forgetting, Writers
from escrowmq.schemas import Kind

FORMAT = 5
"""Of snapshots. 1 had every session ever opened; 1 and 2 message ids without topics and no rules of producer groups; 1
to 3 consumer groups numbered as listed, no deleted topics and no retention of topics; 1 to 4 no limits of consumer
groups. A newer one is not read: recovery replays the frames instead, or, where they left with retention, rejects the
log. So the newest number is written only if there are limits."""


_POSITIONS = ("next_position", "trimmed_position", "last_time_us")
_COUNTED = {
    Kind.PLAIN: "messages_total",
    Kind.HALF: "half_messages_total",
    Kind.CHECKED: "checks_asked_total",
    Kind.PARKED: "parked_total",
}
_STATE_COUNTERS = {COMMITTED: "committed_total", ROLLED_BACK: "rolled_back_total", EXPIRED: "expired_total"}


class Ledger:
    """All state of one shard. Not thread-safe: the shard's one writer owns it."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.rules = Rules()
        self.next_position = 0
        self.trimmed_position = 0
        self.last_time_us = 0
        self.counters = dict.fromkeys((*_COUNTED.values(), *_STATE_COUNTERS.values()), 0)
        self.topics = Topics()
        self.sessions = Sessions()
        self.dedup = Dedup()
        self.delays = Delays()
        self.transactions = TransactionTable(shard, self.sessions)
        self.checkback = CheckBack(self.transactions, self.sessions)
        self.writers = Writers(self.sessions, self.transactions)
        self.groups = Groups()
        self._consuming = Consuming(self.groups, self.topics)
        parts = (self.topics, self.sessions, self.dedup, self.delays, self.transactions)
        self._producing = Producing(*parts)
        self._by_rows = ProducingRows(*parts, self.checkback)
        self._ending = Ending(self.transactions, self.sessions)
        self._keeping = Keeping(self.topics, self.delays, self.transactions, self.groups, self._ending)
        self._forgetting = Forgetting(self.sessions, self.transactions, self.checkback, self.writers)

    def ask_keys_of(self, keys_of: KeysOf) -> None:
        """Set the source of the keys of stored messages, which ordered groups need to decide; see
        :mod:`escrowmq.ledger.groups.order`. Without it a failed message blocks the whole queue of an ordered group."""
        self._consuming.keys_of = keys_of

    def decide(self, command: Command, now_us: int) -> Decision:
        """Decide ``command`` at ``now_us``. Raises EscrowError if the command as a whole is rejected."""
        return self._deciders[type(command)](self, command, now_us)

    def decide_rows(self, command: RowsCommand, now_us: int) -> Decision | None:
        """As :meth:`decide`, of a few rows, if all of them are a plain case; None: decide them as columns.

        The events carry what applying them needs; :meth:`apply` of the batch alone has the same effect, as in replay.
        """
        match command:
            case commands.EndRows():
                return self._ending.decide_few(command, self.rules)
            case commands.SettleRows():
                return self._consuming.decide_settle_few(command, self.rules, now_us)
        return self._by_rows.decide(command, self.rules, now_us, self.next_position)

    def _decide_messages(self, command: commands.Send | commands.Prepare, now_us: int) -> Decision:
        return self._producing.decide(command, self.rules, now_us, self.next_position, self.trimmed_position)

    def _decide_configure(self, command: commands.Configure, _now_us: int) -> Decision:
        if command.rules == self.rules:
            return Decision()
        text = json.dumps(dataclasses.asdict(command.rules), sort_keys=True)
        return Decision((event_of(Kind.RULES, [text]),))

    def _decide_tick(self, command: commands.Tick, now_us: int) -> Decision:
        events = self.delays.decide_release(now_us, command.limit)
        events += self.checkback.decide_tick(now_us, command.limit)
        events += self._consuming.decide_tick(self.rules, now_us, command.limit)
        return Decision(tuple(events))

    def _with_topics(self, names: Sequence[str], decide: Callable[[Topics], Decision]) -> Decision:
        """Return what ``decide`` decides about a subscription to the topics ``names``. Missing ones are created by the
        same decision, if the rules allow it; ``decide`` gets all topics as they will be then. Raises TOO_MANY."""
        missing = [name for name in names if not self.topics.has(name) and self.topics.may_be_made(name)]
        if not missing or not self.rules.auto_create_topics:
            return decide(self.topics)
        made = [self.topics.decide_create(commands.CreateTopic(name), self.rules) for name in dict.fromkeys(missing)]
        if len(self.topics.by_name) + len(made) > self.rules.max_topics:
            raise error(Code.TOO_MANY, f"there are {len(self.topics.by_name)} topics", "max_topics")
        creation = self.topics.creation([(d.answer["name"], d.answer["queues"]) for d in made])
        decision = decide(self.topics.with_created(creation))
        return Decision((creation, *decision.events), decision.answer)

    _deciders: ClassVar[dict[type[Command], Callable[[Ledger, Any, int], Decision]]] = {
        commands.Send: _decide_messages,
        commands.Prepare: _decide_messages,
        commands.End: lambda self, cmd, _: self._ending.decide_end(cmd, self.rules),
        commands.Receive: lambda self, cmd, now: self._consuming.decide_receive(
            cmd, self.rules, now, self.next_position
        ),
        commands.Join: lambda self, cmd, _: self._consuming.decide_join(cmd, self.rules, self.next_position),
        commands.Fence: lambda self, cmd, now: self._consuming.decide_fence(cmd, self.rules, now, self.next_position),
        commands.Settle: lambda self, cmd, now: self._consuming.decide_settle(cmd, self.rules, now),
        commands.Bury: lambda self, cmd, _: self._consuming.decide_bury(cmd),
        commands.AskChecks: lambda self, cmd, now: self.checkback.decide_ask(cmd, now),
        commands.Tick: _decide_tick,
        commands.OpenSession: lambda self, cmd, _: self.sessions.decide_open(cmd, self.rules),
        commands.AlterProducers: lambda self, cmd, _: self.sessions.decide_alter(cmd, self.rules),
        commands.Subscribe: lambda self, cmd, _: self._with_topics(
            cmd.subscription.topics, lambda known: self._consuming.decide_subscribe(cmd, known, self.rules)
        ),
        commands.AlterGroup: lambda self, cmd, _: self._with_topics(
            cmd.topics or (), lambda known: self._consuming.decide_alter(cmd, known)
        ),
        commands.ResetGroup: lambda self, cmd, _: operating.decide_reset(self.groups, cmd, self.topics),
        commands.PauseGroup: lambda self, cmd, _: operating.decide_pause(self.groups, cmd),
        commands.LimitGroup: lambda self, cmd, _: operating.decide_limit(self.groups, cmd),
        commands.DeleteGroup: lambda self, cmd, _: operating.decide_delete(self.groups, cmd, self.next_position),
        commands.CreateTopic: lambda self, cmd, _: self.topics.decide_create(cmd, self.rules),
        commands.CommitBatch: lambda self, cmd, _: self.writers.decide_commit(cmd, self.rules),
        commands.Park: lambda self, cmd, _: self.checkback.decide_park(cmd),
        commands.Recheck: lambda self, cmd, _: self.checkback.decide_recheck(cmd.transactions),
        commands.Recall: lambda self, cmd, _: self.delays.decide_recall(
            cmd.positions, self.topics.queue_ids(cmd.topic)
        ),
        commands.SettleDead: lambda self, cmd, _: self._consuming.decide_settle_dead(cmd),
        commands.EditDead: lambda self, cmd, _: decide_edit(
            cmd, self.groups, self.topics, self.dedup, self.rules, self.next_position
        ),
        commands.Retain: lambda self, cmd, _: self._keeping.decide_retain(cmd, self.trimmed_position),
        commands.Cut: lambda self, cmd, now: self._keeping.decide_cut(cmd, now),
        commands.AlterTopic: lambda self, cmd, now: self._keeping.decide_alter(cmd, self.rules, now),
        commands.DeleteTopic: lambda self, cmd, _: self._keeping.decide_delete(cmd),
        commands.Forget: lambda self, cmd, _: self._forgetting.decide_forget(cmd),
        commands.ForgetWriter: lambda self, cmd, _: self._forgetting.decide_forget_writer(cmd),
        commands.Configure: _decide_configure,
    }

    def apply(self, kind: Kind, batch: pa.RecordBatch | Few, position: int, time_us: int, rows: Any = None) -> None:
        """Change the state by one event of the log. ``position`` is that of its first row, ``time_us`` the broker's
        time of it; ``rows``: the same as the batch, of an event decided as rows; then only its length is used."""
        self.next_position = position + batch.num_rows
        self.last_time_us = time_us
        if (counter := _COUNTED.get(kind)) is not None:
            self.counters[counter] += batch.num_rows
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
        self.sessions.note_sent(batch.column("epoch").to_numpy())
        self._place(positions, queue_ids, tags, visible, sizes_of(batch.column("body")), time_us)

    def _apply_half(self, batch: pa.RecordBatch, position: int, time_us: int) -> None:
        tags = self._enter(batch, position, time_us, half=True)
        begun = self.transactions.enter(batch, tags, sizes_of(batch.column("body")), position, time_us)
        self.checkback.begin(begun, time_us)

    def _enter(self, batch: pa.RecordBatch, position: int, time_us: int, *, half: bool) -> Int32s:
        """Note the message ids, the use of sessions and queue rotation of new messages, plain or ``half``. Returns the
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
        """Append messages to their queues; those whose time ``visible`` is after ``time_us`` are delayed instead."""
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
        if messages := self._ending.apply_few(rows):
            positions, queue_ids, tags, sizes = zip(*messages, strict=True)
            visible = None
            if self.transactions.holds_back:
                visible = self.transactions.visible_us(np.array(positions, np.int64)).tolist()
            self._by_rows.place(positions, queue_ids, tags, sizes, visible, time_us)
        for _, state, _, _ in rows:
            self.counters[_STATE_COUNTERS[state]] += 1

    def _apply_batch_decided(self, batch: pa.RecordBatch, position: int, time_us: int) -> None:
        self.sessions.note(batch.column("epoch").to_numpy(), time_us)
        self.writers.apply_decided(batch, time_us)
        decided = batch.filter(pc.greater_equal(batch.column("transaction"), 0))
        if decided.num_rows:
            self._apply_decided(decided, position, time_us)

    def _apply_recalled(self, batch: pa.RecordBatch, _position: int, _time_us: int) -> None:
        self.delays.take(batch.column("delayed").to_numpy())

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
        Kind.CHECKED: lambda self, batch, _, time_us: self.checkback.apply_checked(batch, time_us),
        Kind.PARKED: lambda self, batch, _, __: self.checkback.apply_parked(batch),
        Kind.REOPENED: lambda self, batch, _, time_us: self.checkback.apply_reopened(batch, time_us),
        Kind.RELEASED: lambda self, batch, _, time_us: self._append(
            *self.delays.take(batch.column("delayed").to_numpy()), time_us
        ),
        Kind.RECALLED: _apply_recalled,
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
        Kind.PLAIN: lambda self, rows, position, time_us: self._by_rows.apply(rows, position, time_us, self.rules),
        Kind.HALF: lambda self, rows, position, time_us: self._by_rows.apply(rows, position, time_us, self.rules),
        Kind.DECIDED: _apply_few_decided,
    }  # as ``_acts``, of what :meth:`decide_rows` gave with its events

    def snapshot(self) -> dict[str, pa.Table]:
        """Return copies of the whole state as Arrow tables."""
        return self.freeze()()

    def freeze(self) -> Callable[[], dict[str, pa.Table]]:
        """Return a function that returns the snapshot of now. Slow copies of parts that never change are made only when
        it is called, which may be later and on any thread."""
        scalars = {
            "format": FORMAT if self.groups.has_limits else FORMAT - 1,
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
        return json.loads(tables["ledger"]["state"][0].as_py()).get("format") in (1, 2, 3, 4, FORMAT)

    @classmethod
    def restore(cls, shard: int, tables: dict[str, pa.Table]) -> Ledger:
        """Return a new ledger with the state of :meth:`snapshot`."""
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

    @property
    def wake_us(self) -> int:
        """A lower bound of the time (µs) of the next work of a :class:`~escrowmq.ledger.commands.Tick`; ``NEVER_US``:
        none. A Tick that finds nothing moves it."""
        return min(self.delays.wake_us, self.checkback.wake_us, self.groups.wake_us)

    def repeats_of(self, command: commands.Prepare) -> Repeats | None:
        """Return the rows whose message ids are stored, and the log positions of those messages; None: no row."""
        return self._producing.repeats_of(command, self.trimmed_position)

    def queue_id(self, topic: str, queue: int) -> int:
        """Return the shard-wide id of a topic's queue number ``queue``. Raises Rejected(UNKNOWN_TOPIC, BAD_QUEUE)."""
        return self.topics.queue_id(topic, queue)

    def queue(self, queue_id: int) -> QueueIndex:
        """Return a consume queue by its id."""
        return self.topics.queues[queue_id]

    def half_states(self, positions: Int64s) -> tuple[UInt8s, Int32s, Int64s, Int64s, Int64s]:
        """Return state, checks, due_us, first position and epoch of the transactions of the half messages at these log
        positions.

        Those that left with retention are EXPIRED with position -1 (nothing undecided ever leaves).
        """
        owners = self.transactions.owner_of(positions)
        gone = {"state": np.uint8(EXPIRED), "checks": np.int32(0), "due_us": 0, "first": NONE, "epoch": 0}
        columns: Any = tuple(np.full(len(positions), value) for value in gone.values())
        for name, column in zip(gone, columns, strict=True):
            column[owners != NONE] = self.transactions.column(name, owners[owners != NONE])
        states: tuple[UInt8s, Int32s, Int64s, Int64s, Int64s] = columns
        return states

    def open_transactions(self, session: int) -> int:
        """Return the number of OPEN (not PARKED) transactions of a session's producer group. From any thread."""
        return self.transactions.open.get(self.sessions.group_number(session), 0)

    def stats(self, now_us: int) -> dict[str, float]:
        """Return the value of each metric of the ledger by name."""
        table, age = self.transactions, 0.0
        if (oldest := table.oldest_open()) < table.rows.end:
            first = table.column("first", np.array([oldest])).astype(np.int64)
            age = max(now_us - int(table.prepared_us(first)[0]), 0) / 1e6
        return {
            **self.counters,
            "delivered_total": self.groups.delivered,
            "acked_messages_total": self.groups.acked,
            "open_half_messages": sum(table.open.values()),
            "oldest_half_age_seconds": age,
            "parked": sum(table.parked.values()),
            "delayed_waiting": self.delays.waiting,
            "dedup_runs": len(self.dedup),
            "writers": len(self.writers),
            "topics": len(self.topics.by_name),
            "producer_groups": len(self.sessions.groups),
            "producer_sessions": len(self.sessions),
        }


def sizes_of(bodies: pa.Array) -> Int32s:
    """Return the size of each body in bytes; 0 if it is damaged."""
    sizes = pc.binary_length(bodies)
    sizes = sizes.fill_null(0) if sizes.null_count else sizes
    return np.asarray(sizes.to_numpy(zero_copy_only=False), np.int32)


def _read_rules(values: dict[str, Any]) -> Rules:
    """Return rules from a dict of their values by name; unknown names are ignored, missing ones have their default."""
    known = {f.name for f in dataclasses.fields(Rules)}
    return Rules(**{name: value for name, value in values.items() if name in known})
