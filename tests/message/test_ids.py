"""Ids as columns, records and values: every form a user gives, slices and nulls, ids that a client makes itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import schemas
from escrowmq.message.ids import column_of, id_column, records, shards, transaction_ids, transactions
from escrowmq.message.row import MessageIds
from escrowmq.message.values import make_receipt, make_transaction_id

IDS = [mq.TransactionId(1, 2, 3), mq.TransactionId(0xFFFFFFFF, 0, 2**63)]

numbers = st.integers(0, 2**32 - 1)
rows = st.lists(st.none() | st.builds(mq.TransactionId, numbers, numbers, st.integers(0, 2**63 - 1)), max_size=8)


@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda ids: [str(one) for one in ids],
        lambda ids: [bytes(one) for one in ids],
        lambda ids: pa.array([bytes(one) for one in ids], pa.binary(16)),
        lambda ids: pa.chunked_array([pa.array([bytes(one)], pa.binary(16)) for one in ids]),
        lambda ids: pa.array([bytes(one) for one in ids], pa.binary()),
        lambda ids: np.frombuffer(b"".join(bytes(one) for one in ids), schemas.TRANSACTION_ID_DTYPE),
    ],
)
def test_ids_in_every_form(form):
    column = id_column(form(IDS))
    assert column.to_pylist() == [bytes(one) for one in IDS]
    assert shards(column).tolist() == [1, 0xFFFFFFFF]
    assert shards(column.slice(1)).tolist() == [0xFFFFFFFF]


@pytest.mark.parametrize("wrong", [None, 7, "1-2-3", IDS[0], [7], ["x"], [b"short"]])
def test_what_is_no_column_of_ids(wrong):
    with pytest.raises(mq.Misuse):
        id_column(wrong)


@given(rows, st.integers(0, 3))
def test_a_slice_of_a_column_reads_as_its_values(given_ids, front):
    padded = pa.array([bytes(IDS[0])] * front + [one and bytes(one) for one in given_ids], pa.binary(16))
    column = padded.slice(front)
    assert [one for one, _ in zip(transactions(column), given_ids, strict=False)] == given_ids
    whole = records(column)
    assert [whole[row]["position"] for row, one in enumerate(given_ids) if one] == [o.position for o in given_ids if o]
    again = column_of(whole, np.array([one is not None for one in given_ids], np.bool_))
    assert again.equals(column)


@given(st.lists(st.tuples(numbers, st.integers(0, 2**63 - 1), st.booleans())), numbers)
def test_columns_of_parts_are_the_printed_ids(parts, shard):
    epochs, positions, valid = (
        np.array([part[n] for part in parts], t) for n, t in enumerate((np.uint32, np.int64, bool))
    )
    made = transaction_ids(shard, epochs, positions, valid)
    made.validate(full=True)
    expected = [bytes(mq.TransactionId(shard, e, p)) for e, p, _ in parts]
    assert made.to_pylist() == [one if there else None for one, (_, _, there) in zip(expected, parts, strict=True)]
    assert transaction_ids(shard, epochs, positions).to_pylist() == expected


def test_made_ids_are_consecutive_and_given_ones_stay_in_their_place():
    ids = MessageIds()
    series = np.frombuffer(ids.take(2).tobytes() + ids.complete([None, b"x" * 16, None]), schemas.MESSAGE_ID_DTYPE)
    assert series["sequence"][[0, 1, 2, 4]].tolist() == [1, 2, 3, 4]
    assert len(set(series["instance"][[0, 1, 2, 4]].tolist())) == 1
    assert bytes(series[3]) == b"x" * 16
    assert ids.take(0).tobytes() == ids.complete([]) == b""
    assert ids.complete([b"y" * 16]) == b"y" * 16


def test_values_made_quickly_are_the_frozen_ones():
    identity = make_transaction_id(1, 2, 3)
    receipt = make_receipt(b"i" * 16, "t", 1, 2, None, identity)
    assert identity == mq.TransactionId(1, 2, 3)
    assert receipt == mq.Receipt(b"i" * 16, "t", 1, 2, None, mq.TransactionId(1, 2, 3))
    assert (hash(receipt), repr(receipt)) == (
        hash(mq.Receipt(b"i" * 16, "t", 1, 2, None, identity)),
        repr(mq.Receipt(b"i" * 16, "t", 1, 2, None, identity)),
    )
    with pytest.raises(AttributeError):
        receipt.topic = "other"
