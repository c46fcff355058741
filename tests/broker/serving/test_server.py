"""The server: what it answers, what it bounds, and that nobody who misbehaves is anybody else's problem."""

import errno
import select
import socket
import struct
import threading

import pyarrow as pa
import pytest
from served import PATIENT, Client, Served

from escrowmq.broker.serving import requests, room, server
from escrowmq.broker.serving.connection import KEEPALIVE, Connection
from escrowmq.broker.serving.listening import listen_tcp, listen_unix
from escrowmq.broker.serving.server import Server
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.model import Act, Outcome
from escrowmq.schemas import SETTLING
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, frames
from escrowmq.wire.channel import PlainChannel
from escrowmq.wire.frames import Assembler, Kind
from escrowmq.wire.frames.frame import frame as framed
from escrowmq.wire.frames.frame import frame_start
from escrowmq.wire.frames.rows import encoder


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("shared") / "data", default_queues=1)
    served.calls.action("groups.subscribe", {"group": "g", "topics": ["t"]})
    yield served
    served.stop()


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path / "data", default_queues=1)
    yield served
    served.stop()


def group(served, name):
    served.calls.action("groups.subscribe", {"group": name, "topics": ["t"], "start": "latest"})
    return name


def problem_of(frame):
    assert frame.kind == Kind.ERROR
    return frames.read_refusal(frame).code


# What it answers


def test_a_transaction_from_prepare_to_acknowledgement(shared):
    name = group(shared, "whole")
    with shared.client() as client:
        session = shared.session("shop", "whole")
        first, second = client.prepare(session, b"one", b"two")
        assert (first[0], second[0]) == (Code.OK, Code.OK)
        rows = [(first[4], Outcome.COMMIT), (second[4], Outcome.ROLLBACK)]
        assert client.answer(client.parcel(Exchange.END, rows, {"session": session})) == bytes([1, 2])
        came = client.answer(client.receive(60_000, name), Exchange.RECEIVE).to_pylist()
        assert [(one["body"], one["attempt"]) for one in came] == [(b"one", 1)]
        settled = [(came[0]["lease"], came[0]["offset"], 1, Act.ACK, 0, None)]
        assert client.answer(client.parcel(Exchange.SETTLE, settled, {"group": name})) == bytes([0])


def test_batches_are_answered_as_batches(shared):
    with shared.client() as client:
        answer = client.batch(Exchange.SEND, outgoing([{"topic": "u", "body": b"x"}] * 3))
        assert answer.column("code").to_pylist() == [0, 0, 0]
        assert client.batch(Exchange.SETTLE, pa.RecordBatch.from_pylist([], SETTLING), {"group": "g"}).num_rows == 0
        assert client.batch(Exchange.END, outgoing([{}])).code is Code.BAD_BATCH


def test_requests_of_one_kind_take_effect_in_order_whatever_comes_between(shared):
    with shared.client() as client:
        numbers = [
            client.parcel(
                Exchange.SEND, [("o", b"%d" % at, None, None, None, None, 0, 0, 0, 0, None)], {}, (21, at + 1)
            )
            for at in range(200)
        ]
        answers = {}
        while len(answers) < len(numbers):
            frame = client.next()
            answers[frame.number] = frames.read_rows(frame)[0][3]
    assert [answers[number] for number in numbers] == list(range(200))


def test_pings_come_back_and_a_goodbye_ends_after_the_last_answer(shared):
    with shared.client() as client:
        client.send(frames.ping(b"abc"))
        frame = client.next()
        assert (frame.kind, bytes(frame.body)) == (Kind.PONG, b"abc")
        number = client.parcel(Exchange.SEND, [("t", b"", None, None, None, None, 0, 0, 0, 0, None)], {}, (22, 1))
        waits = client.receive(60_000, group(shared, "bye"), member=99)
        client.send(frames.goodbye())
        kinds = {frame.number: frame.kind for frame in client.closed()}
        assert kinds[number] == Kind.ROWS
        assert kinds[waits] in (Kind.WITHDRAWN, Kind.BATCH)
    shared.until(lambda: shared.room.used == 0)


# What cannot be understood


def test_what_several_clients_ask_at_once_is_read_before_any_of_it_is_begun(served, monkeypatch):
    session = served.session()
    held, go, happened = threading.Event(), threading.Event(), []
    attend, receive, parcel = Server._attend, Connection.receive, served.calls.parcel

    def hold(self):
        held.set()
        assert go.wait(PATIENT)
        attend(self)

    def received(self):
        happened.append("read")
        return receive(self)

    def begun(*given):
        happened.append("begun")
        parcel(*given)

    with served.client() as one, served.client() as two, served.client() as three:
        monkeypatch.setattr(Server, "_attend", hold)
        served.server._wake_loop()
        assert held.wait(PATIENT)
        monkeypatch.setattr(Connection, "receive", received)
        monkeypatch.setattr(served.calls, "parcel", begun)
        clients = one, two, three
        row = ("t", b"x", None, None, None, None, -1, 0, 0, 0, None)
        asked = [
            client.parcel(Exchange.PREPARE, [row], {"session": session}, (7, first))
            for first, client in enumerate(clients, 1)
        ]
        served.until(lambda: all(select.select([one], [], [], 0)[0] for one in served.server._clients))
        go.set()
        for client, number in zip(clients, asked, strict=True):
            assert client.answer(number)[0][0] == Code.OK
    assert happened[:6] == ["read"] * 3 + ["begun"] * 3


@pytest.mark.invariant("I47")
@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(600), frames.ping(), frames.cancel(1),
    bytes(16),
     framed(Kind.HELLO, 0, b"not a greeting"), struct.pack("<I", 1 << 31)],
)  # fmt: skip
def test_who_does_not_greet_properly_is_told_and_closed(shared, said):
    with shared.client(greet=False) as client:
        client.send(said)
        (frame,) = client.closed()
        assert problem_of(frame) in (Code.BAD_REQUEST, Code.BATCH_TOO_LARGE)
        assert frame.number == 0


def test_a_content_that_cannot_be_read_is_refused_and_the_connection_goes_on(shared):
    with shared.client() as client:
        kinds = (Kind.SEND, Kind.END, Kind.SETTLE, Kind.COLUMNS, Kind.RECEIVE, Kind.ACTION, Kind.READ, Kind.WATCH, 0x33)
        for number, kind in enumerate(kinds, 1):
            client.send(framed(kind, number, b"\xc1\xc1\xc1", b"\xc1\xc1\xc1"))
            assert client.answer(number).code in (Code.BAD_BATCH, Code.BAD_REQUEST)
        client.send(framed(Kind.RECEIVE, 99, head=encoder.encode({"wait_ms": 1})))
        assert client.answer(99).code is Code.BAD_REQUEST  # no group
        assert client.plain(b"still", sequence=900)[0][0] == Code.OK
    shared.until(lambda: shared.room.used == 0)


@pytest.mark.parametrize(
    "said",
    [struct.pack("<I", (1 << 32) - 1), frame_start(Kind.SEND, 5, 1 << 30), bytes(16), frames.hello(),
     frames.receive_request(0, {"group": "g", "member": 1}), frames.ping(bytes(65)), framed(0x55, 0)],
)  # fmt: skip
def test_lost_boundaries_close_the_connection_alone(shared, said):
    with shared.client() as other, shared.client() as client:
        client.send(said)
        answers = client.closed()
        assert all(frame.kind == Kind.ERROR for frame in answers)
        assert other.plain(b"fine", sequence=901)[0][0] == Code.OK


def test_two_requests_with_one_number_are_refused(shared):
    with shared.client() as client:
        frame = frames.receive_request(5, {"group": "g", "member": 5, "wait_ms": 60_000, "max_messages": 1})
        client.send(frames.receive_request(4, {"group": group(shared, "twice"), "member": 5, "wait_ms": 60_000}))
        client.send(frames.receive_request(4, {"group": "twice", "member": 6, "wait_ms": 60_000}) + frame[:3])
        assert [(one.number, problem_of(one)) for one in client.closed() if one.number == 0] == [(0, Code.BAD_REQUEST)]


# Receives that are not wanted any more


@pytest.mark.invariant("I23")
def test_a_withdrawn_receive_gets_no_lease(shared):
    name = group(shared, "withdrawn")
    with shared.client() as client:
        number = client.receive(60_000, name, member=1)
        client.send(frames.cancel(number) + frames.cancel(number) + frames.cancel(77))
        frame = client.next()
        assert (frame.number, frame.kind) == (number, Kind.WITHDRAWN)
        client.plain(b"for two", sequence=902)
        came = client.answer(client.receive(60_000, name, member=2), Exchange.RECEIVE).to_pylist()
        assert [(one["body"], one["attempt"]) for one in came] == [(b"for two", 1)]


def test_a_connection_that_ends_takes_its_waiting_receives_along(shared):
    name = group(shared, "ends")
    with shared.client() as client:
        client.receive(60_000, name, member=1)
        client.send(frames.ping())
        assert client.next().kind == Kind.PONG
    shared.until(lambda: shared.engine.receiving() == 0)
    with shared.client() as client:
        client.plain(b"alive", sequence=903)
        came = client.answer(client.receive(60_000, name, member=2), Exchange.RECEIVE).to_pylist()
        assert [(one["body"], one["attempt"]) for one in came] == [(b"alive", 1)]


@pytest.mark.invariant("I23")
def test_what_was_leased_for_an_answer_that_did_not_leave_comes_again_unharmed(served):
    name = group(served, "lost")
    with served.client() as client, Client(served.port, small=True) as deaf:
        client.plain(*[bytes(1 << 20)] * 3, sequence=1)
        for _ in range(3):
            client.plain(*[bytes(1 << 20)] * 3, sequence=10)
        client.plain(*[bytes([at]) * (1 << 20) for at in range(3)], sequence=20)
        deaf.receive(0, name, member=1, lease_ms=600_000)
        served.until(lambda: any(c.unsent_bytes for c in list(served.server._clients)))
        deaf.socket.close()
        came = client.answer(client.receive(60_000, name, member=2), Exchange.RECEIVE)
        assert set(came.column("attempt").to_pylist()) == {1}
    served.until(lambda: served.room.used == 0)


def test_limits_of_rows_and_bytes_are_the_settings(tmp_path):
    served = Served(tmp_path / "data", max_batch_rows=2, max_batch_bytes=3000)
    try:
        with served.client() as client:
            assert client.plain(b"", b"", b"").code is Code.BATCH_TOO_LARGE
            assert client.plain(bytes(3000)).code is Code.BATCH_TOO_LARGE
            assert len(client.plain(b"a", b"b")) == 2
    finally:
        served.stop()


# Who is silent, drips, or does not read


def test_the_system_asks_whether_a_silent_other_side_is_there():
    """Half-open connections end: nothing of ours asks, so the sockets must be set so that the system does."""
    listener = listen_tcp("127.0.0.1", 0)
    with socket.create_connection(listener.getsockname()), listener:
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            PlainChannel(accepted).keep_alive(*KEEPALIVE)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_client_that_never_greets_is_closed(served, monkeypatch):
    with served.client() as polite, served.client(greet=False) as silent, served.client(greet=False) as dripping:
        monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
        dripping.send(frames.hello()[:7])
        assert silent.closed() == dripping.closed() == []
        polite.send(frames.ping())
        assert polite.next().kind == Kind.PONG


def test_a_frame_must_become_whole(served, monkeypatch):
    with served.client() as dripping, served.client() as idle:
        monkeypatch.setattr(server, "FRAME_SECONDS", 0.05)
        dripping.send(frame_start(Kind.SEND, 1, 1 << 20) + bytes(100))
        assert dripping.closed() == []
        idle.send(frames.ping())
        assert idle.next().kind == Kind.PONG
    served.until(lambda: served.room.used == 0)


@pytest.mark.invariant("I35")
def test_frames_that_are_not_whole_are_bounded_together(tmp_path):
    """Who announces much and sends nothing is closed; who goes on is served."""
    served = Served(tmp_path / "data", max_held_bytes=8 << 20)
    silent = [served.client() for _ in range(4)]
    try:
        for client in silent:
            client.send(frame_start(Kind.SEND, 1, 700 << 10) + bytes(10))
        with served.client() as busy:
            busy.send(frame_start(Kind.SEND, 1, 700 << 10) + bytes(100))
            assert silent[0].closed() == []
            busy.send(bytes((700 << 10) - 100))
            assert busy.answer(1).code is Code.BAD_BATCH
    finally:
        for client in silent:
            client.socket.close()
        served.stop()


class Slow:
    """In the place of an engine's calls: answers when it is told to."""

    def __init__(self, served):
        self.settings, self.identity, self.waiting = served.calls.settings, served.calls.identity, []
        self.action = served.calls.action
        self.came = threading.Semaphore(0)

    def parcel(self, parcel, done, sound_bytes=None, source=None):
        assert sound_bytes > 0
        self.waiting.append(done)
        self.came.release()

    def run_rounds_here(self):
        pass

    def run(self):
        pass

    def answer(self, count=1, rows=1):
        for _ in range(count):
            self.waiting.pop(0)([(0, 1, 0, 0, None)] * rows)


@pytest.fixture
def slow(served):
    calls = Slow(served)
    listener = listen_tcp("127.0.0.1", 0)
    serving = Server(calls, [listener], "slow", room=served.room)
    calls.port, calls.serving = listener.getsockname()[1], serving
    serving.start()
    yield calls
    serving.stop()


ROW = [("t", b"x" * 1000, None, None, None, None, 0, 0, 0, 0, None)]


def test_requests_of_one_connection_are_bounded_and_the_others_are_served(slow, monkeypatch):
    monkeypatch.setattr(requests, "MAX_REQUESTS", 3)
    with Client(slow.port) as client, Client(slow.port) as other:
        numbers = [client.parcel(Exchange.SEND, ROW, {}) for _ in range(8)]
        for _ in range(3):
            assert slow.came.acquire(timeout=PATIENT)
        other.send(frames.ping())
        assert other.next().kind == Kind.PONG
        assert len(slow.waiting) == 3
        slow.answer(3)
        for _ in range(3):
            assert slow.came.acquire(timeout=PATIENT)
        slow.answer(3)
        for _ in range(2):
            assert slow.came.acquire(timeout=PATIENT)
        slow.answer(2)
        assert sorted(client.next().number for _ in range(8)) == numbers


@pytest.mark.invariant("I35")
def test_who_does_not_read_is_not_read_from_and_holds_up_nobody(slow, served, monkeypatch):
    monkeypatch.setattr(requests, "UNREAD_BYTES", 1 << 12)
    with Client(slow.port, small=True) as deaf, Client(slow.port) as other:
        numbers = [deaf.parcel(Exchange.SEND, ROW, {}) for _ in range(3)]
        for _ in numbers:
            assert slow.came.acquire(timeout=PATIENT)
        slow.waiting.pop(0)([(0, 1 << 40, 1 << 20, 1 << 40, bytes(16))] * 150_000)  # more than the system keeps
        served.until(lambda: any(c.unsent_bytes for c in list(slow.serving._clients)))
        numbers.append(deaf.parcel(Exchange.SEND, ROW, {}))
        slow.answer(2)
        other.send(frames.ping())
        assert other.next().kind == Kind.PONG
        assert not slow.came.acquire(blocking=False)
        assert deaf.next().number == numbers[0]
        assert slow.came.acquire(timeout=PATIENT)
        slow.answer()
        assert [deaf.next().number for _ in range(3)] == numbers[1:]
    served.until(lambda: served.room.used == 0)


@pytest.mark.invariant("I35")
def test_who_does_not_read_is_closed_when_others_need_the_room(slow, served, monkeypatch):
    monkeypatch.setattr("escrowmq.broker.serving.room.STUCK_SECONDS", 0.01)
    with Client(slow.port, small=True) as deaf, Client(slow.port) as other:
        deaf.parcel(Exchange.SEND, ROW, {})
        assert slow.came.acquire(timeout=PATIENT)
        slow.waiting.pop(0)([(0, 1 << 40, 1 << 20, 1 << 40, bytes(16))] * 150_000)
        served.until(lambda: any(c.unsent_bytes for c in list(slow.serving._clients)))
        served.room.most_bytes = 1 << 20
        number = other.parcel(Exchange.SEND, ROW, {})
        assert slow.came.acquire(timeout=PATIENT)
        slow.answer()
        assert other.answer(number) == [(0, 1, 0, 0, None)]
        served.until(lambda: len(slow.serving._clients) == 1)


def test_a_request_without_room_waits_and_is_then_refused(slow, served, monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", 0.05)
    served.room.most_bytes = 4096
    with Client(slow.port) as first, Client(slow.port) as second, Client(slow.port) as third:
        first.parcel(Exchange.SEND, [(*ROW[0][:1], bytes(4000), *ROW[0][2:])], {})
        assert slow.came.acquire(timeout=PATIENT)
        assert second.answer(second.parcel(Exchange.SEND, ROW, {})).code is Code.QUEUE_FULL
        monkeypatch.setattr(room, "PATIENCE", PATIENT)
        number = third.parcel(Exchange.SEND, ROW, {})
        slow.answer()
        assert slow.came.acquire(timeout=PATIENT)
        slow.answer()
        assert third.answer(number) == [(0, 1, 0, 0, None)]


def test_a_callback_of_rows_that_do_not_travel_is_an_answer_all_the_same(slow):
    with Client(slow.port) as client:
        number = client.parcel(Exchange.SEND, ROW, {})
        assert slow.came.acquire(timeout=PATIENT)
        slow.waiting.pop()([(object(),)])
        assert client.answer(number).code is Code.BROKER_FAILED


def test_killed_in_the_middle_of_everything(slow, served):
    """Clients that end without a word while requests are under way: all that they held is given back with the last
    answer."""
    clients = [Client(slow.port) for _ in range(5)]
    for client in clients:
        client.parcel(Exchange.SEND, ROW, {})
        assert slow.came.acquire(timeout=PATIENT)
        client.send(frame_start(Kind.SEND, 9, 5000) + bytes(77))
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()
    served.until(lambda: not slow.serving._clients)
    assert served.room.used > 0
    slow.answer(5)
    assert served.room.used == 0


# Too many


@pytest.mark.invariant("I35")
def test_over_the_bound_who_never_greeted_goes_first(tmp_path):
    served = Served(tmp_path / "data", max_connections=3)
    try:
        with (
            served.client() as first,
            served.client() as second,
            served.client(greet=False) as mute,
            served.client() as third,
        ):
            assert mute.closed() == []
            first.receive(60_000, "g", member=1)
            served.calls.action("groups.subscribe", {"group": "h", "topics": ["t"]})
            first.receive(60_000, "h", member=1)
            first.send(frames.ping())
            while first.next().kind != Kind.PONG:
                pass
            third.send(frames.ping())
            assert third.next().kind == Kind.PONG
            with served.client() as fourth:
                assert second.closed() == []  # nothing under way, silent longest
                fourth.send(frames.ping())
                assert fourth.next().kind == Kind.PONG
    finally:
        served.stop()


def test_over_the_bound_who_waits_for_room_stays(tmp_path):
    served = Served(tmp_path / "data", max_connections=3)
    slow = Slow(served)
    listener = listen_tcp("127.0.0.1", 0)
    slow.port, slow.serving = listener.getsockname()[1], Server(slow, [listener], "slow", room=served.room)
    slow.serving.start()
    try:
        served.room.most_bytes = 4096
        with Client(slow.port) as first, Client(slow.port) as second:
            first.parcel(Exchange.SEND, [(*ROW[0][:1], bytes(4000), *ROW[0][2:])], {})
            assert slow.came.acquire(timeout=PATIENT)
            waiting = second.parcel(Exchange.SEND, ROW, {})
            served.until(lambda: slow.serving._paused)
            with Client(slow.port) as idle, Client(slow.port):
                assert idle.closed() == []
                slow.answer()
                assert slow.came.acquire(timeout=PATIENT)
                slow.answer()
                assert second.answer(waiting) == [(0, 1, 0, 0, None)]
    finally:
        slow.serving.stop()
        served.stop()


def test_there_is_a_bound_for_calls_too(tmp_path):
    served = Served(tmp_path / "data", max_calls=1)
    try:
        with served.client() as first, served.client() as second:
            first.send(frames.watch(1, served.session()))
            served.until(lambda: served.calls.action("producers.list", {})["producers"][0]["members"] == 1)
            with pytest.raises(EscrowError) as caught:
                second.act("topics.list")
            assert caught.value.code is Code.QUEUE_FULL
            assert second.plain(b"x")[0][0] == Code.OK
            first.send(frames.cancel(1))
            assert first.answer(1).kind == Kind.CHECKS  # it had begun
            assert first.answer(1).kind == Kind.DONE
            served.until(lambda: second.act("topics.list") if not served.room._call_count else None)
    finally:
        served.stop()


class Fussy(socket.socket):
    """A listening socket of a process that has no descriptor left, for a while."""

    refusals = 3
    tried = 0

    def accept(self):
        self.tried += 1
        if self.tried <= self.refusals:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.mark.invariant("I35")
def test_without_a_descriptor_nothing_spins_and_it_goes_on_with_one(served, monkeypatch, caplog):
    monkeypatch.setattr(server, "NO_DESCRIPTOR_SECONDS", 0.05)
    plain = listen_tcp("127.0.0.1", 0)
    listener = Fussy(fileno=plain.detach())
    listener.setblocking(False)
    serving = Server(served.calls, [listener], "fussy")
    serving.start()
    with Client(listener.getsockname()[1]) as client:
        assert client.plain(b"x")[0][0] == Code.OK
        assert listener.tried <= Fussy.refusals + 3
    serving.stop()
    assert sum("cannot be accepted" in record.message for record in caplog.records) == 1


# Faults of its own


def test_a_loop_that_fails_is_logged_and_begins_anew(served, monkeypatch, caplog):
    monkeypatch.setattr(server, "RESTART_SECONDS", 0.0)
    look, failed = Server._check_rules, threading.Event()

    def fails(self, now):
        if self is served.server and not failed.is_set():
            failed.set()
            raise RuntimeError("planted")
        return look(self, now)

    with served.client() as before:
        monkeypatch.setattr(Server, "_check_rules", fails)
        assert before.closed() == []
        with served.client() as after:
            assert after.plain(b"x")[0][0] == Code.OK
    assert "planted" in caplog.text
    assert failed.is_set()


def test_a_connection_that_fails_takes_no_other_along(served, monkeypatch, caplog):
    take = requests.Requests.take

    def fails(self, came):
        if any(b"planted" in bytes(one.body) for one in came):
            raise RuntimeError("planted")
        take(self, came)

    monkeypatch.setattr(requests.Requests, "take", fails)
    with served.client() as one, served.client() as other:
        one.send(frames.ping(b"planted"))
        assert one.closed() == []
        assert other.plain(b"x")[0][0] == Code.OK
    assert "planted" in caplog.text


# The end


def test_a_stop_says_goodbye_after_every_answer(tmp_path):
    served = Served(tmp_path / "data", default_queues=1)
    served.calls.action("groups.subscribe", {"group": "g", "topics": ["t"]})
    with served.client() as client:
        stored = client.parcel(Exchange.SEND, ROW, {})
        client.receive(60_000, "g", member=1)
        assert client.answer(stored)[0][0] == Code.OK
        served.stop()
        assert client.closed()[-1].kind == Kind.GONE
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", served.port), PATIENT)
    assert served.room.used == 0


def test_what_a_stopping_broker_is_asked_is_refused_as_by_a_stopped_shard(served):
    with served.client() as client:
        served.engine.stop()
        answer = client.plain(b"late")
        assert isinstance(answer, EscrowError)
        assert answer.code is Code.SHARD_STOPPED


def test_numbers_of_connections_requests_and_bytes(served):
    with served.client() as client:
        client.plain(b"x")
        there = served.server.numbers()
        assert (there["connections"], there["requests_total"]) == (1, 1)
    served.until(lambda: served.server.numbers()["connections"] == 0)
    gone = served.server.numbers()
    assert gone["connections_total"] == gone["requests_total"] == 1
    assert gone["received_bytes_total"] >= there["received_bytes_total"] > 0
    assert gone["sent_bytes_total"] > 0


# Pieces


def unread_connection(most=1 << 30):
    """A connection whose client does not read, and that client's socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    called = []
    connection = Connection(PlainChannel(ours), "peer", most, called.append, Assembler(100))
    while connection.send([[bytes(1 << 16)]]):
        pass
    return connection, theirs, called


def test_what_the_socket_does_not_take_is_kept_in_order_and_what_is_lost_is_told():
    connection, theirs, called = unread_connection()
    freed, lost = [], []
    connection.freed = freed.append
    for at in range(200):
        connection.send([[bytes([at])]], lambda at=at: lost.append(at))
    assert called
    assert connection.held.stuck_since is not None
    theirs.settimeout(PATIENT)
    seen = b""
    while connection.owes:
        seen += theirs.recv(1 << 16)
        connection.flush()
    assert connection.held.stuck_since is None
    theirs.setblocking(False)
    try:
        while True:
            seen += theirs.recv(1 << 16)
    except BlockingIOError:
        pass
    assert seen.endswith(bytes(range(200)))
    assert sum(freed) == 200 + (1 << 16)
    assert lost == []
    while connection.send([[bytes(1 << 16)]]):
        pass
    connection.send([[b"x"]], lambda: lost.append("kept"))
    connection.close()
    assert not connection.send([[b"y"]], lambda: lost.append("late"))
    assert lost == ["kept", "late"]
    assert connection.unsent_bytes == 0
    theirs.close()


def test_small_answers_pass_large_ones_and_large_ones_keep_their_order():
    connection, theirs, _ = unread_connection()
    freed = []
    for at in b"ABC":
        connection.send([[bytes([at]) * 50_000]], freed=freed.append, large=True)
    connection.send([[b"a" * 10]])
    connection.send([[b"D" * 50_000], [b"E" * 50_000]])  # one answer in two parts
    connection.send([[b"b" * 10]])
    theirs.settimeout(PATIENT)
    seen = b""
    while connection.owes:
        seen += theirs.recv(1 << 16)
        connection.flush()
    while not seen.endswith(b"E" * 50_000):
        seen += theirs.recv(1 << 16)
    order = "".join(
        letter for letter, before in zip(seen.decode(), "\0" + seen.decode()[:-1], strict=True) if letter != before
    )
    assert order == "abABCDE"
    assert sum(freed) == 150_000
    connection.close()
    theirs.close()


def test_who_is_owed_too_much_is_given_up():
    connection, theirs, called = unread_connection(1 << 10)
    assert not connection.broken  # one answer may be of any size
    connection.send([[bytes(2000)]])
    assert connection.broken
    assert called
    connection.close()
    theirs.close()


def test_a_socket_in_the_file_system(tmp_path, served):
    path = tmp_path / "socket"
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(Misuse):
        listen_unix(tmp_path / "file")
    listen_unix(path).close()  # what a killed broker leaves behind
    serving = Server(served.calls, [listen_unix(path)], "unix")
    serving.start()
    with pytest.raises(Misuse):
        listen_unix(path)
    assert path.stat().st_mode & 0o077 == 0
    with Client(0, family=socket.AF_UNIX, address=str(path)) as client:
        assert client.plain(b"x")[0][0] == Code.OK
    serving.stop()
