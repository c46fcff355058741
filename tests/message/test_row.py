"""A single message on its way out: what its row says, and what is refused whatever was sent before."""

from __future__ import annotations

import enum
import os

import pytest

import escrowmq as mq
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker, MessageIds


def test_a_row_is_read_by_name():
    message = mq.Message("t", bytearray(b"b"), "k", "g", {"a": "b"}, 1.5, 2.5, 3, "order-17")
    row = Checker(Limits()).message(message, b"x" * 16)
    assert row._replace(born_us=0)._asdict() == {
        "topic": "t",
        "body": b"b",
        "key": "k",
        "tag": "g",
        "properties": [("a", "b")],
        "message_id": mq.model.message_id("order-17"),
        "queue": 3,
        "born_us": 0,
        "delay_us": 1_500_000,
        "immunity_us": 2_500_000,
        "transaction": b"x" * 16,
    }
    assert tuple(row._fields) != tuple(mq.schemas.OUTGOING.names)  # the codec puts them in order
    assert set(row._fields) == set(mq.schemas.OUTGOING.names)


class Topic(enum.StrEnum):
    ORDERS = "orders"


def test_a_topic_that_is_no_plain_text_is_refused_whatever_was_sent_before():
    checker = Checker(Limits())
    for _ in range(2):
        with pytest.raises(mq.Rejected, match="BAD_TOPIC_NAME"):
            checker.message(mq.Message(Topic.ORDERS, b""))
        checker.message(mq.Message("orders", b""))


def in_a_child(act):
    """What ``act`` gives in a forked child, 16 bytes."""
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        os.write(write, act())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 16)
    os.close(read)
    os.close(write)
    return theirs


def test_a_forked_child_begins_a_series_of_ids_of_its_own():
    """Two processes that count one series would give two messages one id, and the second would be taken for a
    repeat."""
    ids = MessageIds()
    before = ids.take(1).tobytes()
    with ids._lock:  # another thread is at it in this very moment
        theirs = in_a_child(lambda: ids.take(1).tobytes())
    ours = ids.take(1).tobytes()
    assert before[:8] == ours[:8] != theirs[:8]
