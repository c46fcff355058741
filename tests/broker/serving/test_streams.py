"""What lasts beside requests: reads with credit, watches, actions; what they may hold, and that others are served
beside them.
"""

import threading
from contextlib import ExitStack

import pyarrow as pa
import pytest
from served import PATIENT, Client, Served

import escrowmq as mq
from escrowmq.broker import requests
from escrowmq.broker.serving import room, streams
from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error
from escrowmq.schemas import CHECKS
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import BatchStream, Exchange, frames
from escrowmq.wire.frames import Kind

BODY = 3 << 20


@pytest.fixture
def served(tmp_path):
    broker = Served(tmp_path / "data", default_queues=1)
    yield broker
    broker.stop()


@pytest.fixture
def full(served):
    """A topic ``t`` of twelve messages of 3 MiB."""
    with served.client() as client:
        for number in range(12):
            client.batch(Exchange.SEND, outgoing([{"topic": "t", "body": bytes([number]) * BODY}]))
    return served


def parts(client, number):
    """The frames of a read that have come, up to the answer to a ping that is sent now."""
    client.send(frames.ping(b"now"))
    came = []
    while (one := client.next()).kind != Kind.PONG:
        assert one.number == number
        came.append(one)
    return came


# Reads


def test_a_read_is_whole_and_its_parts_are_small(full):
    with full.client() as client:
        number, sizes, messages, schema = client.begin_read({"source": "t", "columns": ["body"]}, 1 << 40), [], [], None
        while (came := client.next()).kind != Kind.DONE:
            if came.kind == Kind.SCHEMA:
                schema = frames.read_schema(came)
                continue
            sizes.append(len(came.body))
            if (body := client.gatherer.add(came)) is not None:
                messages += frames.decode_batch(body, schema).column("body").to_pylist()
        assert came.number == number
    assert messages == [bytes([number]) * BODY for number in range(12)]
    assert max(sizes) <= frames.PART_BYTES


def test_a_read_sends_no_more_than_its_credit_and_a_batch(full):
    with full.client() as client:
        number = client.begin_read({"source": "t", "columns": ["body"]}, 1)
        assert client.next().kind == Kind.SCHEMA
        came = [client.next()]
        while came[-1].flags & frames.MORE:
            came.append(client.next())
        full.until(lambda: not any(connection.owes for connection in full.server._clients))
        assert parts(client, number) == [], "its credit is used up"
        client.send(frames.credit(number, sum(len(one.body) for one in came)))
        assert client.next().kind == Kind.PART
        client.send(frames.cancel(number))
        while (last := client.next()).kind == Kind.PART:
            pass
        assert (last.kind, last.number) == (Kind.DONE, number)
        assert client.plain(b"x")[0][0] == Code.OK
    full.until(lambda: full.room.used == 0)


def test_a_read_that_is_broken_off_does_not_look_complete(full):
    with full.client() as leaving:
        leaving.begin_read({"source": "t"}, 1)
        assert leaving.next().kind == Kind.SCHEMA
        leaving.send(frames.goodbye())
        last = leaving.closed()[-1]
        assert (last.kind, frames.read_refusal(last).code) == (Kind.ERROR, Code.SHARD_STOPPED)
    with full.client() as staying:
        number = staying.begin_read({"source": "t"}, 1)
        assert staying.next().kind == Kind.SCHEMA
        stopping = threading.Thread(target=full.stop, args=(PATIENT,))
        stopping.start()
        ends = [one for one in staying.closed() if one.number == number and one.kind != Kind.PART]
        assert [one.kind for one in ends] == [Kind.ERROR]
    stopping.join()
    full.start()


def test_a_log_that_fails_under_a_read_is_a_broker_that_stopped(full, monkeypatch):
    """Another node took the log over, and this one has not noticed: the client looks for the leader, and loses
    nothing."""

    def read(request):
        def batches():
            yield pa.record_batch([[b"one"]], ["body"])
            raise error(Code.LOG_FAILED, "another node leads the log now")

        return BatchStream(pa.schema({"body": pa.binary()}), batches())

    def act(name, request):
        raise error(Code.LOG_FAILED, "another node leads the log now")

    monkeypatch.setattr(full.calls, "read", read)
    with full.client() as client:
        monkeypatch.setattr(full.calls, "action", act)
        client.begin_read({"source": "t"})
        came = [client.next() for _ in range(3)]
        assert [one.kind for one in came] == [Kind.SCHEMA, Kind.PART, Kind.ERROR]
        assert frames.read_refusal(came[-1]).code is Code.SHARD_STOPPED
        with pytest.raises(EscrowError) as asked:
            client.act("topics.list")
        assert asked.value.code is Code.SHARD_STOPPED


def test_small_answers_come_between_the_parts_of_a_read(full):
    with Client(full.port, small=True) as client:
        number = client.begin_read({"source": "t", "columns": ["body"]}, 1 << 40)
        full.until(lambda: any(connection.owes for connection in full.server._clients))
        sent = client.parcel(Exchange.SEND, [("u", b"x", None, None, None, None, 0, 0, 0, 0, None)], {})
        before = 0
        while (came := client.next()).number != sent:
            assert came.kind in (Kind.SCHEMA, Kind.PART)
            before += len(came.body)
        assert came.kind == Kind.ROWS
        assert before < 12 * BODY
        client.send(frames.cancel(number))


def count_unless_full(client):
    """The number of all messages; None on a machine that is too busy to close in time who does not read."""
    try:
        return len(client.read_all({"source": "t"}))
    except Overloaded:
        return None


@pytest.mark.invariant("I35")
def test_reads_that_are_held_open_are_bounded_together_and_others_read(tmp_path):
    served = Served(tmp_path / "data", max_held_bytes=80 << 20, default_queues=1)
    try:
        with served.client() as client:
            for number in range(12):
                client.batch(Exchange.SEND, outgoing([{"topic": "t", "body": bytes([number]) * BODY}]))
            with ExitStack() as slow:
                for _ in range(8):
                    slow.enter_context(Client(served.port, small=True)).begin_read({"source": "t"}, 1 << 40)
                served.until(lambda: count_unless_full(client) == 12)
                assert served.room.used <= 80 << 20
                client.act("topics.list")
        served.until(lambda: served.room.used == 0)
    finally:
        served.stop()


def test_a_client_that_ends_in_the_middle_of_a_read_leaves_nothing(full):
    for _ in range(5):
        with Client(full.port, small=True) as client:
            client.begin_read({"source": "t"}, 1 << 40)
            assert client.next().kind == Kind.SCHEMA
    full.until(lambda: full.room.used == 0 and full.room._call_count == 0)


# Watches


def test_checks_are_pushed_until_the_watch_ends(tmp_path):
    served = Served(tmp_path / "data", transaction_timeout=0.05, check_interval=0.05)
    try:
        session = served.session()
        with served.client() as client, served.client() as producer:
            client.send(frames.watch(90, session))
            begun = client.next()
            assert (begun.kind, begun.number) == (Kind.CHECKS, 90)
            assert frames.decode_batch(begun.body, CHECKS).num_rows == 0
            assert producer.act("producers.list")["producers"][0]["members"] == 1
            ((_, _, _, _, transaction),) = producer.prepare(session, b"?")
            came = client.next()
            assert (came.kind, came.number) == (Kind.CHECKS, 90)
            batch = frames.decode_batch(came.body, CHECKS)
            assert (batch["transaction"].to_pylist(), batch["body"].to_pylist()) == ([transaction], [b"?"])
            client.send(frames.cancel(90))
            while (last := client.next()).kind == Kind.CHECKS:
                pass
            assert (last.kind, last.number) == (Kind.DONE, 90)
            served.until(lambda: client.act("producers.list")["producers"][0]["members"] == 0)
    finally:
        served.stop()


def test_a_producer_listens_once_the_broker_has_registered_it(served, monkeypatch):
    go, watch = threading.Event(), served.calls.watch

    def late(session):
        assert go.wait(PATIENT)
        return watch(session)

    monkeypatch.setattr(served.calls, "watch", late)
    with mq.connect(f"escrow://127.0.0.1:{served.port}") as bus:
        producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        assert not producer.wait_until_listening(0.2)
        go.set()
        assert producer.wait_until_listening(PATIENT)
        assert served.act("producers.list")["producers"][0]["members"] == 1


def test_a_watch_of_a_fenced_session_ends_with_the_reason(served):
    with served.client() as client:
        client.send(frames.watch(90, served.session("shop", "one")))
        served.until(lambda: client.act("producers.list")["producers"][0]["members"] == 1)
        served.session("shop", "one")
        assert client.answer(90).code is Code.FENCED


def test_a_client_that_leaves_takes_its_members_along(served):
    with served.client() as client:
        client.send(frames.watch(90, served.session()))
        served.until(lambda: served.act("producers.list")["producers"][0]["members"] == 1)
    served.until(lambda: served.act("producers.list")["producers"][0]["members"] == 0)


# Actions


def test_slow_actions_keep_neither_questions_about_the_broker_nor_other_clients_waiting(served, monkeypatch):
    go, began, act = threading.Event(), threading.Semaphore(0), served.calls.action

    def slow(name, request):
        if name == "topics.list":
            began.release()
            assert go.wait(PATIENT)
        return act(name, request)

    monkeypatch.setattr(served.calls, "action", slow)
    with served.client() as greedy, served.client() as other:
        for number in range(100, 140):
            greedy.send(frames.action_request(number, "topics.list", {}))
        for _ in range(streams.ACTIONS_OF_ONE):
            assert began.acquire(timeout=PATIENT)
        assert greedy.act("health")["status"] == "ok"
        assert not began.acquire(blocking=False), "further ones wait"
        assert other.act("producers.list") == {"producers": []}
        go.set()
        numbers = {greedy.next().number for _ in range(40)}
        assert numbers == set(range(100, 140))


# Room


def test_a_large_frame_without_room_is_refused_and_its_bytes_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", 0.05)
    served = Served(tmp_path / "data", max_held_bytes=4 << 20, default_queues=1)
    try:
        with served.client() as client:
            served.room.enter(held := room.Held("somebody"))
            served.room.change(held, 3 << 20)
            answer = client.batch(Exchange.SEND, outgoing([{"topic": "t", "body": bytes(2 << 20)}]))
            assert answer.code is Code.QUEUE_FULL
            assert client.plain(b"small")[0][0] == Code.OK
            served.room.leave(held)
            answer = client.batch(Exchange.SEND, outgoing([{"topic": "t", "body": bytes(2 << 20)}]))
            assert answer["code"].to_pylist() == [Code.OK]
        served.until(lambda: served.room.used == 0)
    finally:
        served.stop()


def test_all_connections_can_be_closed_at_once(served):
    clients = [served.client() for _ in range(3)]
    served.server.close_all()
    for client in clients:
        assert client.closed() == []
        client.socket.close()
    assert served.act("health")["status"] == "ok"


def test_a_schema_of_many_columns_is_refused_without_naming_them_all(monkeypatch):
    import pyarrow as pa

    many = pa.schema([(f"c{number}", pa.int32()) for number in range(100_000)])
    monkeypatch.setattr(requests, "MOST_SHOWN", 3)
    with pytest.raises(Rejected) as caught:
        requests.check_schema(Exchange.SEND, many)
    assert "given c0: int32, c1: int32, c2: int32, ..." in caught.value.message
    assert "c3" not in caught.value.message


def test_an_unknown_action_is_refused_to_its_number(served):
    with served.client() as client:
        with pytest.raises(EscrowError) as caught:
            client.act("nothing")
        assert caught.value.code is Code.BAD_REQUEST
