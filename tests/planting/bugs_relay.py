"""Bugs of the outbox: writing into it, the relay, the receive log."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from escrowmq.outbox import consuming, inbox, sending
from escrowmq.outbox.relay import marking, verdicts
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.reading import Reader
from escrowmq.outbox.relay.verdicts import Verdict
from escrowmq.outbox.relay.worker import SharedTarget
from escrowmq.outbox.tables import State, trans_message
from planting import Plant, bug

SENDING = "outbox/relay/test_relay_sending.py::"
KEEPING = "outbox/relay/test_relay_keeping.py::"
VERDICTS = "outbox/relay/test_relay_verdicts.py::"
SEEN = "outbox/test_inbox.py::"


@bug("relay", SENDING + "test_a_refused_message_holds_its_key_and_no_other[sqlite]", "assert states(tables) == ")
def call_a_row_sent_before_the_target_answered(plant: Plant) -> None:
    @plant.instead(verdicts, "judge")
    def judge(rows: Any, codes: Any, *_: Any, **__: Any) -> Verdict:
        return Verdict(sent=list(range(len(rows))))


@bug("relay", SENDING + "test_a_refused_message_holds_its_key_and_no_other[sqlite]", 'bodies(target.taken, "bad")')
def send_on_behind_a_row_that_was_refused(plant: Plant) -> None:
    real = SharedTarget.send

    @plant.instead(SharedTarget, "send")
    def send(self: Any, batch: Any) -> Any:
        return np.concatenate([real(self, batch.slice(row, 1)) for row in range(batch.num_rows)])


@bug(
    "relay",
    VERDICTS + "test_every_row_has_one_fate",
    "assert held == ( holds or verdict.aside[[a.seq for a in verdict.aside].index(places[0])].s",
)
def put_every_row_behind_a_refused_one_aside_by_itself(plant: Plant) -> None:
    real = verdicts._judge_mixed

    @plant.instead(verdicts, "_judge_mixed")
    def judge_mixed(rows: Any, *given: Any) -> Verdict:
        return real([row._replace(key=None) for row in rows], *given)


@bug("relay", VERDICTS + "test_every_row_has_one_fate", "a.attempts ==")
def count_no_refusals(plant: Plant) -> None:
    real = verdicts._aside

    @plant.instead(verdicts, "_aside")
    def aside(row: Any, code: Any, counts: bool, *given: Any) -> Any:
        return real(row, code, False, *given)


@bug("relay", VERDICTS + "test_away_is_nobodys_fault", "away is Code.TIMED_OUT")
def count_a_target_that_is_away_against_its_rows(plant: Plant) -> None:
    real = verdicts.judge

    @plant.instead(verdicts, "judge")
    def judge(*given: Any, partly_there: bool = False) -> Verdict:
        return real(*given, partly_there=True)


@bug("relay", VERDICTS + "test_a_head_that_gets_through_frees_its_key", 'verdict.freed == [(1, "a")]')
def leave_a_key_held_when_its_head_got_through(plant: Plant) -> None:
    real = verdicts.judge

    @plant.instead(verdicts, "judge")
    def judge(rows: Any, codes: Any, held: Any, *given: Any, **named: Any) -> Verdict:
        return real(rows, codes, {}, *given, **named)


@bug("relay", SENDING + "test_many_keys_in_many_batches_keep_their_order[sqlite]", "not out_of_order(target.taken)")
def read_the_newest_rows_first(plant: Plant) -> None:
    real = Reader.pending

    @plant.instead(Reader, "pending")
    def pending(self: Any, *given: Any) -> Any:
        return real(self, *given)[::-1]


@bug(
    "relay",
    SENDING + "test_a_message_arrives_with_all_its_columns_and_its_row_leaves[sqlite]",
    "assert target.taken[0]",
)
def send_the_properties_of_no_row(plant: Plant) -> None:
    from escrowmq.outbox.relay import reading

    real = reading._maps

    @plant.instead(reading, "_maps")
    def maps(texts: Any) -> Any:
        return real([None] * len(texts))


@bug(
    "relay",
    "outbox/relay/test_relay_draining.py::test_a_refused_row_is_named_and_not_waited_for[sqlite]",
    "== (0, 1, 2, 0, 1)",
)
def purge_what_was_never_sent(plant: Plant) -> None:
    @plant.instead(marking, "purge")
    def purge(dialect: Any, connection: sa.Connection, before_us: int, states: Any) -> int:
        over = trans_message.c.state.in_([int(state) for state in (*states, State.RETRYING)])
        old = sa.delete(trans_message).where(over, trans_message.c.created_us <= before_us)
        return connection.execute(old).rowcount


@bug("relay", KEEPING + "test_sent_rows_are_kept_as_long_as_asked_and_then_leave[sqlite]", "[State.SENT] * 3")
def purge_before_the_time_that_was_asked(plant: Plant) -> None:
    real = marking.purge

    @plant.instead(marking, "purge")
    def purge(dialect: Any, connection: sa.Connection, before_us: int, states: Any) -> int:
        return real(dialect, connection, 1 << 62, states)


@bug(
    "relay",
    "outbox/relay/test_relay_concurrency.py::test_a_zombie_that_wakes_after_its_lease_changes_nothing[sqlite]",
    "assert states(tables) == ",
)
def mark_rows_without_a_look_at_the_lease(plant: Plant) -> None:
    @plant.instead(Leases, "mine")
    def mine(self: Any) -> Any:
        return sa.bindparam("owner", type_=sa.String).is_not(None)


@bug(
    "relay",
    "outbox/relay/test_relay_concurrency.py::test_a_zombie_that_was_refused_holds_no_key_of_its_heirs[sqlite]",
    "assert states(tables) == ",
)
def put_rows_aside_without_a_look_at_the_lease(plant: Plant) -> None:
    @plant.instead(Leases, "still_mine")
    def still_mine(self: Any, connection: Any, lanes: set[int]) -> set[int]:
        return lanes


@bug(
    "relay",
    "outbox/relay/test_relay_concurrency.py::test_a_relay_that_dies_anywhere_loses_nothing_and_another_takes_over[sqlite-read]",
    "the lanes of the dead are still leased",
)
def take_lanes_whose_lease_still_runs(plant: Plant) -> None:
    real = Leases._take

    @plant.instead(Leases, "_take")
    def take(self: Any, connection: Any, now: int, until: int, most: int) -> Any:
        return real(self, connection, 1 << 60, until, most)


@bug(
    "relay",
    "outbox/test_outbox_sending.py::test_keys_keep_their_lane_and_what_has_none_takes_turns",
    'assert [lane_of(key) for key in ("o-1", "o-2", "ключ", "")] == [52, 45, 28, 25]',
)
def choose_the_lane_of_a_key_by_turns(plant: Plant) -> None:
    real = sending.lane_of

    @plant.instead(sending, "lane_of")
    def lane_of(key: Any) -> int:
        return real(None)


@bug(
    "relay",
    "outbox/test_outbox_sending.py::test_i37_commit_keeps_both_and_rollback_neither[sqlite-core]",
    'assert agree(shop) == {"1", "3"}',
)
def commit_the_message_at_once(plant: Plant) -> None:
    real = sending._insert

    @plant.instead(sending, "_insert")
    def insert(session: Any, found: Any) -> None:
        real(session, found)
        session.connection.driver_connection.commit()


# What the consumer's database remembers


@bug("consumers", SEEN + "test_the_first_time_is_true_and_every_repeat_false[sqlite]", "assert not claim_tx")
def claim_without_looking_for_the_mark(plant: Plant) -> None:
    real = inbox._claim

    @plant.instead(inbox, "_claim")
    def claim(connection: Any, group: str, names: Any) -> Any:
        real(connection, group, names)
        return set(names)


@bug("consumers", SEEN + "test_the_first_time_is_true_and_every_repeat_false[sqlite]", "points")
def take_the_mark_of_another_group_for_ones_own(plant: Plant) -> None:
    real = inbox._claim

    @plant.instead(inbox, "_claim")
    def claim(connection: Any, group: str, names: Any) -> Any:
        return real(connection, "all", names)


@bug("consumers", SEEN + "test_the_same_id_in_another_topic_is_another_message[sqlite]", "is first")
def take_one_id_in_two_topics_for_one_message(plant: Plant) -> None:
    real = inbox._claim_distinct

    @plant.instead(inbox, "_claim_distinct")
    def claim_distinct(connection: Any, group: str, wanted: Any) -> Any:
        return real(connection, group, dict.fromkeys(wanted))


@bug(
    "consumers",
    SEEN + "test_consume_sends_back_only_what_fails",
    "inbox.consume(consumer, sqlite_shop, place, idle_timeout=",
)
def acknowledge_a_batch_that_failed(plant: Plant) -> None:
    @plant.instead(consuming.Loop, "_handle_apart")
    async def handle_apart(self: Any, batch: Any) -> int:
        batch.ack()
        return 0


@bug("consumers", SEEN + "test_consume_sends_back_only_what_fails", "startswith")
def dead_letter_without_its_cause(plant: Plant) -> None:
    from escrowmq.client.consuming.received import Received

    real = Received.nack

    @plant.instead(Received, "nack")
    def nack(self: Any, delay: Any = None, cause: Any = None) -> None:
        real(self, delay)


@bug("consumers", SEEN + "test_a_purge_lets_no_first_mark_go_before_that_of_another_topic[sqlite]", "purge_seen")
def purge_the_mark_that_others_stand_behind(plant: Plant) -> None:
    real = inbox._claim_distinct

    @plant.instead(inbox, "_claim_distinct")
    def claim_distinct(connection: Any, group: str, wanted: Any) -> Any:
        seen = dict(connection.execute(sa.select(inbox._SEEN.message_id, inbox._SEEN.seen_us)).all())
        fresh = real(connection, group, wanted)
        for identity, when in seen.items():
            of = inbox._SEEN.message_id == identity
            connection.execute(sa.update(inbox.trans_recv_log).where(of).values(seen_us=when))
        return fresh
