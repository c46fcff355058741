"""What an ordered consumer withdraws from its buffers, over the twin (which knows nothing of order: all is the client's
doing).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.consuming import order, received
from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.order import Order
from escrowmq.model import Act
from escrowmq.wire import Exchange


def fill(bus: Any, keys: str) -> None:
    bus.producer("p").send_batch([mq.Message("t", f"{n}".encode(), key=key) for n, key in enumerate(keys)])


def settled(twin: Any, act: Act) -> list[tuple[int, int]]:
    """First offset and count of each run that was settled in this way."""
    rows = [row for batch in twin.seen(Exchange.SETTLE) for row in batch.to_pylist()]
    return [(row["start"], row["count"]) for row in rows if row["act"] == act]


def names(messages: Any) -> list[str]:
    return [message.body.decode() for message in messages]


@pytest.mark.invariant("I20")
def test_a_nack_that_never_arrives_withdraws_all_the_same(twin, bus):
    fill(bus, "abaab")
    consumer = bus.consumer("c", ["t"], ordered=True)
    stream = consumer.messages(idle_timeout=0.5)
    first = next(stream)
    twin.hold(Exchange.RECEIVE)
    twin.refuse(Exchange.SETTLE, mq.Unknown(mq.Code.TIMED_OUT))
    first.nack()
    assert names(stream) == ["1", "4"]


@pytest.mark.invariant("I20")
def test_no_run_of_acks_spans_what_was_withdrawn(twin, bus):
    """Its nack may be lost; then it would be acknowledged and never have been handed out."""
    fill(bus, "abaab")
    consumer = bus.consumer("c", ["t"], ordered=True)
    stream = consumer.messages(idle_timeout=0.5)
    first = next(stream)
    twin.hold(Exchange.RECEIVE)
    first.nack()
    for message in stream:
        message.ack()
    consumer.flush()
    assert settled(twin, Act.ACK) == [(1, 1), (4, 1)]


def test_nor_does_a_batch(twin, bus):
    fill(bus, "abaabc")
    consumer = bus.consumer("c", ["t"], ordered=True)
    consumer._consumption.fetcher.start(6)  # one lease, handed out as several batches
    batches = consumer.batches(2, idle_timeout=0.5)
    one = next(batches)
    twin.hold(Exchange.RECEIVE)
    one[0].nack()
    one[1].ack()
    [rest] = batches
    assert names(rest) == ["4", "5"]
    rest.ack()
    consumer.flush()
    assert settled(twin, Act.ACK) == [(1, 1), (4, 2)]


def test_an_ack_that_came_too_late_withdraws_the_rest_of_its_lease_and_gives_it_back(twin, bus):
    fill(bus, "abab")
    consumer = bus.consumer("c", ["t"], ordered=True)
    stream = consumer.messages(idle_timeout=0.5)
    first = next(stream)
    for key in [key for key in twin._leased if key[2] == 0]:
        del twin._leased[key]
    first.ack()
    assert consumer.flush() == 1
    assert [(message.body, message.attempt) for message in stream] == [(b"1", 1), (b"2", 1), (b"3", 1)], "a new lease"
    assert settled(twin, Act.RELEASE) == [(1, 3)]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_was_passed_over_at_the_end_of_its_lease_is_not_revived_by_an_extension(
    twin, bus, one_by_one, monkeypatch
):
    """A broker that stood still at that moment may take the extension, and would take the acknowledgement, too."""
    now = [100.0]
    for module in (order, received):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fill(bus, "aab")
    consumer = bus.consumer("c", ["t"], ordered=True, lease=3600.0)
    batch = next(consumer.batches(idle_timeout=0.5))
    twin.hold(Exchange.RECEIVE)
    assert names(batch) == ["0", "1", "2"]
    now[0] += 3600.0
    assert names(batch) == []
    with pytest.raises(mq.Rejected) as refused:
        (batch[0] if one_by_one else batch).extend(60.0)
    assert refused.value.code is mq.Code.LEASE_LOST
    if one_by_one:
        for message in (batch[0], batch[1]):
            message.ack()
        assert consumer.flush() == 2
    else:
        with pytest.raises(mq.Rejected):
            batch.ack()
    assert names(batch) == [] == settled(twin, Act.ACK)


def test_without_order_everything_is_handed_out(twin, bus):
    fill(bus, "aaa")
    consumer = bus.consumer("c", ["t"])
    twin.hold(Exchange.SETTLE)
    stream = consumer.messages(idle_timeout=0.5)
    next(stream).nack()
    assert names(stream) == ["1", "2"]
    twin.release(Exchange.SETTLE)


def test_acts_on_what_was_withdrawn_are_refused_here(twin, bus):
    fill(bus, "aab")
    consumer = bus.consumer("c", ["t"], ordered=True)
    one, two, other = consumer.receive(3)
    one.nack(delay=0)
    two.ack()
    other.ack()
    assert consumer.flush() == 1
    assert settled(twin, Act.ACK) == [(2, 1)]
    assert (one.withdrawn, two.withdrawn, other.withdrawn) == (False, True, False)


# The bookkeeping alone


def rows(lease: int, keys: str, first: int = 0) -> Rows:
    nothing = {field.name: None for field in schemas.DELIVERY}
    listed = [
        {**nothing, "lease": lease, "offset": first + n, "key": None if key == "-" else key, "topic": "t", "body": b""}
        | {"message_id": bytes(16), "queue": 0, "born_us": 0, "stored_us": 0, "position": 0, "attempt": 1}
        for n, key in enumerate(keys)
    ]
    return Rows(0, pa.RecordBatch.from_pylist(listed, schema=schemas.DELIVERY))


def withdrawn(known: Order, found: Rows) -> str:
    answer = known.find_withdrawn(found)
    return "".join(".x"[row] for row in (answer.tolist() if answer is not None else [False] * found.count))


def test_one_lease_one_key_and_what_is_later():
    known = Order(None)
    known.fail(0, 1, 2, "a")
    known.fail(0, 1, 5, "a")
    assert withdrawn(known, rows(1, "aaaab")) == "...x."
    assert withdrawn(known, rows(2, "aaaab")) == "....."
    assert withdrawn(known, rows(1, "ba", first=9)) == ".x", "what was still on its way"


def test_messages_without_a_key_are_one_key():
    known = Order(None)
    known.fail(0, 1, 0, None)
    assert withdrawn(known, rows(1, "--a-")) == ".x.x"


def test_a_whole_batch_that_failed():
    known = Order(None)
    known.fail_all(rows(1, "ab"))
    assert withdrawn(known, rows(1, "abc", first=2)) == "xx."


def test_a_lease_ends_by_this_process_clock_unless_it_is_extended(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(order.time, "monotonic", lambda: now[0])
    known = Order(10.0)
    known.add(0, rows(1, "ab").batch)
    known.add(0, rows(2, "ab").batch)
    now[0] = 105.0
    known.add(0, rows(1, "cd", first=2).batch)  # the rest of the lease: it began with its first messages
    known.extend(0, [2], 20.0)
    now[0] = 110.0
    assert withdrawn(known, rows(1, "abcd")) == "xxxx"
    assert withdrawn(known, rows(2, "ab")) == ".."
    now[0] = 125.0
    assert withdrawn(known, rows(2, "ab")) == "xx"


def test_an_extension_that_is_answered_after_the_end_keeps_what_nobody_was_told_is_withdrawn(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(order.time, "monotonic", lambda: now[0])
    known = Order(10.0)
    for lease in (1, 2):
        known.add(0, rows(lease, "ab").batch)
    now[0] = 111.0
    assert withdrawn(known, rows(1, "ab")) == "xx"
    known.extend(0, [1, 2], 20.0)
    assert withdrawn(known, rows(1, "ab")) == "xx", "it was passed over"
    assert withdrawn(known, rows(2, "ab")) == ".."


def test_leases_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(order, "REMEMBERED", 3)
    known = Order(1.0)
    for lease in range(10):
        known.add(0, rows(lease, "a").batch)
        known.fail(0, lease, 0, "a")
        known.lose(0, lease, 0)
    assert len(known._ends) == len(known._failed) == len(known._lost) == 3


@pytest.mark.parametrize("qos", [0, 2])
def test_other_qualities_of_service_keep_the_order(twin, bus, qos):
    fill(bus, "abab")
    seen = (lambda message: message.body == b"2") if qos == 2 else None
    consumer = bus.consumer("c", ["t"], ordered=True, qos=qos, seen=seen)
    assert names(consumer.messages(idle_timeout=0.5)) == (["0", "1", "3"] if qos == 2 else ["0", "1", "2", "3"])


def test_a_batch_is_acknowledged_without_what_was_withdrawn(twin, bus):
    """Whoever iterated it was not handed those; if the nack is lost on its way, the broker would take them for done."""
    fill(bus, "abaab")
    consumer = bus.consumer("c", ["t"], ordered=True)
    batches = consumer.batches(idle_timeout=0.5)
    batch = next(batches)
    twin.hold(Exchange.RECEIVE)
    batch[0].nack()
    batch.ack()
    assert settled(twin, Act.ACK) == [(0, 2), (4, 1)]
    assert consumer.refused == 2
