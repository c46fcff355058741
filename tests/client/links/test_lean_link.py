"""A link over two carriers: which request takes which, in which order, and what becomes of them when one carrier is lost."""

from __future__ import annotations

import socket
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

import pyarrow as pa
import pytest
from lean_broker import GARBAGE, PATIENCE, LeanBroker, TwinFlight, eventually

from escrowmq.client.links import lean as links
from escrowmq.client.links.lean import LeanLink
from escrowmq.errors import Code, EscrowError, Overloaded, Unknown, error
from escrowmq.message.row import OutgoingRow
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, Parcel

NOTHING = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
LARGE = 1 << 16
_ids = iter(range(1, 1 << 40))


def parcel(*bodies, kind=Exchange.SEND, topic="orders"):
    rows = [OutgoingRow(topic, body, None, None, None, None, -1, 0, 0, 0, None) for body in bodies or (b"x",)]
    return Parcel(kind, rows, {}, (7, 1000 * next(_ids)))


def begin(link, given):
    """The future of a parcel's answer."""
    future: Future = Future()

    def done(answer):
        if isinstance(answer, EscrowError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    link.parcel(given, done)
    return future


def send(link, *bodies):
    return begin(link, parcel(*bodies)).result(PATIENCE)


def outcome(answer):
    """The code of its error, None if there is none."""
    problem = answer.exception(PATIENCE)
    return problem and problem.code


def receive(link, member=1, wait_ms=5000, group="g"):
    options = {"group": group, "member": member, "max_messages": 1000, "wait_ms": wait_ms}
    return link.exchange(Exchange.RECEIVE, NOTHING, options)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may need long for what is done at once."""
    monkeypatch.setattr(links, "HOLD_SECONDS", PATIENCE)


@pytest.fixture
def flight():
    return TwinFlight()


@pytest.fixture
def broker(flight):
    made = LeanBroker(flight)
    flight.lean = made.place
    yield made
    made.close()


@pytest.fixture
def link(flight, broker):
    made = LeanLink(flight)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(links, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(links, "LAST_BACKOFF", 0.002)
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.05)


def bodies(flight):
    return [message["body"] for message in flight.topics["orders"]]


# What goes where


def test_small_requests_take_the_lean_carrier_from_the_first(link, broker, flight):
    ((code, _, queue, offset, _),) = send(link, b"x")
    assert (code, queue, offset) == (Code.OK, 0, 0)
    answer = link.exchange(Exchange.SEND, outgoing([{}] * 3), {}).result(PATIENCE)
    assert answer.column("code").to_pylist() == [Code.OK] * 3
    flight.action("groups.subscribe", {"group": "g", "topics": ["orders"]}, 1)
    assert receive(link).result(PATIENCE).num_rows == 4
    assert broker.kinds == ["send", "send", "receive"]
    assert flight.flown == []
    assert link.lean


def test_what_is_large_takes_flight(link, broker, flight):
    assert send(link, b"x")[0][0] == Code.OK
    assert link.exchange(Exchange.SEND, outgoing([{"body": bytes(2 << 20)}]), {}).result(PATIENCE).num_rows == 1
    assert begin(link, parcel(bytes(LARGE))).result(PATIENCE)[0][0] == Code.OK
    assert (broker.kinds, flight.flown) == (["send"], ["send", "send"])


def test_a_batch_of_another_schema_takes_flight_which_says_what_is_wrong(link, broker, flight):
    send(link)
    flight.refuse(Exchange.SEND, error(Code.BAD_BATCH))
    with pytest.raises(EscrowError, match="BAD_BATCH"):
        link.exchange(Exchange.SEND, NOTHING, {}).result(PATIENCE)
    assert flight.flown == ["send"]


def test_rows_that_cannot_be_packed_take_flight_which_says_what_is_wrong(link, flight):
    send(link)
    given = parcel(b"x")
    given.rows[0] = given.rows[0]._replace(queue=object())
    with pytest.raises(EscrowError, match="cannot send"):
        begin(link, given).result(PATIENCE)
    assert send(link)[0][0] == Code.OK


def test_a_refused_request_has_the_brokers_error_and_the_connection_goes_on(link, broker, flight):
    flight.refuse(Exchange.SEND, Overloaded(Code.DISK_FULL, "full", "wait", 7.5))
    with pytest.raises(Overloaded) as caught:
        send(link)
    assert (caught.value.code, caught.value.retry_after, caught.value.hint) == (Code.DISK_FULL, 7.5, "wait")
    flight.refuse(Exchange.SEND, Unknown(Code.SHARD_STOPPED))
    with pytest.raises(Unknown) as stopped:
        send(link)
    assert stopped.value.code is Code.DISCONNECTED
    assert send(link)[0][0] == Code.OK
    assert len(broker.connections) == 1


# Order


def test_requests_of_one_kind_keep_their_order_across_both_carriers(link, broker, flight):
    flight.hold(Exchange.SEND)
    given = [
        b"%d" % n if n % 9 else b"%d" % n + bytes(LARGE) for n in range(1, 30)
    ]  # after each large one eight small ones
    answers = [begin(link, parcel(body)) for body in given]
    broker.wait(lambda: len(broker.kinds) == 8)
    assert flight.flown == []  # the ninth waits, and everything after it
    flight.release(Exchange.SEND)
    for answer in answers:
        assert answer.result(PATIENCE)[0][0] == Code.OK
    assert bodies(flight) == given
    assert broker.kinds.count("send") + flight.flown.count("send") == len(given)
    assert len(broker.kinds) == 8 + 4 + 4
    assert len(flight.flown) == 3 + 4 + 4 + 2


def test_the_other_kinds_do_not_wait(link, broker, flight):
    session = flight.action("session.open", {"group": "p", "transactional": True}, 1)["session"]
    flight.hold(Exchange.SEND)
    waiting = [begin(link, parcel(b"1")), begin(link, parcel(bytes(LARGE)))]
    half = parcel(b"half", kind=Exchange.PREPARE)
    half.options = {"session": session}
    (answer,) = begin(link, half).result(PATIENCE)
    end = Parcel(Exchange.END, [(answer[4], 1)], {"session": session})
    assert begin(link, end).result(PATIENCE) == bytes([Code.COMMITTED])
    flight.release(Exchange.SEND)
    assert all(one.result(PATIENCE)[0][0] == Code.OK for one in waiting)


def test_an_answer_goes_to_the_request_that_it_names_and_not_to_the_oldest(link, broker, flight):
    for topic in ("news", "weather"):
        flight.action("groups.subscribe", {"group": topic, "topics": [topic]}, 1)
    older, newer = [receive(link, group=topic) for topic in ("news", "weather")]
    broker.wait(lambda: broker.kinds.count("receive") == 2)
    begin(flight, parcel(b"rain", topic="weather")).result(PATIENCE)
    wait([older, newer], PATIENCE, FIRST_COMPLETED)
    assert (older.done(), newer.done()) == (False, True)
    assert newer.result().column("body").to_pylist() == [b"rain"]
    older.cancel()


def test_after_a_lost_request_those_behind_it_fail_unsent_instead_of_overtaking(link, broker, flight):
    send(link)
    broker.mute = True
    lost, large, small = [begin(link, parcel(body)) for body in (b"1", bytes(LARGE), b"3")]
    broker.wait(lambda: len(broker.kinds) == 2)
    broker.drop()
    assert lost.exception(PATIENCE).left
    assert not large.exception(PATIENCE).left
    assert not small.exception(PATIENCE).left
    assert {one.exception().code for one in (lost, large, small)} == {Code.DISCONNECTED}
    assert bodies(flight) == [b"x"]


def test_a_request_is_sent_again_unchanged(link, broker, flight):
    given = parcel(b"1", b"2")
    first = begin(link, given).result(PATIENCE)
    assert begin(link, given).result(PATIENCE) == first
    assert bodies(flight) == [b"1", b"2"]


# Without the lean carrier


def check_fallback(link, flight):
    before = len(flight.flown)
    assert send(link)[0][0] == Code.OK
    assert len(flight.flown) == before + 1
    assert not link.lean


def test_a_broker_without_one_is_spoken_to_over_flight(flight):
    link = LeanLink(flight)
    check_fallback(link, flight)
    check_fallback(link, flight)
    link.close()


def test_where_nobody_listens_everything_takes_flight(flight, broker, link):
    with socket.create_server(("127.0.0.1", 0)) as free:
        flight.lean = {"port": free.getsockname()[1], "socket": None}
    check_fallback(link, flight)


@pytest.mark.parametrize("fault", ["silent", "refusal", "shard", "epoch", "greets"])
def test_who_is_no_welcome_broker_is_not_spoken_to(flight, broker, link, fault, monkeypatch):
    monkeypatch.setattr(links, "HOLD_SECONDS", 0.05)
    value = {"refusal": error(Code.TOO_MANY), "greets": b"SSH-2.0-OpenSSH\r\n" + bytes(20)}.get(fault, 77)
    setattr(broker, fault, value)
    check_fallback(link, flight)
    assert broker.kinds == []


def test_it_is_tried_again_now_and_then(flight, broker, link, impatient):
    link = LeanLink(flight)
    broker.refusal = error(Code.TOO_MANY)
    check_fallback(link, flight)
    broker.refusal = None
    eventually(lambda: send(link) and link.lean)
    flown = len(flight.flown)
    send(link)
    assert len(flight.flown) == flown
    link.close()


def test_it_dies_and_comes_back(flight, broker, link, impatient):
    link = LeanLink(flight)
    send(link)
    broker.close()
    flight.lean = None
    eventually(lambda: not link.lean)
    send(link)
    again = LeanBroker(flight)
    again.epoch = flight.epoch = 2
    flight.lean = again.place
    flight.reconnect()
    eventually(lambda: send(link) and link.lean)
    send(link)
    assert again.kinds
    link.close()
    again.close()


def test_nobody_waits_long_for_a_first_try(flight, broker, link, monkeypatch):
    """A greeting that nobody answers, as behind a firewall, holds requests for a moment only."""
    monkeypatch.setattr(links, "HOLD_SECONDS", 0.05)
    broker.silent = True
    began = time.monotonic()
    assert send(link)[0][0] == Code.OK
    assert time.monotonic() - began < links.CLOSE_SECONDS
    assert flight.flown == ["send"]


def test_a_unix_socket_is_preferred_on_this_machine_and_left_where_it_is_not_there(flight, broker, link, tmp_path):
    local = LeanBroker(flight, tmp_path / "lean")
    flight.lean = {**broker.place, "socket": str(tmp_path / "lean")}
    send(link)
    assert (local.kinds, broker.kinds) == (["send"], [])
    other = LeanLink(flight)
    flight.lean = {**broker.place, "socket": str(tmp_path / "nothing")}
    flight.reconnect()
    send(other)
    assert broker.kinds == ["send"]
    other.close()
    local.close()


# What goes wrong


@pytest.mark.parametrize("raw", list(GARBAGE.values()), ids=list(GARBAGE))
def test_garbage_is_a_connection_that_broke(flight, broker, link, raw, impatient):
    link = LeanLink(flight)
    broker.says = raw
    with pytest.raises(Unknown) as caught:
        send(link)
    assert caught.value.code is Code.DISCONNECTED
    eventually(lambda: outcome(begin(link, parcel())) is None and link.lean)
    link.close()
