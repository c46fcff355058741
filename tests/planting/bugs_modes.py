"""Bugs of the modes: producer-driven, both-reach, offsets, the check by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from escrowmq.errors import Code
from escrowmq.model import COMMIT
from escrowmq.outbox import acts, handled
from escrowmq.outbox.modes import both_reach, driving, journal, validation
from escrowmq.outbox.modes.assignments import Assignments, Claim, Slot
from escrowmq.outbox.modes.both_reach import BothReachConsumer, SignedMessages
from escrowmq.outbox.modes.driving import Driving
from escrowmq.outbox.modes.journal import Journal
from escrowmq.outbox.modes.offsets import OffsetConsumer
from escrowmq.outbox.tables import trans_recv_log, trans_recv_offset
from planting import Plant, bug

DRIVEN = "outbox/modes/test_modes_driven.py::"
REACH = "outbox/modes/test_modes_both_reach.py::"
OFFSETS = "outbox/modes/test_modes_offsets.py::"


@bug(
    "modes", DRIVEN + "test_a_failed_business_change_takes_the_message_back[stored]", "DID NOT RAISE ZeroDivisionError"
)
def decide_outside_of_the_business_transaction(plant: Plant) -> None:
    """P4 in a transaction of its own: the business fails, and the message goes."""
    real = Journal.decide

    @plant.instead(Journal, "decide")
    def decide(self: Any, connection: Any, *given: Any) -> None:
        connection.commit()
        with self._engine.begin() as own:
            real(self, own, *given)
        connection.begin()


@bug("modes", DRIVEN + "test_a_broker_that_is_away_leaves_the_row_and_the_result_says_so", "Redriven(left=1)")
def delete_the_row_before_the_broker_has_answered(plant: Plant) -> None:
    real = Driving._finish

    @plant.instead(Driving, "_finish")
    def finish(self: Any, batch: Any, shards: Any, outcome: Any) -> Any:
        self._journal.settle([journal.Stage.COMMITTING], journal.ids_of(batch))
        return real(self, batch, shards, outcome)


@bug(
    "modes",
    DRIVEN + "test_redrive_commits_what_was_decided_and_gives_up_what_was_not[sqlite]",
    "assert driven.redrive() == Redriven(committed=1, rolled_back=1)",
)
def redrive_what_was_not_decided_to_its_commit(plant: Plant) -> None:
    real = Driving._roll_back_unknown

    @plant.instead(Driving, "_roll_back_unknown")
    def roll_back_unknown(self: Any, batch: Any, shards: Any, report: Any) -> None:
        _, transactions = self._carrier.prepare(batch, shards)
        self._carrier.end(driving.replace_columns(batch, transaction=transactions), shards, COMMIT)
        real(self, batch, shards, report)


@bug("modes", DRIVEN + "test_the_opposite_decision_at_the_broker_is_left_to_a_person", "Redriven(stuck=1)")
def take_the_opposite_decision_for_the_end(plant: Plant) -> None:
    @plant.instead(driving, "classify")
    def classify(codes: Any, outcome: Any) -> Any:
        return np.ones(len(codes), np.bool_), np.zeros(len(codes), np.bool_)


@bug("modes", DRIVEN + "test_a_business_transaction_whose_messages_were_given_up_is_fenced[sqlite]", "DID NOT RAISE")
def decide_rows_that_another_has_given_up(plant: Plant) -> None:
    real = Journal._move

    @plant.instead(Journal, "_move")
    def move(self: Any, connection: Any, batch: Any, *given: Any) -> int:
        real(self, connection, batch, *given)
        return int(batch.num_rows)


@bug(
    "modes",
    DRIVEN + "test_a_commit_that_arrived_although_its_answer_was_lost_is_found_in_the_table[sqlite-stored]",
    "the answer to COMMIT was lost",
)
def take_a_lost_answer_for_a_rollback(plant: Plant) -> None:
    @plant.instead(Driving, "_resolve")
    def resolve(self: Any, batch: Any, shards: Any, stamp: Any) -> bool:
        return False


@bug("modes", DRIVEN + "test_a_commit_that_did_not_arrive_is_rolled_back[stored]", "DID NOT RAISE")
def take_a_lost_answer_for_a_commit(plant: Plant) -> None:
    @plant.instead(Driving, "_resolve")
    def resolve(self: Any, batch: Any, shards: Any, stamp: Any) -> bool:
        return True


@bug(
    "modes",
    DRIVEN + "test_a_refused_message_leaves_nothing[stored]",
    'assert (bodies(bus, t), rows(local), undecided(bus)) == ([b"plain"], [], 0)',
)
def leave_the_neighbours_of_a_refused_message_prepared(plant: Plant) -> None:
    @plant.instead(Driving, "_take_back")
    def take_back(self: Any, batch: Any, shards: Any, codes: Any) -> None:
        pass


@bug(
    "modes",
    "outbox/modes/test_modes_pinning.py::test_the_row_names_its_shard_before_the_prepare_leaves",
    "assert (row.state, row.shard, row.transaction_id) == (Stage.STORED, bus.router.shard_of(0,",
)
def forget_which_broker_a_row_belongs_to(plant: Plant) -> None:
    real = Journal._rows

    @plant.instead(Journal, "_rows")
    def rows(self: Any, *given: Any) -> Any:
        return [{**row, "shard": None} for row in real(self, *given)]


@bug(
    "modes",
    "outbox/modes/test_modes_replacing.py::test_who_was_replaced_is_fenced_before_the_newer_one_has_decided",
    "DID NOT RAISE",
)
def decide_without_a_look_at_the_stamp(plant: Plant) -> None:
    real = Journal.decide

    @plant.instead(Journal, "decide")
    def decide(self: Any, connection: Any, batch: Any, away: Any, stamp: Any = None) -> None:
        real(self, connection, batch, away, None)


@bug(
    "modes",
    REACH + "test_an_effect_only_at_the_commit_and_only_once[sqlite-marks]",
    "assert count(database, trans_prepared) == 2",
)
def have_the_effect_at_the_prepare(plant: Plant) -> None:
    real = BothReachConsumer._apply

    @plant.instead(BothReachConsumer, "_apply")
    def apply(self: Any, arrivals: Any, signs: Any) -> None:
        real(self, arrivals, signs)
        real(self, arrivals, [both_reach.Sign.COMMIT] * len(signs))


@bug("modes", REACH + "test_without_marks_prepares_are_acknowledged_before_any_effect", "assert events == ")
def have_the_effect_before_the_prepares_are_stored(plant: Plant) -> None:
    @plant.instead(both_reach, "_split_by_sign")
    def split_by_sign(signs: Any) -> Any:
        return [list(range(len(signs)))]


@bug("modes", REACH + "test_with_marks_a_late_copy_of_everything_changes_nothing", "assert noted(local")
def keep_no_mark_of_an_effect(plant: Plant) -> None:
    real = BothReachConsumer._names

    @plant.instead(BothReachConsumer, "_names")
    def names(self: Any, connection: Any, arrivals: Any) -> Any:
        connection.execute(both_reach.trans_recv_log.delete())
        return real(self, connection, arrivals)


@bug(
    "modes",
    REACH + "test_ends_have_ids_of_their_own",
    'assert len({end_id(b"i" * 16, Sign.COMMIT), end_id(b"i" * 16, Sign.ROLLBACK), b"i" * 16})',
)
def send_the_end_under_the_id_of_its_prepare(plant: Plant) -> None:
    @plant.instead(both_reach, "end_id")
    def end_id(identity: bytes, sign: Any) -> bytes:
        return identity


@bug("modes", REACH + "test_a_delay_is_refused", "DID NOT RAISE")
def let_a_commit_overtake_a_delayed_prepare(plant: Plant) -> None:
    real = SignedMessages.prepare

    @plant.instead(SignedMessages, "prepare")
    def prepare(self: Any, batch: Any, shards: Any) -> Any:
        at_once = both_reach.pa.array(np.zeros(batch.num_rows, np.int64))
        return real(self, both_reach.replace_columns(batch, delay_us=at_once), shards)


@bug("modes", OFFSETS + "test_a_failed_effect_moves_nothing[sqlite]", "drain(consumer) == 3")
def move_the_offset_in_a_transaction_of_its_own(plant: Plant) -> None:
    @plant.instead(OffsetConsumer, "_apply")
    def apply(self: Any, claim: Any, next_offset: int, messages: Any, effect: Any) -> Any:
        with self._engine.begin() as connection:
            moved = self._claims[claim.slot] = self._rows.move(connection, claim, next_offset)
        with self._sessions() as session, session.begin():
            effect(session, messages)
        return moved


@bug("modes", OFFSETS + "test_a_newer_consumer_fences_the_older_one[sqlite]", "DID NOT RAISE")
def move_an_offset_that_was_taken_over(plant: Plant) -> None:
    @plant.instead(Assignments, "move")
    def move(self: Any, connection: Any, claim: Any, next_offset: int) -> Any:
        here = sa.update(trans_recv_offset).where(*self._where(claim.slot))
        connection.execute(here.values(next_offset=next_offset))
        return Claim(claim.slot, next_offset, claim.epoch)


@bug("modes", OFFSETS + "test_overlapping_strides_are_refused[sqlite]", "DID NOT RAISE")
def let_two_slots_have_one_offset(plant: Plant) -> None:
    @plant.instead(Slot, "overlaps")
    def overlaps(self: Any, other: Any) -> bool:
        return False


@bug(
    "modes",
    OFFSETS + "test_virtual_queues_split_one_queue_without_loss_or_overlap[sqlite]",
    "assert taken == [9, 8, 8]",
)
def give_every_part_the_whole_queue(plant: Plant) -> None:
    real = OffsetConsumer._give

    @plant.instead(OffsetConsumer, "_give")
    def give(self: Any, batch: Any, effect: Any) -> int:
        whole = {Slot(slot.shard, slot.queue): claim for slot, claim in self._claims.items()}
        mine, self._claims = self._claims, whole
        try:
            return real(self, batch, effect)
        finally:
            moved = {(slot.shard, slot.queue): claim for slot, claim in self._claims.items()}
            self._claims = {slot: moved[slot.shard, slot.queue] for slot in mine}


@bug(
    "modes",
    "outbox/modes/test_modes_validation.py::test_one_lost_and_one_repeated_cancel_out_for_who_counts",
    "assert not verdict.ok",
)
def check_a_run_by_count(plant: Plant) -> None:
    @plant.instead(validation, "compare")
    def compare(confirmed: Any, consumed: Any, unconfirmed: Any = ()) -> Any:
        enough = len(list(consumed)) >= len(list(confirmed))
        lost = frozenset() if enough else frozenset(confirmed)
        return validation.Verdict(lost, frozenset(), frozenset())


STUCK = "outbox/modes/test_modes_stuck.py::"
ACTS = "outbox/test_outbox_acts.py::"


@bug("modes", STUCK + "test_offsets_that_nobody_owns_are_moved_and_others_are_not[sqlite]", "Code.CONFLICT")
def move_an_offset_under_the_hands_of_its_owner(plant: Plant) -> None:
    @plant.instead(Assignments, "put")
    def put(self: Any, connection: Any, slot: Any, next_offset: int) -> Any:
        mine = self._where(slot)
        was = connection.scalar(sa.select(trans_recv_offset.c.next_offset).where(*mine))
        connection.execute(sa.update(trans_recv_offset).where(*mine).values(next_offset=next_offset))
        return (Code.NOT_FOUND if was is None else Code.OK), was


@bug(
    "modes",
    "outbox/test_handled.py::test_messages_of_several_topics_under_one_id_as_a_set_would_have_them",
    "topic not in handled",
)
def delete_the_mark_that_is_to_be_forgotten(plant: Plant) -> None:
    """The id is free then, for messages of other topics, too, whose marks stand beside it."""
    real = handled._forget

    @plant.instead(handled, "_forget")
    def forget(connection: Any, group: str, identity: bytes, topic: Any) -> Any:
        done = real(connection, group, identity, topic)
        seen = trans_recv_log.c
        connection.execute(sa.delete(trans_recv_log).where(seen.consumer_group == group, seen.topic.startswith("%")))
        return done


@bug("modes", ACTS + "test_a_failure_at_any_step_undoes_both[outbox.act-recorded]", "State.WAITING")
def commit_an_act_before_its_record(plant: Plant) -> None:
    real = acts._append

    @plant.instead(acts, "_append")
    def append(connection: Any, *given: Any) -> None:
        connection.exec_driver_sql("COMMIT")
        real(connection, *given)


@bug(
    "modes",
    ACTS + "test_an_edit_by_hand_is_found_at_its_place[<lambda>-4-records 4 to 5 are missing at the end]",
    "IndexError",
)
def verify_without_a_look_at_the_head(plant: Plant) -> None:
    """What is cut off at the end is in no record."""
    real = acts._head

    @plant.instead(acts, "_head")
    def head(engine: Any) -> Any:
        with engine.connect() as connection:
            line = connection.scalar(
                sa.select(acts.trans_act.c.record).order_by(acts.trans_act.c.number.desc()).limit(1)
            )
        return real(engine) if line is None else (acts.parse(line.encode())[0].number, acts.parse(line.encode())[2])
