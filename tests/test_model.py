"""Values that users hold: ids that can be printed, sent and read back, and message ids of any shape."""

import hashlib
import uuid

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from escrowmq import schemas
from escrowmq.errors import Code, Misuse
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Message, Outcome, Receipt, TransactionId, TransactionResult
from escrowmq.model import message_id as make_id

uint32 = st.integers(0, 2**32 - 1)
ids = st.builds(TransactionId, uint32, uint32, st.integers(0, 2**63 - 1))


@given(ids)
def test_a_transaction_id_survives_print_and_bytes(identity: TransactionId) -> None:
    assert TransactionId.parse(str(identity)) == identity
    assert TransactionId.from_bytes(bytes(identity)) == identity


@given(ids)
def test_the_bytes_of_an_id_read_as_the_schema_says(identity: TransactionId) -> None:
    record = np.frombuffer(bytes(identity), schemas.TRANSACTION_ID_DTYPE)[0]
    assert (record["shard"], record["epoch"], record["position"]) == (
        identity.shard,
        identity.epoch,
        identity.position,
    )


@given(ids, ids)
def test_ids_order_as_their_bytes_do(one: TransactionId, other: TransactionId) -> None:
    assert (one < other) == (bytes(one) < bytes(other))


@pytest.mark.parametrize(
    "text", ["", "1-2", "1-2-3-4", "x-1-2", "1-2-", "-1-2-3", "1ffffffff-1-1", "0-0-1ffffffffffffffff"]
)
def test_what_is_no_transaction_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Misuse) as caught:
        TransactionId.parse(text)
    assert caught.value.code is Code.BAD_ARGUMENT
    assert "9f3a01c2-3-2a" in caught.value.hint


@given(st.binary(max_size=40))
def test_ids_have_sixteen_bytes(raw: bytes) -> None:
    assume(len(raw) != 16)
    with pytest.raises(Misuse):
        TransactionId.from_bytes(raw)


@given(st.binary(min_size=16, max_size=16))
def test_sixteen_bytes_uuids_and_hexadecimal_stand_for_themselves(raw: bytes) -> None:
    assert make_id(raw) == raw
    assert make_id(uuid.UUID(bytes=raw)) == raw
    assert make_id(raw.hex()) == raw
    assert make_id(raw.hex().upper()) == raw


@given(st.text(max_size=60))
def test_any_other_text_is_digested_the_same_way_every_time(text: str) -> None:
    assume(len(text) != 32 or not all(c in "0123456789abcdefABCDEF" for c in text))
    expected = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if len(text) == 32:
        try:
            bytes.fromhex(text)
            return  # spaces are allowed between digits
        except ValueError:
            pass
    assert make_id(text) == make_id(text) == expected


def test_a_text_of_sixteen_characters_is_no_raw_id() -> None:
    assert make_id("order-0000000017") != b"order-0000000017"


@pytest.mark.parametrize("value", [7, None, 1.5, ["a"], [1] * 16, "\ud800"])
def test_what_is_no_message_id_is_misuse(value: object) -> None:
    with pytest.raises(Misuse, match="message_id is"):
        make_id(value)  # type: ignore[arg-type]


def test_the_three_outcomes() -> None:
    assert (COMMIT, ROLLBACK, UNKNOWN) == (Outcome.COMMIT, Outcome.ROLLBACK, Outcome.UNKNOWN)
    assert UNKNOWN == 0, "nothing said means unknown"


def test_values_cannot_be_changed() -> None:
    message = Message("orders", b"body")
    with pytest.raises(AttributeError):
        message.topic = "other"  # type: ignore[misc]
    assert message.queue is None
    assert message.delay == 0.0


def test_a_result_names_its_transaction() -> None:
    identity = TransactionId(1, 2, 3)
    receipt = Receipt(b"i" * 16, "orders", 0, 3, transaction_id=identity)
    assert TransactionResult(receipt, COMMIT, Code.COMMITTED).transaction_id == identity
