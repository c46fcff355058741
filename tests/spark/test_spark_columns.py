"""Columns and filters, without a JVM: filters that are taken are exact, all others go back."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Misuse
from escrowmq.schemas import ACK_VIEW, DELIVERY, GROUP_ACT_VIEW, HALF_VIEW, OP_VIEW
from escrowmq.spark.columns import as_spark, choose, columns_of, spark_schema, wire_columns
from escrowmq.spark.filters import FAR, Pushed, push, pushable
from escrowmq.wire import DAMAGED_COLUMN


@dataclass(frozen=True)
class EqualTo:
    attribute: tuple[str, ...]
    value: Any


class In(EqualTo):
    pass


class GreaterThan(EqualTo):
    pass


class GreaterThanOrEqual(EqualTo):
    pass


class LessThan(EqualTo):
    pass


class LessThanOrEqual(EqualTo):
    pass


@dataclass(frozen=True)
class IsNotNull:
    attribute: tuple[str, ...]


COLUMNS = [column.name for column in columns_of("t")]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = 1_769_860_800_000_000


def test_what_is_exact_is_taken():
    pushed, left = push(
        [
            EqualTo(("key",), "k"),
            In(("tag",), ("a", "b")),
            EqualTo(("queue",), 2),
            GreaterThan(("offset",), 4),
            LessThanOrEqual(("offset",), 9),
            GreaterThanOrEqual(("stored",), NOON),
            LessThanOrEqual(("stored",), NOON),
        ],
        Pushed(),
        COLUMNS,
    )
    assert left == []
    assert pushed == Pushed("k", ("a", "b"), 2, 5, 10, NOON_US, NOON_US + 1)
    assert pushed.request == {
        "key": "k",
        "tags": ["a", "b"],
        "stored_from_us": NOON_US,
        "stored_until_us": NOON_US + 1,
    }


@pytest.mark.parametrize(
    "one",
    [
        IsNotNull(("tag",)),
        EqualTo(("body",), b"x"),
        EqualTo(("properties", "k"), "v"),
        EqualTo(("key",), None),
        EqualTo(("tag",), ""),
        In(("tag",), ()),
        EqualTo(("offset",), 3),
        GreaterThan(("offset",), -1),
        GreaterThanOrEqual(("stored",), datetime(2026, 1, 1)),  # no zone
        GreaterThanOrEqual(("decided",), NOON),  # a column of another source
    ],
)
def test_what_is_not_goes_back_to_spark(one):
    assert push([one], Pushed(), COLUMNS) == (Pushed(), [one])


def test_two_filters_that_exclude_each_other_are_spark_s():
    both = [EqualTo(("key",), "a"), EqualTo(("key",), "b")]
    assert push(both, Pushed(), COLUMNS) == (Pushed(key="a"), [both[1]])
    assert push([EqualTo(("tag",), "z")], Pushed(tags=("a",)), COLUMNS)[1]


def test_filters_of_a_view_are_those_of_its_times_and_groups():
    names = [column.name for column in columns_of("%acks")]
    filters = [EqualTo(("group",), "g"), LessThan(("acked",), NOON), EqualTo(("queue",), 1), EqualTo(("topic",), "t")]
    pushed, left = push(filters, Pushed(), pushable("%acks", names))
    assert pushed == Pushed(group="g", until_us=NOON_US)
    assert pushed.request == {"group": "g", "stored_until_us": NOON_US}
    assert left == filters[2:]
    assert push([EqualTo(("group",), "h")], pushed, names)[1]
    for source in ("%half", "%dead-letters.g"):
        bound = [EqualTo(("queue",), 1), GreaterThan(("offset",), 4)]
        assert push(bound, Pushed(), pushable(source, ["queue", "offset"])) == (Pushed(), bound)
    assert pushable("t", COLUMNS) == COLUMNS


numbers = st.integers(-3, 12)
bounds = st.builds(
    lambda kind, value: kind(("offset",), value),
    st.sampled_from([GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]),
    numbers,
)


@given(st.lists(bounds, max_size=5))
def test_pushed_bounds_and_those_left_keep_what_all_would(filters):
    holds = {
        "GreaterThan": int.__gt__,
        "GreaterThanOrEqual": int.__ge__,
        "LessThan": int.__lt__,
        "LessThanOrEqual": int.__le__,
    }
    pushed, left = push(filters, Pushed(), COLUMNS)
    assert pushed.low >= 0
    assert pushed.high <= FAR
    for offset in range(12):
        wanted = all(holds[type(one).__name__](offset, one.value) for one in filters)
        mine = pushed.low <= offset < pushed.high
        assert wanted == (mine and all(holds[type(one).__name__](offset, one.value) for one in left))


@pytest.mark.parametrize(
    ("source", "wire"),
    [("t", DELIVERY), ("%half", HALF_VIEW), ("%op", OP_VIEW), ("%acks", ACK_VIEW), ("%group-acts", GROUP_ACT_VIEW)],
)
def test_every_column_is_made_of_columns_of_the_wire(source, wire):
    for column in columns_of(source):
        assert set(column.needs) <= {*wire.names, DAMAGED_COLUMN}
    assert wire_columns(source, []) == ["position"]
    assert spark_schema(choose(source, None)).count("`") == 2 * len(columns_of(source))


def test_unknown_columns_and_views_are_named_with_the_nearest():
    with pytest.raises(Misuse, match="did you mean 'offset'"):
        choose("t", ["ofset"])
    with pytest.raises(Misuse, match="named twice"):
        choose("t", ["key", "key"])
    with pytest.raises(Misuse, match="did you mean '%half'"):
        columns_of("%halves")
    with pytest.raises(Misuse, match="did you mean '%acks'"):
        columns_of("%ack")
    with pytest.raises(Misuse, match="there are %half, %op, %acks, %group-acts, %dead-letters"):
        columns_of("%zzzzzz")


def test_a_wire_batch_in_spark_s_types():
    rows = {
        "queue": pa.array([1, 1], pa.int32()),
        "stored_us": pa.array([NOON_US, NOON_US + 1]),
        "transaction": pa.array([None, b"\x2a" + bytes(15)], pa.binary(16)),
    }
    schema = pa.schema(
        [
            ("stored", pa.timestamp("us", "UTC")),
            ("shard", pa.int64()),
            ("state", pa.utf8()),
            ("transaction_id", pa.binary()),
        ]
    )
    chosen = choose("t", schema.names)
    made = as_spark(pa.RecordBatch.from_pydict(rows), chosen, 42, schema)
    assert made.schema == schema
    assert made.to_pylist()[0] == {"stored": NOON, "shard": 42, "state": None, "transaction_id": None}
    assert made.to_pylist()[1]["state"] == "committed"
