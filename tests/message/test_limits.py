"""Limits: the check of a row and the check of columns are one rule."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq.message.limits import Limits, byte_lengths, common_text, property_lengths, refusals
from escrowmq.message.row import Checker
from escrowmq.schemas import OUTGOING, PROPERTIES
from escrowmq.settings import BrokerSettings

SMALL = Limits(
    max_body_bytes=4,
    max_key_bytes=4,
    max_tag_bytes=3,
    max_properties_bytes=6,
    max_delay_us=2_000_000,
    half_retention_us=3_000_000,
)

texts = st.text(st.sampled_from("aé€𐍈"), max_size=5)
messages = st.builds(
    mq.Message,
    topic=st.just("t"),
    body=st.binary(max_size=5),
    key=st.none() | texts,
    tag=st.none() | texts,
    properties=st.none() | st.dictionaries(texts, texts, max_size=3),
    delay=st.sampled_from([0, 0.0, 2, 2.000001, 3, -0.000001]),
    check_immunity=st.none() | st.sampled_from([0, 3, 3.000001, 4.5, -1]),
)


def code_of(message: mq.Message) -> Code:
    try:
        Checker(SMALL).row(*(getattr(message, name) for name in ROW), None)
    except mq.Rejected as refused:
        return refused.code
    return Code.OK


ROW = ("topic", "body", "key", "tag", "properties", "delay", "queue", "message_id", "check_immunity")


def as_columns(given_messages: list[mq.Message]) -> pa.RecordBatch:
    """The messages as somebody who checks nothing would send them."""
    rows = [
        {
            "topic": m.topic,
            "body": m.body,
            "key": m.key,
            "tag": m.tag,
            "properties": None if m.properties is None else list(m.properties.items()),
            "message_id": bytes(16),
            "queue": -1,
            "born_us": 0,
            "delay_us": round(m.delay * 1e6),
            "immunity_us": round((m.check_immunity or 0) * 1e6),
            "transaction": None,
        }
        for m in given_messages
    ]
    return pa.RecordBatch.from_pylist(rows, schema=OUTGOING)


@pytest.mark.invariant("I46")
@given(st.lists(messages, min_size=1, max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_rows_and_columns_are_held_to_the_same_limits(given_messages, front, back):
    other = mq.Message("t", b"xxxxx", key="k", tag="t", properties={"a": "b"})
    batch = as_columns([other] * front + given_messages + [other] * back).slice(front, len(given_messages))
    assert refusals(batch, SMALL).tolist() == [code_of(message) for message in given_messages]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_columns_without_any_content_are_within_limits(rows):
    batch = as_columns([mq.Message("t", b"")] * rows)
    assert refusals(batch, SMALL).tolist() == [Code.OK] * rows


@given(st.lists(st.none() | st.text(max_size=6)), st.integers(0, 3), st.integers(0, 3))
def test_lengths_of_slices(texts, front, back):
    column = pa.array(["x"] * front + texts + ["y"] * back, pa.utf8()).slice(front, len(texts))
    assert byte_lengths(column).tolist() == [len((t or "").encode()) for t in texts]
    maps = [None if t is None else [(t, "v"), ("", t)] for t in texts]
    padded = pa.array([[("x", "x")]] * front + maps + [None] * back, PROPERTIES).slice(front, len(texts))
    assert property_lengths(padded).tolist() == [0 if t is None else 2 * len(t.encode()) + 1 for t in texts]


def empty_maps(rows: int) -> pa.MapArray:
    """Properties as other Arrow libraries write them: children without rows have no offsets at all, not even a first
    0."""
    none = pa.Array.from_buffers(pa.utf8(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    return pa.MapArray.from_arrays(pa.array([0] * (rows + 1), pa.int32()), none, none)


def test_empty_properties_without_offsets_have_no_length():
    assert property_lengths(empty_maps(2)).tolist() == [0, 0]
    assert byte_lengths(empty_maps(2).keys).tolist() == []


def test_limits_are_those_of_the_settings():
    settings = {"max_body_bytes": 7, "max_delay": 0.5, "half_retention": 60, "max_tags": 3, "max_key_bytes": None}
    assert Limits.of(settings) == Limits(max_body_bytes=7, max_delay_us=500_000, half_retention_us=60_000_000)
    assert Limits.of({}) == Limits()
    table = BrokerSettings()
    assert Limits.of({name: getattr(table, name) for name in table.__slots__}) == Limits(
        half_retention_us=round(table.half_retention * 1e6)
    )


def outcome_of_rows(made) -> object:
    try:
        return [row[:7] + row[8:] for row in made()]  # but for when they were born
    except mq.EscrowError as problem:
        return type(problem), problem.code, problem.message


@given(st.lists(messages | st.just("no message"), max_size=4))
def test_many_rows_are_those_of_one_after_the_other(given_messages: list[mq.Message]) -> None:
    many, one = Checker(SMALL), Checker(SMALL)
    for _ in range(2):  # the second time topics are known
        expected = outcome_of_rows(lambda: [tuple(one.message(message)) for message in given_messages])
        assert outcome_of_rows(lambda: many.rows(given_messages)) == expected


@given(st.lists(st.sampled_from(["", "a", "ab", "b", "é", "x" * 300]) | st.none(), max_size=4), st.integers(0, 2))
def test_the_text_that_every_row_has(values, start):
    column = pa.array(values, pa.utf8()).slice(start)
    values = values[start:]
    alike = len(set(values)) == 1 and values[0] is not None and 0 < len(values[0].encode()) <= 256
    assert common_text(column) == (values[0] if alike else None)
