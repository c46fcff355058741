"""A broker that speaks the protocol in front of a twin, with faults on demand."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

from escrowmq.client.links.link import ServedLink
from escrowmq.errors import Code, EscrowError, error
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, frames
from escrowmq.wire.addresses import Address
from escrowmq.wire.frames import Assembler, Kind, Welcome
from escrowmq.wire.parcels import answer_of, batch_of

PATIENCE = 60.0
MOST = 1 << 20
"""Bytes of a request that it takes."""
KINDS = {Kind.SEND, Kind.PREPARE, Kind.END, Kind.SETTLE}


class FramedBroker:
    """Listens on a port, or ``path``, and answers from ``twin`` on a thread for each connection.

    ``silent``: accepts and says nothing. ``deaf``: welcomes, and reads nothing more. ``mute``: takes requests and
    answers none. ``says``: bytes in the place of the next answer, ``greets``: of a welcome. ``refusal``: instead of a
    welcome.
    """

    def __init__(self, twin, path=None, port=0):
        self.twin = twin
        self.silent = self.deaf = self.mute = self.closing = False
        self.refusal = self.says = self.greets = None
        self.shard = twin.shard
        self.kinds = []
        self.pings = self.cancels = self.goodbyes = self.hellos = 0
        self.news = threading.Condition()
        self.connections = []
        self.receives = set()  # without an answer
        self.heard = []  # of each connection, the kinds of its frames
        if path is None:
            self.server = socket.create_server(("127.0.0.1", port))
            self.address = Address("127.0.0.1", self.server.getsockname()[1])
        else:
            self.server = socket.socket(socket.AF_UNIX)
            self.server.bind(str(path))
            self.server.listen()
            self.address = Address(str(path), 0)
        self.server.settimeout(1.0)
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def link(self, **options):
        return ServedLink([self.address], **options)

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
        self.closing, self.deaf = True, False
        self._tell()
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:  # the first one accepts connections: after it no thread is added
            for _ in range(600):
                self.drop()  # also those accepted meanwhile
                thread.join(0.1)
                if not thread.is_alive():
                    break
            else:
                raise AssertionError(f"{thread} still runs; {len(self.connections)} connections: {self.heard}")
        self.server.close()

    def _tell(self):
        with self.news:
            self.news.notify_all()

    def _accept(self):
        while not self.closing:
            with suppress(OSError):
                client, _ = self.server.accept()
                self.connections.append(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                thread.start()
                self.threads.append(thread)

    def _serve(self, client):
        assembler, lock = Assembler(1 << 30), threading.Lock()
        self.heard.append(heard := [])
        with client, suppress(OSError):
            while count := client.recv_into(assembler.target()):
                for frame in assembler.filled(count):
                    heard.append(frame.kind)
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
            self.hellos += 1
            hello = {**TwinLink.action(self.twin, "hello", {}, 1), "shard": self.shard}
            welcome = Welcome(frames.FORMAT_VERSION, 1, "0", MOST, 4096, 64 << 20)
            said = frames.refused(0, self.refusal) if self.refusal else frames.welcome(welcome, hello)
            client.sendall(self.greets or said)
        elif kind == Kind.PING:
            self.pings += 1
            if not self.mute:
                answer(frames.pong(bytes(frame.body)))
        elif kind == Kind.GOODBYE:
            self.goodbyes += 1
            for receive in self.receives:
                answer(frames.withdrawn(receive))
            self.receives.clear()
        elif kind == Kind.CANCEL:
            self.cancels += 1
            self.receives.discard(number)
            answer(frames.withdrawn(number))
        elif kind == Kind.ACTION and self.mute:
            pass
        elif kind == Kind.ACTION:
            name, request = frames.read_action(frame)
            try:
                answer(frames.result(number, TwinLink.action(self.twin, name, request, 1)))
            except EscrowError as problem:
                answer(frames.refused(number, problem))
        else:
            self._request(answer, frame)

    def _request(self, answer, frame):
        kind, number, parcel = frame.kind, frame.number, None
        if kind in KINDS:
            parcel = frames.read_parcel(frame)
            of, batch, options = parcel.kind, batch_of(parcel), parcel.options
        elif kind == Kind.RECEIVE:
            of, batch, options = Exchange.RECEIVE, None, frames.read_receive(frame)
        else:
            of, batch, options = frames.read_columns(frame)
        self.kinds.append(of)
        if self.mute:
            return
        future = TwinLink.exchange(self.twin, of, batch, dict(options))
        if of is Exchange.RECEIVE:
            self.receives.add(number)

        def done(answered):
            self.receives.discard(number)
            problem = answered.exception()
            if isinstance(problem, EscrowError):
                answer(frames.refused(number, problem))
            elif parcel is None:
                parts = frames.batch_answer(number, answered.result())
                answer(b"".join(bytes(piece) for part in parts for piece in part))
            else:
                rows = answer_of(of, answered.result())
                answer(
                    frames.codes_answer(number, rows) if isinstance(rows, bytes) else frames.rows_answer(number, rows)
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


def framed(kind, number, body=b""):
    return struct.pack("<IBBHQ", 12 + len(body), kind, 0, 0, number) + body


GARBAGE = {
    "a length that cannot be one": bytes(4) + b"\xff" + bytes(20),
    "a length over the limit": b"\xff\xff\xff\xff\x82" + bytes(20),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an answer that nobody asked for": bytes(frames.codes_answer(1 << 40, b"\0")),
    "an unknown kind": framed(0xEE, 1),
    "rows that are none": framed(Kind.ROWS, 1, b"\xc1"),
    "an answer to another kind": bytes(frames.codes_answer(1, b"\0")),
    "a batch for a parcel": framed(Kind.BATCH, 1, b"abc"),
    "the end of the connection": bytes(frames.refused(0, error(Code.TOO_MANY))),
}
