"""A lean carrier in front of a twin, with faults on demand, and the Flight link that tells where it is."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

from escrowmq.errors import Code, EscrowError, error
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, lean
from escrowmq.wire.lean import Kind
from escrowmq.wire.lean.requests import read_batch, read_parcel, read_receive
from escrowmq.wire.parcels import answer_of, batch_of

PATIENCE = 20.0
MOST = 1 << 16
"""Bytes of a request that it takes."""
KINDS = {Kind.SEND, Kind.PREPARE, Kind.END, Kind.SETTLE}


class TwinFlight(TwinLink):
    """The Flight link behind a LeanLink. ``flown``: the kinds of requests that took it."""

    host = "127.0.0.1"
    there = True
    several = False

    def __init__(self):
        super().__init__()
        self.lean = None
        self.epoch = 1
        self.hello = None
        self.flown = []
        self.looks = 0
        self.hellos = 0

    def reconnect(self):
        """As when the connection was lost and made anew."""
        self.hello = self.action("hello", {}, 1)

    def doubt(self, problem):
        """Connect anew when it is next needed."""
        self.hello = None

    def refused(self, hello, problem):
        """What the broker that says so is: the only one."""

    def look_around(self, silent):
        """There is no other broker of this shard."""
        self.looks += 1

    def greeting(self, timeout):
        if self.hello is None:
            self.reconnect()
        return self.hello

    def action(self, name, request, timeout):
        answer = super().action(name, request, timeout)
        if name == "hello":
            self.hellos += 1
            answer = {**answer, "epoch": self.epoch, "lean": self.lean}
        return answer

    def close(self):
        """The broker behind it goes on."""

    def exchange(self, kind, batch, options):
        self.flown.append(kind)
        return super().exchange(kind, batch, options)


class LeanBroker:
    """Listens on a port, or ``path``, and answers from ``twin`` on a thread for each connection.

    ``silent``: accepts and says nothing. ``deaf``: welcomes, and reads nothing more. ``mute``: takes requests and answers none.
    ``says``: bytes in the place of the next answer, ``greets``: of a welcome. ``refusal``: instead of a welcome.
    """

    def __init__(self, twin, path=None, port=0):
        self.twin = twin
        self.silent = self.deaf = self.mute = False
        self.refusal = self.says = self.greets = None
        self.shard, self.epoch = twin.shard, 1
        self.kinds = []
        self.pings = self.cancels = self.goodbyes = 0
        self.news = threading.Condition()
        self.connections = []
        self.path = None
        if path is None:
            self.server = socket.create_server(("127.0.0.1", port))
            self.port = self.server.getsockname()[1]
        else:
            self.server = socket.socket(socket.AF_UNIX)
            self.server.bind(str(path))
            self.server.listen()
            self.port = None
            self.path = str(path)
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    @property
    def place(self):
        return {"port": self.port, "socket": self.path}

    def wait(self, condition):
        with self.news:
            assert self.news.wait_for(condition, PATIENCE), "it did not come to pass"

    def drop(self):
        """Break every connection."""
        for client in self.connections:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def say(self, raw):
        for client in self.connections:
            client.sendall(raw)

    def close(self):
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.deaf = False
        self._tell()
        self.drop()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _tell(self):
        with self.news:
            self.news.notify_all()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.server.accept()
                self.connections.append(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                self.threads.append(thread)
                thread.start()

    def _serve(self, client):
        reader, lock = lean.Reader(lean.MAX_REQUEST_BYTES), threading.Lock()
        with client, suppress(OSError):
            while data := client.recv(1 << 16):
                for frame in reader.feed(data):
                    self._came(client, lock, frame)
                    self._tell()
                with self.news:
                    self.news.wait_for(lambda: not self.deaf)
        self._tell()

    def _came(self, client, lock, frame):
        kind, number = frame.kind, frame.number

        def answer(raw):
            raw, self.says = (raw, None) if self.says is None else (self.says, None)
            with lock, suppress(OSError):
                client.sendall(raw)

        if self.silent:
            return
        if kind == Kind.HELLO:
            welcome = lean.Welcome(1, 1, self.shard, self.epoch, "0", MOST, 4096, 64 << 20)
            said = lean.refused(0, self.refusal) if self.refusal else lean.welcome(welcome)
            client.sendall(self.greets or said)
        elif kind == Kind.PING:
            self.pings += 1
            if not self.mute:
                answer(lean.pong(bytes(frame.content)))
        elif kind == Kind.GOODBYE:
            self.goodbyes += 1
        elif kind == Kind.CANCEL:
            self.cancels += 1
            answer(lean.withdrawn(number))
        else:
            self._request(answer, kind, number, frame.content)

    def _request(self, answer, kind, number, content):
        parcel = None
        if kind in KINDS:
            parcel = read_parcel(kind, content)
            of, batch, options = parcel.kind, batch_of(parcel), parcel.options
        elif kind == Kind.RECEIVE:
            of, batch, options = Exchange.RECEIVE, None, read_receive(content)
        else:
            of, batch, options = read_batch(content)
        self.kinds.append(of)
        if self.mute:
            return
        future = TwinLink.exchange(self.twin, of, batch, dict(options))

        def done(answered):
            problem = answered.exception()
            if isinstance(problem, EscrowError):
                answer(lean.refused(number, problem))
            elif parcel is None:
                answer(lean.batch_answered(number, answered.result()))
            else:
                rows = answer_of(of, answered.result())
                answer(
                    lean.codes_answered(number, rows) if isinstance(rows, bytes) else lean.rows_answered(number, rows)
                )

        future.add_done_callback(done)


def reset(client):
    """Close it so that the other end reads an error instead of an end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        threading.Event().wait(0.005)
    return found


GARBAGE = {
    "a length that cannot be one": b"\x00\x00\x00\x00\xff" + bytes(20),
    "a length over the limit": b"\xff\xff\xff\xff\x82" + bytes(20),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an answer that nobody asked for": bytes(lean.codes_answered(1 << 40, b"\0")),
    "an unknown kind": struct.pack("<IBQ", 9, 0xEE, 1),
    "rows that are none": struct.pack("<IBQ", 10, Kind.ROWS, 1) + b"\xc1",
    "an answer to another kind": bytes(lean.codes_answered(1, b"\0")),
    "a batch for a parcel": struct.pack("<IBQ", 12, Kind.ANSWERED, 1) + b"abc",
    "the end of the connection": bytes(lean.refused(0, error(Code.TOO_MANY))),
}
