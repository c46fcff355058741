"""Bugs of the Spark connector that need no JVM to be seen: offsets, partitions, options, columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from escrowmq.spark import columns, options, planning
from escrowmq.spark.planning import OffsetRange
from planting import Plant, bug

PLANNING = "spark/test_spark_planning.py::"
COLUMNS = "spark/test_spark_columns.py::"
OPTIONS = "spark/test_spark_options.py::"


@bug("Spark", PLANNING + "test_a_range_that_left_the_log_raises_and_never_gives_fewer_rows", "DID NOT RAISE")
def read_less_of_a_range_that_was_purged(plant: Plant) -> None:
    real = planning.ranges

    @plant.instead(planning, "ranges")
    def ranges(partitions: Any, start: Any, end: Any) -> Any:
        heads = {partition.name: partition.head for partition in partitions}
        return real(partitions, {name: max(at, heads.get(name, at)) for name, at in start.items()}, end)


@bug(
    "Spark",
    PLANNING + "test_a_batch_that_runs_again_begins_where_its_end_noted_and_says_if_that_has_left_the_log",
    "assert ranges([partition(0, 2, 20)], find_starts({}, end), ends(end)) == [OffsetRange(partition(",
)
def look_anew_for_where_a_batch_begins(plant: Plant) -> None:
    @plant.instead(planning, "find_starts")
    def find_starts(start: Any, end: Any) -> Any:
        return planning.ends(start)


@bug(
    "Spark",
    PLANNING + "test_pieces_cover_everything_once_in_order_and_are_small",
    "assert offsets == [(r.partition.queue, offset) for r in whole for offset in range(r.start,",
)
def cut_ranges_that_overlap(plant: Plant) -> None:
    real = planning.cut

    @plant.instead(planning, "cut")
    def cut(found: Any, rows: int) -> Any:
        return [OffsetRange(one.partition, max(one.start - 1, 0), one.end) for one in real(found, rows)]


@bug(
    "Spark",
    PLANNING + "test_a_limited_batch_takes_no_more_than_it_may_and_starves_nobody_for_ever",
    "assert all(taken[name] for name in at if end[name] > at[name])",
)
def take_the_whole_limit_from_the_first_queue(plant: Plant) -> None:
    real = planning.limit_rows

    @plant.instead(planning, "limit_rows")
    def limit_rows(start: Any, end: Any, rows: Any) -> Any:
        full = real(start, end, None)
        if rows is None:
            return full
        found, left = dict(start), rows
        for name in sorted(end):
            found[name] = min(full[name], start[name] + left)
            left -= found[name] - start[name]
        return found


@bug(
    "Spark",
    PLANNING + "test_a_queue_that_came_since_is_read_from_its_first_message",
    "assert found == [OffsetRange(there[1], 2, 4)]",
)
def begin_a_new_queue_at_its_end(plant: Plant) -> None:
    real = planning.ranges

    @plant.instead(planning, "ranges")
    def ranges(partitions: Any, start: Any, end: Any) -> Any:
        return real(partitions, {**end, **start}, end)


@bug("Spark", PLANNING + "test_offsets_of_another_cluster_are_refused", "DID NOT RAISE")
def begin_anew_with_the_checkpoint_of_another_cluster(plant: Plant) -> None:
    real = planning.ranges

    @plant.instead(planning, "ranges")
    def ranges(partitions: Any, start: Any, end: Any) -> Any:
        names = {partition.name for partition in partitions}
        return real(partitions, start, {name: at for name, at in end.items() if name in names})


@bug(
    "Spark",
    OPTIONS + "test_filters_become_those_of_the_request_to_the_broker",
    'assert filters(topic="%acks", group="g") == {"group": "g"}',
)
def read_the_rows_of_all_groups(plant: Plant) -> None:
    real = options.ReadOptions.filters.fget

    @plant.instead(options.ReadOptions, "filters")
    def filters(self: Any) -> Any:
        return real(replace(self, group=None))


@bug(
    "Spark",
    OPTIONS + "test_start_and_end_by_time_are_filters_of_a_view_and_offsets_of_a_topic",
    'assert filters(topic="%half", start=noon, end=last) == both',
)
def read_all_of_a_view_whatever_its_start(plant: Plant) -> None:
    real = options.ReadOptions.filters.fget

    @plant.instead(options.ReadOptions, "filters")
    def filters(self: Any) -> Any:
        return real(replace(self, start=options.EARLIEST, end=options.LATEST))


@bug(
    "Spark",
    COLUMNS + "test_a_wire_batch_in_spark_s_types",
    'assert made.to_pylist()[0] == {"stored": NOON, "shard": 42, "state": None, "transaction_id',
)
def call_a_plain_message_committed(plant: Plant) -> None:
    real = columns.as_spark

    @plant.instead(columns, "as_spark")
    def as_spark(batch: Any, chosen: Any, shard: int, schema: Any) -> Any:
        made = real(batch, chosen, shard, schema)
        at = schema.get_field_index("state")
        return made.set_column(at, schema.field(at), columns.pa.array(["committed"] * made.num_rows))
