"""Requests of few rows travel as parcels: which ones do, that they mean what the same batch means, and that what is
sent again is the same.
"""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.bus import Bus
from escrowmq.client.consuming.settling import SettlingCodec
from escrowmq.client.lanes.request import NO_ID, Request
from escrowmq.client.producing.ending import EndingCodec
from escrowmq.client.producing.outgoing import OutgoingCodec
from escrowmq.client.producing.placing import _is_free
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker, row_size
from escrowmq.model import Act
from escrowmq.testing.link import TwinLink
from escrowmq.wire import PARCEL_BYTES, PARCEL_ROWS, Exchange
from escrowmq.wire.parcels import Parcel, answer_of, batch_of


class Parcels(TwinLink):
    """A twin that keeps what came to it as a parcel, and may answer wrongly."""

    def __init__(self):
        super().__init__()
        self.parcels = []
        self.wrong = []

    def parcel(self, parcel, done):
        self.parcels.append(parcel)
        if self.wrong:
            done(self.wrong.pop())
        else:
            super().parcel(parcel, done)

    def parcels_of(self, kind):
        return [parcel for parcel in self.parcels if parcel.kind is kind]


@pytest.fixture
def twin():
    return Parcels()


def row_of(body=b"x", **more):
    return Checker(Limits()).message(mq.Message("t", body, **more))


def test_single_calls_travel_as_parcels_and_batches_as_batches(twin, bus):
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
    with producer.transaction() as txn:
        txn.send("orders", b"x", key="k")
    producer.prepare_batch([mq.Message("orders", b"y")])
    assert [(parcel.kind, len(parcel.rows)) for parcel in twin.parcels] == [(Exchange.PREPARE, 1), (Exchange.END, 1)]
    assert len(twin.seen(Exchange.PREPARE)) == 2


def test_large_bodies_travel_as_batches(twin, bus):
    producer = bus.producer("p")
    receipt = producer.send("orders", b"x" * (PARCEL_BYTES + 1))
    assert twin.parcels == []
    assert twin.topics["orders"][0]["message_id"] == receipt.message_id


def test_many_rows_travel_as_a_batch(twin, bus, eventually):
    producer = bus.producer("p", qos=0)
    producer.send("orders", b"first")
    twin.hold(Exchange.SEND)
    for number in range(8 * PARCEL_ROWS):
        producer.send("orders", b"%d" % number)
    lane = producer._production.lane(Exchange.SEND, 0)
    twin.release(Exchange.SEND)
    eventually(lambda: lane.drain(0.0))
    assert max(len(parcel.rows) for parcel in twin.parcels) <= PARCEL_ROWS
    assert max(batch.num_rows for batch in twin.seen(Exchange.SEND)) > PARCEL_ROWS
    assert len(twin.topics["orders"]) == 8 * PARCEL_ROWS + 1


def test_what_is_sent_again_is_the_same_parcel(twin, bus):
    producer = bus.producer("p")
    twin.lose(Exchange.SEND, applied=True, times=2)
    receipt = producer.send("orders", b"x")
    first, *again = twin.parcels
    assert len(again) == 2
    assert all(parcel is first for parcel in again)
    assert receipt.message_id == batch_of(first).column("message_id")[0].as_py()


def test_under_a_new_session_the_rows_and_their_ids_are_the_same(twin, bus):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin.forget()
    receipt = producer.send("orders", b"1")
    _, refused, taken = twin.parcels
    assert refused.options != taken.options
    assert (refused.rows, refused.first_id) == (taken.rows, taken.first_id)
    assert twin.topics["orders"][1]["message_id"] == receipt.message_id


@pytest.mark.parametrize("wrong", [[], [(0, 1, 0, 1, None)] * 2, b""])
def test_an_answer_of_another_length_is_no_answer(twin, bus, hurried, wrong):
    producer = bus.producer("p")
    producer.send("orders", b"0")
    twin.wrong.append(wrong)
    with hurried(producer, 0.2), pytest.raises(mq.Unknown, match="does not match") as raised:
        producer.send("orders", b"1")
    assert raised.value.message_id == batch_of(twin.parcels[-1]).column("message_id")[0].as_py()


def test_a_link_that_refuses_gives_the_caller_its_error(twin, bus):
    producer = bus.producer("p")
    twin.wrong.append(mq.Overloaded(mq.Code.QUEUE_FULL, retry_after=7.0))
    with pytest.raises(mq.Overloaded) as raised:
        producer.send("orders", b"x")
    assert raised.value.retry_after == 7.0
    assert producer.send("orders", b"y").offset == 0


def test_an_answer_after_the_deadline_changes_nothing(twin, hurried):
    late = []
    with Bus([twin]) as bus:
        producer = bus.producer("p")
        producer.send("t", b"0")
        answered, twin.parcel = twin.parcel, lambda parcel, done: late.append((parcel, done))
        with hurried(producer), pytest.raises(mq.Unknown, match="TIMED_OUT"):
            producer.send("t", b"1")
        twin.parcel = answered
        ((_, done),) = late
        threads = [threading.Thread(target=done, args=([(0, 5, 0, 5, None)],)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert producer.send("t", b"2").offset == 1


def test_rows_that_go_elsewhere_and_rows_that_stay_keep_their_ids():
    rows = [row_of(b"0"), row_of(b"1", key="k"), row_of(b"2"), row_of(b"3", message_id="mine"), row_of(b"4", key="k")]
    codec = OutgoingCodec()
    request = Request(list(rows), list("abcde"), 1.0, size=sum(map(row_size, rows)))
    request.pack(codec, Exchange.SEND, {"session": 1})
    ids = request.ids
    request.sent = 3
    part = request.take_back(_is_free)
    assert (part.waiters, request.waiters) == (["a", "c"], ["b", "d", "e"])
    assert part.ids == ids[0:16] + ids[32:48]
    assert request.is_parcel
    again = request.pack(codec, Exchange.SEND, {"session": 1})
    assert [row[1] for row in again.rows] == [b"1", b"3", b"4"]
    assert request.ids == ids[16:32] + ids[48:64] + ids[64:80]
    assert b"".join(batch_of(again).column("message_id").to_pylist()) == request.ids


# A parcel and a batch of the same rows mean the same


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 40, 42]), st.booleans()), min_size=1, max_size=8))
def test_receipts_from_a_parcel_are_those_from_a_batch(given_):
    rows, answers = [], []
    for number, (own, code, half) in enumerate(given_):
        rows.append(row_of(b"x", message_id=f"own-{number}" if own else None))
        transaction = bytes(mq.TransactionId(7, 3, number)) if half and not code else None
        where = (-1, -1, -1) if code else (number, 2, -1 if half else number)
        answers.append((code, *where, transaction))
    codec = OutgoingCodec()
    parcel_rows, first_id, memo = codec.parcel(rows)
    parcel = Parcel(Exchange.PREPARE, parcel_rows, {}, first_id)
    answer = pa.RecordBatch.from_pylist(
        [dict(zip(schemas.PRODUCED.names, one, strict=True)) for one in answers], schema=schemas.PRODUCED
    )
    assert answer_of(Exchange.PREPARE, answer) == answers
    ids = b"".join(batch_of(parcel).column("message_id").to_pylist())
    one = codec.receive(rows, first_id, memo, answers, False)
    other = codec.decode(rows, ids, answer, False)
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, mq.EscrowError):
            assert (mine.code, mine.__notes__) == (theirs.code, theirs.__notes__)
        else:
            assert mine == theirs


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 30, 42]), min_size=1, max_size=6), st.booleans())
def test_ends_from_a_parcel_are_those_from_a_batch(codes, resent):
    rows = [(bytes(mq.TransactionId(1, 1, at)), 1) for at in range(len(codes))]
    codec = EndingCodec()
    parcel_rows, first_id, memo = codec.parcel(rows)
    assert first_id == NO_ID
    assert batch_of(Parcel(Exchange.END, parcel_rows, {})).equals(codec.encode(rows)[0])
    answer = pa.RecordBatch.from_pydict({"code": codes}, schema=schemas.ENDED)
    one = codec.receive(rows, first_id, memo, bytes(codes), resent)
    other = codec.decode(rows, None, answer, resent)
    assert [getattr(told, "code", told) for told in one] == [getattr(told, "code", told) for told in other]


acts = st.tuples(
    st.integers(1, 2),
    st.integers(0, 6),
    st.sampled_from([-2, -1]),
    st.sampled_from([Act.ACK, Act.ACK, Act.NACK]),
    st.sampled_from([0, 5]),
    st.sampled_from([None, "why"]),
)


@given(st.lists(acts, min_size=1, max_size=8), st.data())
def test_acts_become_the_same_runs_in_a_parcel_as_in_a_batch(acts, data):
    rows = [
        (lease, offset, offset - 1 if before == -1 else -2, act, delay, cause)
        for lease, offset, before, act, delay, cause in acts
    ]
    codec = SettlingCodec()
    runs, first_id, memo = codec.parcel(rows)
    batch, which = codec.encode(rows)
    assert memo == which.tolist()
    assert batch_of(Parcel(Exchange.SETTLE, runs, {"group": "g"})).equals(batch)
    codes = data.draw(st.lists(st.sampled_from([0, 0, 50]), min_size=len(runs), max_size=len(runs)))
    lost = [int(mq.Code.LEASE_LOST) if code else 0 for code in codes]
    answer = pa.RecordBatch.from_pydict({"code": lost}, schema=schemas.ENDED)
    for resent in (False, True):
        one = codec.receive(rows, first_id, memo, bytes(lost), resent)
        refused, codec.refused = codec.refused, 0
        other = codec.decode(rows, which, answer, resent)
        assert codec.refused == refused
        codec.refused = 0
        assert [getattr(told, "code", told) for told in one] == [getattr(told, "code", told) for told in other]
