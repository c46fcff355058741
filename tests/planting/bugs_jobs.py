"""Bugs of the Spark jobs: the audit, reconciliation, sweeps. Those of DataFrames are planted in the session of
tests/pipeline.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as f

from escrowmq.pipeline.audit import frames as audit
from escrowmq.pipeline.reconcile import frames as reconcile
from escrowmq.pipeline.sweeps import acts
from planting import Plant, bug

AUDIT = "pipeline/test_audit_frames.py::"
RECONCILE = "pipeline/test_reconcile_frames.py::"
SWEEPS = "pipeline/test_sweeps_acts.py::"


@bug(
    "audit",
    AUDIT + "test_one_lost_and_one_repeated_cancel_out_in_counts_and_are_both_named",
    "'lost', 'o-2'",
    spark=True,
)
def audit_by_count(plant: Plant) -> None:
    real = audit.findings

    @plant.instead(audit, "findings")
    def findings(tallies: Any, judges: Any) -> Any:
        sums = tallies.agg(f.sum("expected").alias("expected"), f.sum("found").alias("found"))
        return real(tallies, judges).join(sums.where("expected != found").select(f.lit(1)), how="leftsemi")


@bug("audit", AUDIT + "test_a_changed_amount_is_altered", "'altered', 'o-3'", spark=True)
def audit_the_ids_and_not_the_content(plant: Plant) -> None:
    @plant.instead(audit, "digest")
    def digest(cells: Any, *before: Any) -> Any:
        return f.lit(0).cast("bigint")


@bug("audit", AUDIT + "test_an_id_that_became_null_is_lost_and_what_is_there_instead_leaked", "(no id)", spark=True)
def audit_without_the_rows_that_have_no_id(plant: Plant) -> None:
    real = audit.witnesses

    @plant.instead(audit, "witnesses")
    def witnesses(side: Any, id: Any, said: Any) -> Any:
        return real(side.where(id.isNotNull()), id, said)


@bug("audit", AUDIT + "test_what_is_open_or_parked_is_orphaned", "'orphaned', 'c'", spark=True)
def audit_without_what_is_parked(plant: Plant) -> None:
    real = audit.undecided

    @plant.instead(audit, "undecided")
    def undecided(half: Any) -> Any:
        return real(half.where("state != 'parked'"))


@bug(
    "reconcile",
    RECONCILE + "test_each_kind_as_a_function_names_first_and_last_sight",
    "['0/4', '0/5'] == ['0/4']",
    spark=True,
)
def report_what_has_had_no_time_yet(plant: Plant) -> None:
    real = reconcile.judge

    @plant.instead(reconcile, "judge")
    def judge(tallies: Any, due: Any) -> Any:
        return real(tallies, f.lit(True))


@bug("reconcile", RECONCILE + "test_each_kind_as_a_function_names_first_and_last_sight", "['0/2']", spark=True)
def reconcile_the_ids_and_not_the_content(plant: Plant) -> None:
    real = reconcile.together

    @plant.instead(reconcile, "together")
    def together(half: Any, commits: Any) -> Any:
        return real(half, commits).withColumn("digest", f.lit(None).cast("bigint"))


@bug("sweeps", SWEEPS + "test_without_a_rule_for_shards_all_of_them_are_fenced[sqlite]", '== "never"')
def look_for_an_order_instead_of_fencing_it(plant: Plant) -> None:
    """A slow order may still commit after the look."""

    @plant.instead(acts, "_fence")
    def fence(order_db: Any, trans_id: str, books: Any) -> str:
        marks = acts.table(books.marks, books.mark_trans_id, books.mark_word)
        look = acts.sa.select(marks.c[books.mark_word]).where(marks.c[books.mark_trans_id] == trans_id)
        return str(order_db.execute(look).scalar_one_or_none() or books.never)


@bug("sweeps", SWEEPS + "test_what_contradicts_itself_is_refused_and_nothing_is_changed[sqlite]", "DID NOT RAISE")
def settle_an_order_whose_freeze_says_otherwise(plant: Plant) -> None:
    @plant.instead(acts, "release")
    def release(product_db: Any, trans_id: str, final: str, books: Any = None) -> bool:
        return True
