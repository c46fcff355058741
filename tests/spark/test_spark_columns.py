"""The columns of each source, without a JVM."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from escrowmq.errors import Misuse
from escrowmq.schemas import ACK_VIEW, DELIVERY, GROUP_ACT_VIEW, HALF_VIEW, OP_VIEW
from escrowmq.spark.columns import as_spark, choose, columns_of, spark_schema, wire_columns
from escrowmq.wire import DAMAGED_COLUMN

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = 1_769_860_800_000_000


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
