"""A link to a served broker: the order of requests, connections that are lost, brokers that are none."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait

import pyarrow as pa
import pytest
from framed_broker import GARBAGE, MOST, PATIENCE, FramedBroker, eventually

from escrowmq import connecting
from escrowmq.client.links import connection as connections
from escrowmq.client.links import exchanges, seeking, state
from escrowmq.client.links import link as links
from escrowmq.errors import Code, EscrowError, Overloaded, Unknown, error
from escrowmq.message.row import OutgoingRow
from escrowmq.testing.ledgers import outgoing
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, Parcel, frames
from escrowmq.wire.link import Phase

NOTHING = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
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
    monkeypatch.setattr(links, "CONNECT_SECONDS", PATIENCE)
    monkeypatch.setattr(seeking, "CONNECT_SECONDS", PATIENCE)
    monkeypatch.setattr(seeking, "ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(exchanges, "STALL_SECONDS", PATIENCE)
    monkeypatch.setattr(connections, "WRITE_SECONDS", PATIENCE)


@pytest.fixture
def twin():
    return TwinLink()


@pytest.fixture
def broker(twin):
    made = FramedBroker(twin)
    yield made
    made.close()


@pytest.fixture
def link(broker):
    made = broker.link()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch):
    """A broker that is away is looked for almost without a pause."""
    monkeypatch.setattr(state, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(state, "LAST_PAUSE", 0.002)
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.05)


def bodies(twin):
    return [message["body"] for message in twin.topics["orders"]]


def sent_again(link):
    """Send until it works, as a lane does."""
    return eventually(lambda: outcome(begin(link, parcel())) is None)


# What is asked


def test_parcels_batches_and_receives_share_a_connection(link, broker, twin):
    ((code, _, queue, offset, _),) = send(link, b"x")
    assert (code, queue, offset) == (Code.OK, 0, 0)
    answer = link.exchange(Exchange.SEND, outgoing([{}] * 3), {}).result(PATIENCE)
    assert answer.column("code").to_pylist() == [Code.OK] * 3
    twin.action("groups.subscribe", {"group": "g", "topics": ["orders"]}, 1)
    assert receive(link).result(PATIENCE).num_rows == 4
    assert link.action("hello", {}, PATIENCE)["shard"] == twin.shard
    assert broker.kinds == ["send", "send", "receive"]
    assert (len(broker.connections), broker.hellos) == (1, 1)
    assert (link.state.is_there, link.state.phase) == (True, Phase.UP)


def test_a_large_batch_arrives_whole(link, twin):
    body = bytes(range(256)) * 2000
    assert (
        link.exchange(Exchange.SEND, outgoing([{"body": body}, {"body": body[::-1]}]), {}).result(PATIENCE).num_rows
        == 2
    )
    assert bodies(twin) == [body, body[::-1]]


def test_what_is_larger_than_the_broker_takes_is_refused_here(link, broker):
    answer = link.exchange(Exchange.SEND, outgoing([{"body": bytes(MOST)}]), {})
    assert outcome(answer) is Code.BATCH_TOO_LARGE
    assert broker.kinds == []
    assert send(link)[0][0] == Code.OK


def test_a_batch_of_another_schema_is_refused(link, broker):
    assert outcome(link.exchange(Exchange.SEND, NOTHING, {})) is Code.BAD_BATCH
    assert broker.kinds == []


def test_rows_that_cannot_be_packed_are_refused(link):
    send(link)
    given = parcel(b"x")
    given.rows[0] = given.rows[0]._replace(queue=object())
    with pytest.raises(EscrowError, match="cannot send"):
        begin(link, given).result(PATIENCE)
    assert send(link)[0][0] == Code.OK


def test_a_refused_request_has_the_brokers_error_and_the_connection_goes_on(link, broker, twin):
    twin.refuse(Exchange.SEND, Overloaded(Code.DISK_FULL, "full", "wait", 7.5))
    with pytest.raises(Overloaded) as caught:
        send(link)
    assert (caught.value.code, caught.value.retry_after, caught.value.hint) == (Code.DISK_FULL, 7.5, "wait")
    assert send(link)[0][0] == Code.OK
    assert len(broker.connections) == 1


def test_a_broker_that_has_stopped_is_left_and_found_again(link, broker, twin, impatient):
    send(link)
    twin.refuse(Exchange.SEND, Unknown(Code.SHARD_STOPPED))
    with pytest.raises(Unknown) as stopped:
        send(link)
    assert stopped.value.code is Code.DISCONNECTED
    sent_again(link)
    assert len(broker.connections) == 2


# Order


def test_an_answer_goes_to_the_request_that_it_names_and_not_to_the_oldest(link, broker, twin):
    for topic in ("news", "weather"):
        twin.action("groups.subscribe", {"group": topic, "topics": [topic]}, 1)
    older, newer = [receive(link, group=topic) for topic in ("news", "weather")]
    broker.wait(lambda: broker.kinds.count("receive") == 2)
    begin(twin, parcel(b"rain", topic="weather")).result(PATIENCE)
    wait([older, newer], PATIENCE, FIRST_COMPLETED)
    assert (older.done(), newer.done()) == (False, True)
    assert newer.result().column("body").to_pylist() == [b"rain"]
    older.cancel()


def test_what_was_asked_before_there_is_a_connection_leaves_in_order(link, broker, twin):
    answers = [begin(link, parcel(b"%d" % n)) for n in range(100)]
    for answer in answers:
        assert answer.result(PATIENCE)[0][0] == Code.OK
    assert bodies(twin) == [b"%d" % n for n in range(100)]


def test_after_a_lost_request_those_behind_it_fail_unsent_instead_of_overtaking(link, broker, twin):
    send(link)
    broker.mute = True
    lost = begin(link, parcel(b"1"))
    broker.wait(lambda: len(broker.kinds) == 2)
    broker.say(frames.gone())
    eventually(lambda: link.state.phase is Phase.DRAINING)
    held = begin(link, parcel(b"2"))
    broker.drop()
    assert lost.exception(PATIENCE).left
    assert not held.exception(PATIENCE).left
    assert bodies(twin) == [b"x"]


def test_a_request_is_sent_again_unchanged(link, twin):
    given = parcel(b"1", b"2")
    first = begin(link, given).result(PATIENCE)
    assert begin(link, given).result(PATIENCE) == first
    assert bodies(twin) == [b"1", b"2"]


# Brokers that are none


def test_where_nobody_listens_it_fails_as_not_sent(twin):
    broker = FramedBroker(twin)
    broker.close()
    link = broker.link()
    problem = begin(link, parcel()).exception(PATIENCE)
    assert (problem.code, problem.left, link.state.is_there) == (Code.DISCONNECTED, False, False)
    assert "Connection refused" in problem.message
    assert (link.state.phase, link.state.next_probe > 0) == (Phase.AWAY, True)
    link.close()


@pytest.mark.parametrize("fault", ["silent", "refusal", "greets"])
def test_who_is_no_welcome_broker_is_not_spoken_to(broker, link, fault, monkeypatch):
    monkeypatch.setattr(links, "HOLD_SECONDS", 0.05)
    value = {"refusal": error(Code.TOO_MANY), "greets": b"SSH-2.0-OpenSSH\r\n" + bytes(20)}.get(fault, True)
    setattr(broker, fault, value)
    problem = begin(link, parcel()).exception(PATIENCE)
    assert (problem.code, problem.left) == (Code.DISCONNECTED, False)
    assert broker.kinds == []


def test_one_of_several_that_is_another_shard_by_now_is_not_spoken_to(broker, twin, impatient):
    link = broker.link(stays=True)
    send(link)
    broker.shard = 77
    broker.drop()
    eventually(lambda: not link.state.is_there)
    problem = eventually(
        lambda: (one := begin(link, parcel()).exception(PATIENCE)) and "data folder" in one.message and one
    )
    assert not problem.left
    link.close()


def test_it_dies_and_comes_back(broker, twin, impatient):
    link = broker.link()
    send(link)
    broker.close()
    eventually(lambda: not link.state.is_there)
    assert outcome(begin(link, parcel())) is Code.DISCONNECTED
    again = FramedBroker(twin, port=broker.address.port)
    sent_again(link)
    assert again.kinds
    link.close()
    again.close()


def test_nobody_waits_long_for_a_first_try(broker, link, monkeypatch):
    """A greeting that nobody answers, as behind a firewall, holds requests for a moment only."""
    monkeypatch.setattr(links, "HOLD_SECONDS", 0.05)
    broker.silent = True
    problem = begin(link, parcel()).exception(PATIENCE)
    assert (problem.code, problem.left) == (Code.DISCONNECTED, False)
    assert link.state.phase is Phase.PROBING


def test_a_unix_socket_is_a_place_like_others(twin, tmp_path):
    local = FramedBroker(twin, tmp_path / "socket")
    [link] = connecting.links(f"escrow+unix://{tmp_path / 'socket'}", {})
    send(link)
    assert local.kinds == ["send"]
    assert link.address == f"escrow+unix://{tmp_path / 'socket'}"
    link.close()
    local.close()


# What goes wrong


@pytest.mark.parametrize("raw", list(GARBAGE.values()), ids=list(GARBAGE))
def test_garbage_is_a_connection_that_broke(broker, raw, impatient):
    link = broker.link()
    broker.says = raw
    with pytest.raises(Unknown) as caught:
        send(link)
    assert caught.value.code is Code.DISCONNECTED
    sent_again(link)
    link.close()
