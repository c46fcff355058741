"""Offsets and planning, without a JVM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.spark.planning import (
    OffsetRange,
    TopicPartition,
    add_beginnings,
    add_skipped,
    cut,
    ends,
    find_starts,
    first_offsets,
    known_start,
    last_offsets,
    limit_bytes,
    limit_rows,
    ranges,
    skip_purged,
)


def partition(queue=0, head=0, end=10, source="t", shard=42, **more):
    return TopicPartition(source, shard, queue, "escrow://127.0.0.1:7700", head, end, **more)


partitions = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(0, 60)), unique_by=lambda row: row[0], max_size=8
).map(lambda rows: [partition(queue, head, head + size) for queue, head, size in rows])


def test_a_partition_is_named_by_topic_shard_and_queue():
    assert partition(3).name == "t/0000002a/3"


def test_earliest_latest_times_and_offsets():
    there = [partition(0, 5, 10, start_at=6, end_at=8), partition(1, 0, 3, start_at=1, end_at=2)]
    assert first_offsets(there, "earliest") == {"t/0000002a/0": 5, "t/0000002a/1": 0}
    assert last_offsets(there, "latest") == {"t/0000002a/0": 10, "t/0000002a/1": 3}
    assert first_offsets(there, 1_000) == {"t/0000002a/0": 6, "t/0000002a/1": 1}
    assert last_offsets(there, 1_000) == {"t/0000002a/0": 8, "t/0000002a/1": 2}
    assert first_offsets(there, {"t/0000002a/1": 2}) == {"t/0000002a/0": 5, "t/0000002a/1": 2}
    with pytest.raises(Misuse, match="there is no 'u/0/0'"):
        first_offsets(there, {"u/0/0": 1})


def test_a_range_that_left_the_log_raises_and_never_gives_fewer_rows():
    with pytest.raises(Rejected) as purged:
        ranges([partition(0, 5, 10)], {"t/0000002a/0": 4}, {"t/0000002a/0": 10})
    assert purged.value.code is Code.RANGE_PURGED
    assert ranges([partition(0, 5, 10)], {"t/0000002a/0": 4}, {"t/0000002a/0": 4}) == []


def test_a_topic_that_was_made_again_is_not_read_on_from_a_checkpoint_of_the_old_one():
    """Its queues begin one behind the old ends: also a query that had read everything is told, before anything is
    sent."""
    old, new = partition(end=10), partition(head=11, end=11)
    read = {old.name: old.end}
    with pytest.raises(Rejected) as purged:
        ranges([new], known_start(read, [new]), last_offsets([new], "latest"))
    assert purged.value.code is Code.RANGE_PURGED


def test_offsets_of_another_cluster_are_refused():
    with pytest.raises(Misuse, match="another cluster"):
        ranges([partition(0)], {"t/0000002b/0": 0}, {"t/0000002b/0": 5})
    with pytest.raises(Misuse, match="another data folder"):
        ranges([partition(0, 0, 10)], {"t/0000002a/0": 0}, {"t/0000002a/0": 11})


def test_a_queue_that_came_since_is_read_from_its_first_message():
    there = [partition(0, 0, 4), partition(1, 2, 4)]
    found = ranges(there, {"t/0000002a/0": 4}, {"t/0000002a/0": 4, "t/0000002a/1": 4})
    assert found == [OffsetRange(there[1], 2, 4)]
    assert known_start({"t/0000002a/0": 4}, there) == {"t/0000002a/0": 4, "t/0000002a/1": 2}
    with pytest.raises(Misuse, match="another cluster"):
        known_start({"t/0000002b/0": 4}, there)


@pytest.mark.invariant("I41")
def test_a_batch_that_runs_again_begins_where_its_end_noted_and_says_if_that_has_left_the_log():
    end = add_beginnings({"t/0000002a/0": 9}, {"t/0000002a/0": 4})
    assert ends(end) == {"t/0000002a/0": 9}
    assert ranges([partition(0, 2, 20)], find_starts({}, end), ends(end)) == [OffsetRange(partition(0, 2, 20), 4, 9)]
    with pytest.raises(Rejected) as purged:
        ranges([partition(0, 5, 20)], find_starts({}, end), ends(end))
    assert purged.value.code is Code.RANGE_PURGED


def test_what_a_batch_before_has_read_counts_more_than_a_note():
    end = add_beginnings({"t/0000002a/0": 9}, {"t/0000002a/0": 4})
    assert find_starts(end, end) == ends(end)
    later = add_beginnings({"t/0000002a/0": 9, "t/0000002a/1": 5}, {"t/0000002a/1": 2})
    assert find_starts(end, later) == {"t/0000002a/0": 9, "t/0000002a/1": 2}


@given(partitions, st.integers(1, 20))
def test_pieces_cover_everything_once_in_order_and_are_small(there, rows):
    whole = ranges(there, first_offsets(there, "earliest"), last_offsets(there, "latest"))
    pieces = cut(whole, rows)
    offsets = [(piece.partition.queue, offset) for piece in pieces for offset in range(piece.start, piece.end)]
    assert offsets == [(r.partition.queue, offset) for r in whole for offset in range(r.start, r.end)]
    assert all(0 < piece.end - piece.start <= rows for piece in pieces)
    assert pieces == cut(whole, rows)


@given(partitions, st.integers(1, 200))
def test_a_limited_batch_takes_no_more_than_it_may_and_starves_nobody_for_ever(there, rows):
    start, end = first_offsets(there, "earliest"), last_offsets(there, "latest")
    at, rounds = dict(start), 0
    while at != end:
        following = limit_rows(at, end, rows)
        taken = {name: following[name] - at[name] for name in at}
        assert sum(taken.values()) == min(rows, sum(end[name] - at[name] for name in at))
        assert all(at[name] <= following[name] <= end[name] for name in at)
        if rows >= sum(1 for name in at if end[name] > at[name]):
            assert all(taken[name] for name in at if end[name] > at[name])
        at, rounds = following, rounds + 1
    assert rounds <= sum(end[name] - start[name] for name in start)


@given(partitions)
def test_without_a_limit_everything_is_taken(there):
    end = last_offsets(there, "latest")
    assert limit_rows(first_offsets(there, "earliest"), end, None) == end


def test_purged_offsets_are_skipped_counted_and_named():
    there = [partition(0, 5, 10), partition(1, 8, 8), partition(2, 0, 4), partition(3, 7, 9)]
    names = [one.name for one in there]
    start, gone = skip_purged(there, {names[0]: 2, names[1]: 3, names[2]: 1}, dict.fromkeys(names[:3], 10))
    assert start == {names[0]: 5, names[1]: 8, names[2]: 1}
    assert [(one.partition.queue, one.start, one.end) for one in gone] == [(0, 2, 5), (1, 3, 8)]
    end = add_skipped({names[0]: 9, names[1]: 8}, gone, {" skipped": 100})
    assert end == {names[0]: 9, names[1]: 8, names[0] + " skipped 2": 5, names[1] + " skipped 3": 8, " skipped": 108}
    assert ends(end) == {names[0]: 9, names[1]: 8}


def test_a_range_that_is_purged_beyond_its_end_is_skipped_to_its_end():
    start, gone = skip_purged([partition(0, 9, 12)], {"t/0000002a/0": 2}, {"t/0000002a/0": 6})
    assert start == {"t/0000002a/0": 6}
    assert [(one.start, one.end) for one in gone] == [(2, 6)]


def test_a_batch_begins_behind_what_it_skips():
    end = add_beginnings({"t/0000002a/0": 9}, {"t/0000002a/0": 4})
    assert find_starts({"t/0000002a/0": 2}, end) == {"t/0000002a/0": 4}


def test_a_query_that_found_no_partition_has_begun():
    end = add_beginnings({}, {})
    assert end
    assert ends(end) == {}


@given(partitions, st.integers(1, 400), st.data())
def test_a_batch_has_at_most_the_bytes_that_it_may_or_one_message(there, most, data):
    """And it moves on, whatever the sizes are, until all is read: each offset once, in order."""
    sizes = {one.name: data.draw(st.lists(st.integers(0, 90), min_size=60, max_size=60)) for one in there}

    def fit(wanted, bytes):
        used = 0
        for offset in range(wanted.start, wanted.end):
            if used + sizes[wanted.partition.name][offset - wanted.partition.head] > bytes:
                return offset, used
            used += sizes[wanted.partition.name][offset - wanted.partition.head]
        return wanted.end, used

    at, end = first_offsets(there, "earliest"), last_offsets(there, "latest")
    while found := ranges(there, at, end):
        reached = limit_bytes(found, most, fit)
        read = ranges(there, at, reached)
        total = sum(
            sizes[one.partition.name][offset - one.partition.head]
            for one in read
            for offset in range(one.start, one.end)
        )
        assert sum(one.end - one.start for one in read) == 1 or (read and total <= most)
        at = at | reached
    assert at == end
