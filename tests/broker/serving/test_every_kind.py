"""The rules that guard the server, for every kind of frame that a client can send: half a frame, endless, oversize,
garbage, answers that nobody reads. Each time a neighbour is answered.
"""

import select
import socket
import struct

import pytest
from served import Client, Served

from escrowmq.broker.serving import eviction, requests, room, server
from escrowmq.wire import frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame, frame_start

FROM_CLIENTS = [kind for kind in Kind if kind < 0x80]
GREETED = [kind for kind in FROM_CLIENTS if kind != Kind.HELLO]
ANSWERED = [kind for kind in GREETED if kind not in (Kind.CANCEL, Kind.CREDIT, Kind.GOODBYE)]
names = pytest.mark.parametrize
MOST = 2_000_000
"""Frames: far more than the system keeps between two sockets."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("every") / "data")
    yield made
    made.stop()


@pytest.fixture
def neighbour(shared):
    """A client that is answered, before and after."""
    with shared.client() as client:
        yield client
        client.send(frames.ping(b"still"))
        while (came := client.next()).kind != Kind.PONG:
            pass
        assert bytes(came.body) == b"still"
    shared.until(lambda: shared.room.used == 0)


@names("kind", FROM_CLIENTS, ids=lambda kind: kind.name)
def test_half_a_frame_is_given_up(shared, neighbour, monkeypatch, kind):
    monkeypatch.setattr(server, "FRAME_SECONDS", 0.05)
    with shared.client(greet=kind != Kind.HELLO) as dripping:
        monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
        dripping.send(frame(kind, 1, b"x" * 40)[:-7])
        assert [one.kind for one in dripping.closed()] in ([], [Kind.ERROR])


@names("kind", FROM_CLIENTS, ids=lambda kind: kind.name)
def test_a_frame_that_comes_byte_by_byte_is_given_up(shared, neighbour, monkeypatch, kind):
    """Its client is never silent, and never completes it."""
    monkeypatch.setattr(server, "FRAME_SECONDS", 0.05)
    with shared.client(greet=kind != Kind.HELLO) as dripping:
        monkeypatch.setattr(server, "SILENT_SECONDS", 0.05)
        rest = frame(kind, 1, b"x" * 1500)
        while len(rest) > 1 and not select.select([dripping.socket], [], [], 0.01)[0]:
            dripping.send(rest[:1])
            rest = rest[1:]
        assert len(rest) > 1, "it is waited for as long as it drips"
        assert [one.kind for one in dripping.closed()] in ([], [Kind.ERROR])


@names("kind", FROM_CLIENTS, ids=lambda kind: kind.name)
def test_an_oversize_frame_is_refused_by_its_header(shared, neighbour, kind):
    with shared.client(greet=kind != Kind.HELLO) as rude:
        rude.send(struct.pack("<IBBHQ", (1 << 32) - 16, kind, 0, 0, 1))
        came = rude.closed()
        assert [one.kind for one in came] == [Kind.ERROR]
        assert came[0].number == 0


@names("kind", GREETED, ids=lambda kind: kind.name)
def test_endless_frames_are_bounded_together(tmp_path, monkeypatch, kind):
    """Who announces much and sends nothing is closed, whatever it is said to be."""
    monkeypatch.setattr(room, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(eviction, "STUCK_SECONDS", 0.05)
    served = Served(tmp_path / "data", max_held_bytes=8 << 20)
    clients = [served.client() for _ in range(8)]
    try:
        for client in clients:
            client.send(frame_start(kind, 1, 700 << 10) + bytes(10))
        served.until(lambda: len(served.server._clients) <= 3)
        with served.client() as polite:
            assert polite.plain(b"x")[0][0] == 0
    finally:
        for client in clients:
            client.socket.close()
        served.stop()


@names("kind", GREETED, ids=lambda kind: kind.name)
def test_garbage_is_refused_and_holds_nothing(shared, neighbour, kind):
    with shared.client() as client:
        client.send(frame(kind, 5, b"\xff" * 64))
        client.send(frames.ping(b"on"))
        came = []
        while (one := client.next()) is not None and not (one.kind == Kind.PONG and bytes(one.body) == b"on"):
            came.append(one)
        answered = {Kind.CANCEL: [], Kind.CREDIT: [], Kind.GOODBYE: [], Kind.PING: [Kind.PONG]}
        assert [one.kind for one in came] == answered.get(kind, [Kind.ERROR])
        assert (one is None) == (kind == Kind.GOODBYE), "it goes on, but for who has said goodbye"


@names("kind", ANSWERED, ids=lambda kind: kind.name)
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
