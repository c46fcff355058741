"""Rows of messages as columns, and message ids that are given or counted on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq import schemas
from escrowmq.errors import Code, EscrowError
from escrowmq.message.columns import outgoing_batch
from escrowmq.message.ids import fill_ids
from escrowmq.message.row import OutgoingRow
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, Parcel
from escrowmq.wire.parcels import Answer, answer_of, batch_of

ids = st.none() | st.binary(min_size=16, max_size=16)


@given(st.lists(ids, max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_ids_that_are_not_given_count_on(given_: list[bytes | None], instance: int, sequence: int) -> None:
    whole = fill_ids(given_, instance, sequence)
    for row, one in enumerate(given_):
        found = whole[16 * row : 16 * row + 16]
        if one is None:
            assert found == instance.to_bytes(8, "big") + sequence.to_bytes(8, "big")
            sequence += 1
        else:
            assert found == one
    assert len(whole) == 16 * len(given_)


texts = st.none() | st.text(max_size=5)
rows = st.builds(
    OutgoingRow,
    st.text(min_size=1, max_size=5),
    st.binary(max_size=9),
    texts,
    texts,
    st.none() | st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3),
    ids,
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**50),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    ids,
)


@given(st.lists(rows, min_size=1, max_size=9))
def test_rows_are_their_columns(given_: list[OutgoingRow]) -> None:
    whole = fill_ids([row.message_id for row in given_], 7, 1)
    batch = outgoing_batch(given_, whole)
    batch.validate(full=True)
    assert batch.schema.equals(schemas.OUTGOING)
    for name in OutgoingRow._fields:
        column = batch.column(name).to_pylist()
        if name == "message_id":
            assert b"".join(column) == whole
        else:
            assert column == [getattr(row, name) for row in given_]


def test_a_link_of_batches_takes_parcels() -> None:
    link = TwinLink()
    answers: list[Answer | EscrowError] = []
    session = link.action("session.open", {"group": "g", "instance": "i", "transactional": True}, 1.0)["session"]
    row = OutgoingRow("t", b"body", None, None, None, None, -1, 1, 0, 0, None)
    parcel = Parcel(Exchange.PREPARE, [row, row], {"session": session}, (5, 9))
    link.parcel(parcel, answers.append)
    assert link.seen(Exchange.PREPARE)[0].equals(batch_of(parcel))
    (prepared,) = answers
    assert isinstance(prepared, list)
    assert [answer[0] for answer in prepared] == [Code.OK, Code.OK]
    link.parcel(Parcel(Exchange.END, [(prepared[0][4], 1)], {"session": session}), answers.append)
    assert answers[1] == bytes([Code.COMMITTED])
    assert answer_of(Exchange.END, link.requests[-1].future.result()) == answers[1]
