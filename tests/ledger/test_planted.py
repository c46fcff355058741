"""The checks are worth something only if they fail: known bugs, planted one at a time, must each be caught.

``searched`` is a short run of the state machine, ``walked`` the interleavings, otherwise a named test of another file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import test_checkback
import test_dedup
import test_delays
import test_forgetting
import test_groups_model
import test_interleavings
import test_joins
import test_members
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_machine import LedgerMachine
from test_groups_rules import TestDeadLetters as dead_letters
from test_groups_rules import TestExpiry as expiry

from escrowmq.errors import Code
from escrowmq.ledger.columns.arrays import Columns
from escrowmq.ledger.events import Decision
from escrowmq.ledger.groups import consuming, members, settling
from escrowmq.ledger.groups.consuming import Consuming
from escrowmq.ledger.groups.group import Member
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.messages import producing as messages
from escrowmq.ledger.messages.dedup import Dedup
from escrowmq.ledger.queues.delays import Delays
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.transactions import ending, writers
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.ending import Ending
from escrowmq.ledger.transactions.sessions import Sessions
from escrowmq.ledger.transactions.table import COMMITTED, OPEN, PARKED, ROLLED_BACK, TransactionTable
from escrowmq.ledger.transactions.writers import Forgetting
from escrowmq.model import COMMIT, DecidedBy, Outcome, TransactionId
from escrowmq.schemas import TRANSACTION_ID_DTYPE, Kind
from escrowmq.testing import ledgers
from escrowmq.testing.ledgers import LedgerDriver

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], object]
PLANTED: dict[str, tuple[Plant, Check]] = {}
CAUGHT = (AssertionError, KeyError, IndexError, ValueError, TypeError)


def searched(machine: type[LedgerMachine] = LedgerMachine, examples: int = 80) -> None:
    quick = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        database=None,
        derandomize=machine is LedgerMachine,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


def searched_from(start: int) -> Check:
    """The same, begun where the bug is known to be found soon; should the machine have changed since, the whole search
    follows."""

    def search() -> None:
        searched(seed(start)(type("Seeded", (LedgerMachine,), {})), 4)
        searched()

    return search


def walked() -> None:
    for first in reversed(test_interleavings.BEGINNINGS[1:]):
        test_interleavings.walk(3, first)


def planted(check: Check) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = (plant, check)
        return plant

    return register


# Decisions


@planted(walked)
def apply_a_commit_twice(monkeypatch):
    real = Ledger._acts[Kind.DECIDED]

    def twice(ledger, batch, position, time_us):
        real(ledger, batch, position, time_us)
        committed = batch.column("transaction").to_numpy()[batch.column("state").to_numpy() == COMMITTED]
        _, positions, queue_ids, tags, sizes = ledger.transactions.messages_of(ledger.transactions.find(committed))
        ledger._place(positions, queue_ids, tags, np.zeros(len(positions), np.int64), sizes, time_us)

    monkeypatch.setitem(Ledger._acts, Kind.DECIDED, twice)


def answers(monkeypatch, state: int, outcome: Outcome, code: Code) -> None:
    changed = ending.ANSWER.copy()
    changed[state, outcome] = code
    monkeypatch.setattr(ending, "ANSWER", changed)


@planted(walked)
def accept_the_opposite_decision(monkeypatch):
    def careless(self, command, rules):
        outcomes = command.batch.column("outcome").to_numpy()
        ordinals, _ = self._table.find_ids(command.batch.column("transaction"))
        state, first = self._table.rows["state"], self._table.rows.first
        turned = [
            o - first
            for o, outcome in zip(ordinals.tolist(), outcomes.tolist(), strict=True)
            if o >= 0 and outcome and state[o - first] in (COMMITTED, ROLLED_BACK)
        ]
        before = state[turned].copy()
        state[turned] = OPEN
        try:
            return real(self, command, rules)
        finally:
            state[turned] = before

    real = Ending.decide_end
    monkeypatch.setattr(Ending, "decide_end", careless)


@planted(walked)
def say_ok_to_the_opposite_decision(monkeypatch):
    answers(monkeypatch, COMMITTED, Outcome.ROLLBACK, Code.ALREADY_COMMITTED)


@planted(walked)
def refuse_a_late_decision_of_what_is_parked(monkeypatch):
    def decide_end(self, command, rules):
        ordinals, _ = self._table.find_ids(command.batch.column("transaction"))
        if (ordinals >= 0).all() and (self._table.column("state", ordinals) == PARKED).all():
            return Decision((), pa.RecordBatch.from_pydict({"code": np.full(len(ordinals), Code.EXPIRED, np.uint8)}))
        return real(self, command, rules)

    real = Ending.decide_end
    monkeypatch.setattr(Ending, "decide_end", decide_end)


@planted(walked)
def ignore_the_epoch_in_an_id(monkeypatch):
    def find_ids(self, ids):
        _, codes = real(self, ids)
        raw = np.frombuffer(ids.buffers()[1], TRANSACTION_ID_DTYPE, len(ids), 16 * ids.offset)
        by_position = self.find(raw["position"].astype(np.int64))
        codes[by_position >= 0] = Code.OK
        return by_position, codes

    real = TransactionTable.find_ids
    monkeypatch.setattr(TransactionTable, "find_ids", find_ids)
    monkeypatch.setitem(test_interleavings.ACTS, "another epoch", _commit_of_another_epoch)


def _commit_of_another_epoch(world) -> None:
    right = TransactionId.from_bytes(world.raw(1))
    pair = (bytes(TransactionId(right.shard, right.epoch + 7, right.position)), COMMIT)
    session = world.session("a")
    codes = world.driver.end(session, pair)
    world.model.end([pair], session, DecidedBy.PRODUCER, world.driver.now_us, codes)


@planted(walked)
def let_any_group_decide(monkeypatch):
    monkeypatch.setattr(Ending, "_find_owned", lambda self, rows, ordinals, sessions, codes: rows)


@planted(walked)
def let_a_fenced_session_act(monkeypatch):
    def status(self, epoch, **options):
        code = real(self, epoch, **options)
        return Code.OK if code == Code.FENCED else code

    real = Sessions.status
    monkeypatch.setattr(Sessions, "status", status)


@planted(walked)
def make_half_messages_visible(monkeypatch):
    real = Ledger._acts[Kind.HALF]

    def visible(ledger, batch, position, time_us):
        real(ledger, batch, position, time_us)
        for row, queue_id in enumerate(batch.column("queue_id").to_pylist()):
            ledger.topics.queues[queue_id].append(np.array([position + row]), 0, time_us, 0)

    monkeypatch.setitem(Ledger._acts, Kind.HALF, visible)


@planted(walked)
def publish_what_is_rolled_back(monkeypatch):
    def apply_decided(self, batch):
        real(self, batch)
        return self._table.messages_of(self._table.find(batch.column("transaction").to_numpy()))

    real = Ending.apply_decided
    monkeypatch.setattr(Ending, "apply_decided", apply_decided)


@planted(searched_from(1))
def publish_only_the_first_message_of_a_transaction(monkeypatch):
    def messages_of(self, ordinals):
        names = ("first", "queue_id", "tag", "size")
        return (np.arange(len(ordinals)), *(self.column(name, ordinals) for name in names))

    monkeypatch.setattr(TransactionTable, "messages_of", messages_of)


@planted(searched_from(1))
def decide_and_change_at_once(monkeypatch):
    def decide_recheck(self, ids):
        decision = real(self, ids)
        for event in decision.events:
            table = self._table
            table.rows["checks"][table.find(event.batch.column("transaction").to_numpy()) - table.rows.first] = 0
        return Decision((), decision.answer)

    real = CheckBack.decide_recheck
    monkeypatch.setattr(CheckBack, "decide_recheck", decide_recheck)


# Check-back


@planted(walked)
def count_checks_in_memory_only(monkeypatch):
    def decide_ask(self, command, now_us):
        decision = real(self, command, now_us)
        for event in decision.events:
            self.apply_checked(event.batch, now_us)
        return Decision((), decision.answer)

    real = CheckBack.decide_ask
    monkeypatch.setattr(CheckBack, "decide_ask", decide_ask)


@planted(walked)
def do_not_count_checks(monkeypatch):
    def apply_checked(self, batch, time_us):
        real(self, batch, time_us)
        table = self._table
        table.rows["checks"][table.find(batch.column("transaction").to_numpy()) - table.rows.first] -= 1

    real = CheckBack.apply_checked
    monkeypatch.setattr(CheckBack, "apply_checked", apply_checked)


@planted(walked)
def ask_the_decided(monkeypatch):
    def alive(self, ordinals, due_us, *, last=False):
        columns, rows = self._table.rows, ordinals - self._table.rows.first
        return (columns["due_us"][rows] == due_us) & ((columns["checks"][rows] >= self._rules.check_max) == last)

    monkeypatch.setattr(CheckBack, "_alive", alive)


@planted(walked)
def ask_once_too_often(monkeypatch):
    def apply_rules(self, rules):
        real(self, dataclasses.replace(rules, check_max=rules.check_max + 1))

    real = CheckBack.apply_rules
    monkeypatch.setattr(CheckBack, "apply_rules", apply_rules)


@planted(lambda: test_checkback.test_i36_ages_do_not_look_at_the_clients_clock(LedgerDriver()))
def take_ages_from_the_clients_clock(monkeypatch):
    def by_birth(batch, *arguments):
        made = real(batch, *arguments)
        columns = dict(zip(made.schema.names, made.columns, strict=True))
        columns["due_us"] = pa.array(made.column("born_us").to_numpy() + 6_000_000)
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=made.schema)

    real = messages._make_stored
    monkeypatch.setattr(messages, "_make_stored", by_birth)


# Identity


@planted(lambda: test_dedup.test_window_edge_is_inside(LedgerDriver()))
def forget_ids_one_moment_early(monkeypatch):
    def forget(self, time_us, rules):
        oldest = time_us - rules.dedup_window_us + 1
        gone = int(np.searchsorted(self._runs["time_us"], oldest, side="left"))
        for ordinal in range(self._runs.first, self._runs.first + gone):
            row = ordinal - self._runs.first
            self._unindex(int(self._runs["instance"][row]), (int(self._runs["sequence"][row]), ordinal))
        self._runs.trim(self._runs.first + gone)

    monkeypatch.setattr(Dedup, "_forget", forget)


@planted(test_dedup.test_i9_against_a_dict)
def forget_the_last_id_of_a_run(monkeypatch):
    def find_run(self, known, sequence, topics, positions, halves):
        real(self, known, sequence, topics, positions, halves)
        for first, ordinal in known:
            last = first + int(self._runs["count"][ordinal - self._runs.first]) - 1
            if sequence <= last < sequence + len(topics):
                positions[last - sequence] = -1

    real = Dedup._find_run
    monkeypatch.setattr(Dedup, "_find_run", find_run)


@planted(walked)
def forget_ids_in_a_crash(monkeypatch):
    monkeypatch.setattr(Dedup, "restore", lambda self, tables, places, rules: self._runs.load(tables["dedup"]))


@planted(searched)
def look_ids_up_in_any_topic(monkeypatch):
    real = Dedup.find
    monkeypatch.setattr(Dedup, "find", lambda self, ids, topics: real(self, ids, np.zeros(len(ids), np.int32)))
    add = Dedup.add
    monkeypatch.setattr(Dedup, "add", lambda self, ids, topics, *rest, **more: add(self, ids, 0, *rest, **more))


@planted(test_dedup.test_batches_that_alternate_between_topics_are_one_run)
def give_a_mixed_run_the_topic_of_its_first_row(monkeypatch):
    real = Dedup._note_topics

    def note(self, ordinal, count, topic):
        real(self, ordinal, count, topic if isinstance(topic, int) else int(topic[0]))

    monkeypatch.setattr(Dedup, "_note_topics", note)


@planted(lambda: test_dedup.test_i9_another_content_under_a_taken_id_is_refused(LedgerDriver(), False, "body", False))
def take_any_content_for_a_repeat(monkeypatch):
    monkeypatch.setattr(ledgers, "differing", lambda given, stored: np.zeros(given.num_rows, np.bool_))


@planted(lambda: test_dedup.test_i9_a_keyless_half_message_keeps_its_queue(LedgerDriver()))
def answer_a_repeat_of_another_kind(monkeypatch):
    def find(self, ids, topics):
        found = real(self, ids, topics)
        found.halves[:] = False
        return found

    real = Dedup.find
    monkeypatch.setattr(Dedup, "find", find)


@planted(lambda: test_dedup.test_the_last_prepare_of_an_id_counts_while_it_is_undecided(LedgerDriver()))
def leave_what_is_replaced_undecided(monkeypatch):
    def decide(self, *arguments):
        decision = real(self, *arguments)
        return dataclasses.replace(decision, events=tuple(e for e in decision.events if e.kind != Kind.DECIDED))

    real = messages.Producing.decide
    monkeypatch.setattr(messages.Producing, "decide", decide)


@planted(lambda: test_dedup.test_nothing_is_replaced_after_the_decision(LedgerDriver()))
def replace_what_is_decided(monkeypatch):
    monkeypatch.setattr(messages.Producing, "_undecided", lambda self, owners: np.ones(len(owners), np.bool_))


# Forgetting


@planted(lambda: test_forgetting.test_who_has_something_undecided_stays_until_it_is_decided(False))
def forget_a_session_with_something_undecided(monkeypatch):
    monkeypatch.setattr(TransactionTable, "undecided_epochs", lambda self: np.empty(0, np.int64))


@planted(lambda: test_forgetting.test_i9_message_ids_are_remembered_without_their_session(True))
def forget_a_session_that_a_repeat_needs(monkeypatch):
    """What is decided and belongs to nobody is taken for another group's."""
    foreign = lambda self, ordinals, groups: self.groups_of(ordinals) != groups  # noqa: E731
    monkeypatch.setattr(TransactionTable, "foreign", foreign)


@planted(lambda: test_forgetting.test_who_is_connected_stays(LedgerDriver()))
def forget_the_connected(monkeypatch):
    real = Sessions.idle

    def careless(self, command):
        epochs = np.setdiff1d(real(self.sessions, command.before_us), self.table.undecided_epochs())
        return Decision(writers._events(epochs[: command.limit]), len(epochs[: command.limit]))

    monkeypatch.setattr(Forgetting, "decide_forget", careless)


@planted(searched)
def overlook_that_a_session_was_used(monkeypatch):
    monkeypatch.setattr(Sessions, "note", lambda self, epochs, time_us: None)


@planted(searched)
def begin_the_time_anew_with_a_restart(monkeypatch):
    real = Sessions.restore

    def restore(self, tables, time_us):
        real(self, tables, time_us)
        self._rows["used_us"][:] = time_us

    monkeypatch.setattr(Sessions, "restore", restore)


@planted(searched_from(28))
def give_an_epoch_twice(monkeypatch):
    real = Sessions.forget

    def forget(self, epochs):
        gone = real(self, epochs)
        self.next_epoch = int(self._rows["epoch"].max(initial=0)) + 1
        return gone

    monkeypatch.setattr(Sessions, "forget", forget)


@planted(lambda: test_forgetting.test_i7_a_fenced_process_stays_out_while_its_successor_is_known(LedgerDriver()))
def let_a_zombie_take_its_name_back(monkeypatch):
    real = Sessions.decide_open
    monkeypatch.setattr(
        Sessions,
        "decide_open",
        lambda self, command, rules: real(self, dataclasses.replace(command, resume=None), rules),
    )


# Offsets and time


@planted(searched_from(1))
def reuse_offsets_after_retention(monkeypatch):
    def trim_below(self, position):
        below = np.flatnonzero(self._entries["position"] < position)
        if len(below):
            kept = self._entries["position"][below[-1] + 1 :].copy()
            tags = self._entries["tag"][below[-1] + 1 :].copy()
            self._entries = Columns({"position": np.int64, "tag": np.int32})
            self._entries.extend(len(kept), position=kept, tag=tags)

    monkeypatch.setattr(QueueIndex, "trim_below", trim_below)


@planted(searched)
def drop_what_is_undecided_and_young(monkeypatch):
    monkeypatch.setattr(Ending, "decide_expire", lambda self, visible_us, limit: (limit, []))


@planted(lambda: test_delays.test_i21_not_before_its_time_and_then_at_the_next_tick(LedgerDriver()))
def release_delayed_messages_early(monkeypatch):
    real = Delays.decide_release
    monkeypatch.setattr(Delays, "decide_release", lambda self, now_us, limit: real(self, now_us + 1, limit))


@planted(lambda: test_delays.test_delay_and_transaction_commit_first(LedgerDriver()))
def forget_the_delay_at_the_commit(monkeypatch):
    monkeypatch.setattr(TransactionTable, "visible_us", lambda self, positions: np.zeros(len(positions), np.int64))


@planted(lambda: test_joins.test_beginners_and_joiners_of_two_transactions_in_one_batch(LedgerDriver()))
def let_something_stand_between_two_messages_of_a_transaction(monkeypatch):
    def messages_of(self, ordinals):
        columns = real(self, ordinals)
        order = np.argsort(columns[1])[::-1]
        return tuple(column[order] for column in columns)

    real = TransactionTable.messages_of
    monkeypatch.setattr(TransactionTable, "messages_of", messages_of)


# Consumers


@planted(lambda: expiry().test_an_expired_lease_comes_back_and_its_late_ack_is_refused())
def accept_a_lost_lease(monkeypatch):
    monkeypatch.setattr(settling, "_nothing_pending", lambda mask, a, b, if_acked: Code.OK)


@planted(searched_from(3))
def forget_acks(monkeypatch):
    monkeypatch.setitem(Groups._row_acts, Kind.ACKED, lambda self, rows, at: None)


@planted(lambda: dead_letters().test_cause())
def deliver_for_ever(monkeypatch):
    def settler(self, *arguments, **shared):
        made = real(self, *arguments, **shared)
        made.redelivery = made.redelivery._replace(attempts=made.redelivery.attempts + 1)
        return made

    real = Consuming._settling
    monkeypatch.setattr(Consuming, "_settling", settler)


# Members whose in-doubt work stays


def held() -> None:
    for walk in (4, 5, 6, 7):
        test_groups_model.test_long_walks(walk)


@planted(held)
def leave_what_an_old_process_had_in_its_hands(monkeypatch):
    monkeypatch.setattr(Member, "note", lambda self, lease: setattr(lease, "doubt", lease.end))


@planted(held)
def end_held_leases_by_time(monkeypatch):
    monkeypatch.setattr(consuming, "NEVER_US", 1_000_020)


@planted(held)
def let_an_older_process_receive(monkeypatch):
    monkeypatch.setattr(members, "member_of", lambda group, cmd: group.members[cmd.member])


@planted(held)
def fence_without_shutting_out(monkeypatch):
    monkeypatch.setitem(Groups._row_acts, Kind.FENCED, lambda self, rows, at: None)


@planted(test_members.test_a_process_that_lost_an_answer_keeps_what_reached_it)
def keep_what_never_came(monkeypatch):
    def keep_all(self, rows, at):
        for id, _ in rows:
            lease = self.leases.live[id]
            lease.doubt = lease.end
            self._on_change(lease)

    monkeypatch.setitem(Groups._row_acts, Kind.KEPT, keep_all)


# The tests


@pytest.mark.invariant("I27")
@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_bug_is_caught(name, monkeypatch):
    plant, check = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(CAUGHT):
        check()


def test_without_a_planted_bug_nothing_is_caught():
    test_interleavings.walk(2, test_interleavings.BEGINNINGS[1])
    expiry().test_an_expired_lease_comes_back_and_its_late_ack_is_refused()
    dead_letters().test_cause()
    test_dedup.test_window_edge_is_inside(LedgerDriver())
    test_checkback.test_i36_ages_do_not_look_at_the_clients_clock(LedgerDriver())
