"""Bugs of the barrier: the answers of the database, the row of the local transaction, purging."""

from __future__ import annotations

from typing import Any

import numpy as np

from escrowmq.outbox.barrier import binding, checking, columns
from escrowmq.outbox.barrier.checking import Barrier
from escrowmq.outbox.barrier.columns import COMMITTED, ROLLED_BACK
from escrowmq.outbox.barrier.marks import Marks
from planting import Plant, bug

RULES = "outbox/barrier/test_barrier_rules.py::"


@bug(
    "barrier",
    "outbox/barrier/test_barrier_races.py::test_a_bind_that_meets_a_checker_in_the_act_waits_for_what_it_does[sqlite-commit]",
    "assert ( Barrier(shop, wait=0).decide(TransactionId(1, 1, 1)) is mq.UNKNOWN )",
)
def read_before_it_inserts(plant: Plant) -> None:
    @plant.instead(Marks, "close")
    def close(self: Any, ids: Any, deadline: float) -> Any:
        found = self.read(ids)
        self.insert_free(ids, deadline)
        return np.where(found == 0, ROLLED_BACK, found).astype(np.uint8)


@bug("barrier", RULES + "test_branches_are_told_apart[sqlite]", "assert [1, 1] == ")
def answer_commit_for_a_row_that_is_missing(plant: Plant) -> None:
    @plant.instead(Marks, "close")
    def close(self: Any, ids: Any, deadline: float) -> Any:
        return np.full(len(ids), COMMITTED, np.uint8)


@bug("barrier", RULES + "test_shards_are_asked_together", "[1, 1, 1, 2, 2] == [1, 1, 1, 0, 0]")
def answer_rollback_for_what_is_in_flight(plant: Plant) -> None:
    real = Barrier._decide_within

    @plant.instead(Barrier, "_decide_within")
    def decided(self: Any, ids: Any, deadline: float) -> Any:
        told = real(self, ids, deadline)
        return np.where(told == 0, 2, told).astype(np.uint8)


@bug("barrier", RULES + "test_shards_are_asked_together", "assert barrier.decide_ids(")
def answer_rollback_when_one_of_several_databases_says_so(plant: Plant) -> None:
    @plant.instead(checking, "_combine")
    def combine(found: Any) -> Any:
        marks = np.stack(found)
        return np.where((marks == ROLLED_BACK).any(axis=0), ROLLED_BACK, marks.max(axis=0)).astype(np.uint8)


@bug(
    "barrier",
    RULES + "test_branches_are_told_apart[sqlite]",
    "assert Barrier(shop).decide_ids([txn(1), txn(2)]).tolist() == [mq.COMMIT, mq.ROLLBACK]",
)
def forget_the_branch(plant: Plant) -> None:
    real = columns.read

    @plant.instead(columns, "read")
    def read(connection: Any, ids: Any, branch: str) -> Any:
        return real(connection, ids, branch) | real(connection, ids, "stock")


@bug("barrier", RULES + "test_a_late_one_cannot_commit_even_if_the_exception_is_swallowed[sqlite]", "DID NOT RAISE")
def let_a_late_transaction_pass_the_barrier(plant: Plant) -> None:
    @plant.instead(binding, "_insert")
    def insert(session: Any, connection: Any, ids: Any, branch: str) -> None:
        columns.insert(connection, ids, branch, COMMITTED, strict=False)


@bug(
    "barrier",
    RULES + "test_a_late_one_cannot_commit_even_if_the_exception_is_swallowed[sqlite]",
    "assert number_of_orders(shop) == 0",
)
def leave_a_late_transaction_open(plant: Plant) -> None:
    @plant.instead(binding, "_roll_back")
    def roll_back(session: Any, dialect: str) -> None:
        pass


@bug("barrier", RULES + "test_purging_what_the_broker_may_still_ask_about_is_refused", "DID NOT RAISE")
def purge_marks_that_the_broker_may_still_ask_for(plant: Plant) -> None:
    real = Barrier.purge

    @plant.instead(Barrier, "purge")
    def purge(self: Any, older_than: Any, **options: Any) -> int:
        return real(self, older_than, **{**options, "retention": 0})


@bug(
    "barrier",
    RULES + "test_a_batch_keeps_its_order_its_repeats_and_its_nulls[sqlite]",
    "assert barrier.decide_ids(asked).tolist() == [2, 1, 0, 1, 2, 1, 2]",
)
def give_the_answers_in_the_order_of_the_ids(plant: Plant) -> None:
    real = Barrier.decide_ids

    @plant.instead(Barrier, "decide_ids")
    def decide_ids(self: Any, ids: Any) -> Any:
        column = checking.id_column(ids)
        sorted_ids = column.take(np.argsort([i or b"" for i in column.to_pylist()], kind="stable"))
        return real(self, sorted_ids)


@bug(
    "barrier",
    "outbox/barrier/test_barrier_ends.py::test_three_lines_commit_both[sqlite]",
    "the database transaction did not commit",
)
def bind_without_the_row(plant: Plant) -> None:
    @plant.instead(binding, "_insert")
    def insert(session: Any, connection: Any, ids: Any, branch: str) -> None:
        pass
