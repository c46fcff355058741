"""The rules that guard the server, each with every kind of frame: a client breaks the rule, and its neighbour is
answered.

``AT_A_COMPRESSED_BODY`` has a row for each kind, and ``WHOLE`` a frame of it; a kind of the protocol that has none
fails its tests.
"""

import contextlib
import itertools
import select
import socket
import struct

import frame_examples
import pyarrow as pa
import pytest
from served import PATIENT, Client, Served

from escrowmq.broker.serving import eviction, requests, room, server
from escrowmq.errors import Code
from escrowmq.schemas import OUTGOING
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame, frame_start
from escrowmq.wire.frames.rows import encoder

names = pytest.mark.parametrize
each_kind = names("kind", Kind, ids=lambda kind: kind.name)
MOST = 2_000_000
"""Frames: far more than the system keeps between two sockets."""
CROWD = 20
"""More connections than the broker allows."""

BATCH = outgoing([{"topic": "t", "body": b"y" * 80}])
HEAD = encoder.encode((Kind.SEND, encoder.encode({})))
"""That of COLUMNS."""
WHOLE = {Kind[name]: bytes(raw) for name, raw in frame_examples.EXAMPLES.items()} | {
    Kind.COLUMNS: frame(Kind.COLUMNS, 9, BATCH.serialize().to_pybytes(), HEAD),
    Kind.BATCH: frame(Kind.BATCH, 9, BATCH.serialize().to_pybytes()),
    Kind.SCHEMA: frame(Kind.SCHEMA, 9, OUTGOING.serialize().to_pybytes()),
    Kind.PART: frame(Kind.PART, 9, BATCH.serialize().to_pybytes()),
    Kind.CHECKS: frame(Kind.CHECKS, 9, BATCH.serialize().to_pybytes()),
}

REFUSED, CLOSED, IGNORED = "refused", "closed", "ignored"
AT_A_COMPRESSED_BODY = {
    **dict.fromkeys([kind for kind in Kind if kind >= 0x80], REFUSED),  # a broker's
    Kind.HELLO: REFUSED,
    Kind.SEND: REFUSED,
    Kind.PREPARE: REFUSED,
    Kind.END: REFUSED,
    Kind.SETTLE: REFUSED,
    Kind.RECEIVE: REFUSED,
    Kind.COLUMNS: REFUSED,
    Kind.CANCEL: IGNORED,
    Kind.PING: CLOSED,
    Kind.GOODBYE: CLOSED,
    Kind.ACTION: REFUSED,
    Kind.READ: REFUSED,
    Kind.CREDIT: IGNORED,
    Kind.WATCH: REFUSED,
}


def compressed(codec):
    """A batch that this codec has compressed, as one message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, OUTGOING, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(outgoing([{"topic": "t", "body": bytes(1 << 20)}]))
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    return messages.read_next_message().serialize().to_pybytes()


COMPRESSED = compressed("zstd")
sequences = itertools.count(1)


def is_served(client):
    answer = client.plain(b"x", sequence=next(sequences))
    return answer[0][0] == Code.OK


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = Served(
        tmp_path_factory.mktemp("every") / "data", send_bytes=4096, max_held_bytes=8 << 20, max_connections=CROWD // 2
    )
    yield made
    made.stop()


@pytest.fixture
def neighbour(shared, monkeypatch):
    """A client that is answered, before and after."""
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.02)
    with shared.client() as client:
        yield client
        assert is_served(client)
    shared.until(lambda: shared.room.used == 0 and not shared.server._clients)


def begin(shared, kind):
    """A client whose first frame is of this kind, if that is the greeting, or else its second."""
    return shared.client(greet=kind != Kind.HELLO)


def until_pong(client):
    """The frames until the answer to a ping; and whether there was one."""
    client.send(frames.ping(b"on"))
    came = []
    while (one := client.next()) is not None and not (one.kind == Kind.PONG and bytes(one.body) == b"on"):
        came.append(one)
    return came, one is not None


# The rules. Each closes what it has opened, or has it closed.


def silent(shared, kind, monkeypatch):
    """It has not greeted, and says no more than what kind of frame this is."""
    monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
    with shared.client(greet=False) as client:
        with contextlib.suppress(ConnectionError):  # the broker was faster
            client.send(WHOLE[kind][:5])
        assert client.closed() == []


def slow(shared, kind, monkeypatch):
    """It is never silent, and never completes a frame."""
    with begin(shared, kind) as client:
        monkeypatch.setattr(server, "FRAME_SECONDS", 0.05)
        monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
        rest = frame(kind, 1, b"x" * 1500)
        with contextlib.suppress(ConnectionError):  # closed while it sends
            while len(rest) > 1 and not select.select([client.socket], [], [], 0.02)[0]:
                client.send(rest[:1])
                rest = rest[1:]
        assert len(rest) > 1, "it is waited for as long as it drips"
        assert [one.kind for one in client.closed()] in ([], [Kind.ERROR])


def excess(shared, kind, monkeypatch):
    """More connections than allowed, none of which completes a first frame."""
    crowd = [shared.client(greet=False) for _ in range(CROWD)]
    try:
        for client in crowd:
            try:
                client.send(WHOLE[kind][:5])
            except ConnectionError:
                pass  # closed, as most are
        closed = 0
        while closed < CROWD // 2:
            ready, _, _ = select.select([client.socket for client in crowd], [], [], PATIENT)
            assert ready, "they may stay"
            for client in [client for client in crowd if client.socket in ready]:
                assert client.closed() == []
                crowd.remove(client)
                client.socket.close()
                closed += 1
        with shared.client() as polite:
            assert is_served(polite)
    finally:
        for client in crowd:
            client.socket.close()


def endless(shared, kind, monkeypatch):
    """They announce much, send some of it, and keep the rest."""
    monkeypatch.setattr(room, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(eviction, "STUCK_SECONDS", 0.05)
    clients = [begin(shared, kind) for _ in range(8)]
    try:
        for client in clients:
            client.send(frame_start(kind, 1, 700 << 10) + bytes(10))
        shared.until(lambda: len(shared.server._clients) <= 3)
        with shared.client() as polite:
            assert is_served(polite)
    finally:
        for client in clients:
            client.socket.close()


def half_a_frame(shared, kind, monkeypatch):
    """All but its last byte."""
    with begin(shared, kind) as client:
        monkeypatch.setattr(server, "FRAME_SECONDS", 0.05)
        monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
        client.send(WHOLE[kind][:-1])
        assert client.closed() == []


def oversize(shared, kind, monkeypatch):
    """A byte more than a frame may have, refused by its header."""
    with begin(shared, kind) as client:
        most = client.welcome.max_request_bytes if client.welcome else frames.MAX_HELLO_BYTES
        client.send(struct.pack("<IBBHQ", most - 4 + 1, kind, 0, 0, 1))
        assert [(one.kind, one.number) for one in client.closed()] == [(Kind.ERROR, 0)]


def has_compressed(shared, kind, monkeypatch):
    """A compressed batch, which would take more memory than its frame."""
    head = WHOLE[kind][frames.HEADER_BYTES :][: struct.unpack_from("<H", WHOLE[kind], 6)[0]]
    with shared.client() as client:
        client.send(frame(kind, 5, COMPRESSED, head))
        outcome = AT_A_COMPRESSED_BODY[kind]
        came = [client.next()] if outcome == REFUSED else []
        assert [(one.kind, one.number) for one in came] == [(Kind.ERROR, 5)] * len(came)
        if kind == Kind.COLUMNS:
            assert "compressed" in frames.read_refusal(came[0]).message
        more, goes_on = until_pong(client)
        assert goes_on == (outcome != CLOSED)
        assert [one.kind for one in more] in ([], [Kind.ERROR] if outcome == CLOSED else [])


RULES = {
    "silent": silent,
    "slow": slow,
    "excess": excess,
    "endless": endless,
    "half a frame": half_a_frame,
    "oversize": oversize,
    "compressed": has_compressed,
}


@pytest.mark.invariant("I35")
@names("rule", RULES)
@each_kind
def test_a_rule_holds_for_a_kind_of_frame(shared, neighbour, monkeypatch, rule, kind):
    RULES[rule](shared, kind, monkeypatch)


def test_every_kind_has_a_row():
    assert set(WHOLE) == set(AT_A_COMPRESSED_BODY) == set(Kind)


@each_kind
def test_a_newcomer_is_served_whatever_the_many_have_sent(shared, kind):
    """They have greeted, and may have sent requests: each newcomer takes the place of one of them."""
    crowd = []
    try:
        for _ in range(CROWD):
            crowd.append(shared.client())
            crowd[-1].send(WHOLE[kind])
        with shared.client() as polite:
            assert is_served(polite)
        assert shared.server.numbers()["connections"] <= CROWD // 2 + server.OVER_BOUND
    finally:
        for client in crowd:
            client.socket.close()
    shared.until(lambda: not shared.server._clients)


@each_kind
def test_garbage_is_refused_and_holds_nothing(shared, neighbour, kind):
    with shared.client() as client:
        client.send(frame(kind, 5, b"\xff" * 64))
        came, goes_on = until_pong(client)
        answered = {Kind.CANCEL: [], Kind.CREDIT: [], Kind.GOODBYE: [], Kind.PING: [Kind.PONG]}
        assert [one.kind for one in came] == answered.get(kind, [Kind.ERROR])
        assert goes_on == (kind != Kind.GOODBYE), "it goes on, but for who has said goodbye"


@names(
    "kind", [kind for kind in Kind if kind not in (Kind.CANCEL, Kind.CREDIT, Kind.GOODBYE)], ids=lambda kind: kind.name
)
def test_who_does_not_read_its_answers_is_not_read_from(shared, neighbour, monkeypatch, kind):
    """It cannot send for ever: the broker stops reading before it holds much."""
    monkeypatch.setattr(requests, "UNREAD_BYTES", 1 << 12)
    with Client(shared.port, small=True) as deaf:
        deaf.socket.setblocking(False)
        number, blocked, rest = 0, 0, b""
        while blocked < 10 and number < MOST:
            number += not rest
            body = b"x" * (frames.MAX_PING_BYTES if kind == Kind.PING else 8)
            rest = rest or frame(kind, 0 if kind == Kind.PING else number, body)
            try:
                rest = rest[deaf.socket.send(rest) :]
            except BlockingIOError:
                blocked += not select.select([], [deaf.socket], [], 0.03)[1]
        assert blocked, "it is read from for ever"
        assert shared.room.used < 16 << 20
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
