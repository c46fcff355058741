"""A served broker inside a test's process, and a client of bare sockets."""

import itertools
import json
import socket
import threading

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import open_engine
from escrowmq.broker.serving.listening import listen_tcp
from escrowmq.broker.serving.server import Server
from escrowmq.errors import EscrowError
from escrowmq.settings import BrokerSettings
from escrowmq.wire import ANSWER, Exchange, Parcel, frames
from escrowmq.wire.frames import Assembler, Gatherer, Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

PATIENT = 60.0
"""Seconds after which something that should happen has surely not happened."""


class Served:
    """What is inside can be stopped piece by piece. ``send_bytes``: how many the system keeps of what clients do not
    read, if it should be few."""

    def __init__(self, folder, *, tls=None, guard=None, send_bytes=None, **settings):
        self.folder, self.settings, self.tls = folder, BrokerSettings(segment_bytes=1 << 22, **settings), tls
        self.send_bytes = send_bytes
        self.guard = guard
        self.port = 0
        self.start()

    def start(self):
        self.engine = open_engine(self.folder, self.settings)
        self.engine.start()
        self.calls = Calls(self.engine)
        listener = listen_tcp("127.0.0.1", self.port)
        if self.send_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_bytes)
        self.port = listener.getsockname()[1]
        self.server = Server(self.calls, [listener], "test", tls=self.tls, guard=self.guard)
        self.room = self.server.room
        if self.guard is not None:
            self.calls.beside["hello"] = lambda: {"rights": self.guard.rights.digest}
        self.server.start()

    def client(self, *, greet=True, small=False, token=None, tls=None):
        return Client(self.port, greet=greet, small=small, token=token, tls=tls)

    def session(self, group="shop", instance="one", transactional=True):
        request = {"group": group, "instance": instance, "transactional": transactional}
        return self.calls.action("session.open", request)["session"]

    def act(self, name, request=None):
        with self.client() as client:
            return client.act(name, request)

    def until(self, ready):
        """Look until something is so; the loop has no other way to say so."""
        ended = threading.Event()
        for _ in range(int(PATIENT * 100)):
            if ready():
                return
            ended.wait(0.01)
        raise AssertionError("it did not come to that")

    def stop(self, grace=0.25):
        self.engine.stop()
        self.calls.close()
        self.server.stop(grace)


class Client:
    """One connection. ``answer`` waits for the answer to a number."""

    def __init__(self, port, *, greet=True, family=socket.AF_INET, address=None, small=False, token=None, tls=None):
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if small:  # little fits into the system's buffers
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(PATIENT)
        self.socket.connect(address or ("127.0.0.1", port))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.assembler = Assembler(1 << 30)
        self.gatherer = Gatherer(1 << 30)
        self.frames = []
        self.numbers = itertools.count(1)
        self.welcome = self.hello = None
        if greet:
            self.socket.sendall(frames.hello(token))
            came = self.next()
            if came.kind == Kind.ERROR:
                self.socket.close()
                raise frames.read_refusal(came)
            self.welcome, self.hello = frames.read_welcome(came)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, *pieces):
        self.socket.sendall(b"".join(bytes(piece) for piece in pieces))

    def next(self):
        """The next frame; None at the end of the stream."""
        while not self.frames:
            try:
                count = self.socket.recv_into(self.assembler.target())
            except ConnectionError:
                return None
            if not count:
                return None
            self.frames += self.assembler.filled(count)
        return self.frames.pop(0)

    def answer(self, number, kind=None):
        """The answer to a request, whatever else comes before it is dropped. ``kind``: of the exchange, of a batch."""
        while (came := self.next()) is not None:
            if came.number == number and came.kind != Kind.WELCOME:
                if came.kind == Kind.BATCH and (body := self.gatherer.add(came)) is None:
                    continue
                return self.read(came, body if came.kind == Kind.BATCH else None, kind)
        raise ConnectionError("closed before the answer")

    @staticmethod
    def read(came, body=None, kind=None):
        if came.kind == Kind.ERROR:
            return frames.read_refusal(came)
        if came.kind in (Kind.ROWS, Kind.CODES):
            return frames.read_rows(came)
        if came.kind == Kind.RESULT:
            return frames.read_result(came)
        if came.kind == Kind.BATCH:
            return frames.decode_batch(body, ANSWER[kind])
        return came

    def act(self, name, request=None):
        """An action; ``request`` may be bytes. Raises the broker's error."""
        number = next(self.numbers)
        body = request if isinstance(request, bytes) else json.dumps(request or {}).encode()
        self.send(frame(Kind.ACTION, number, body, encoder.encode(name)))
        answer = self.answer(number)
        if isinstance(answer, EscrowError):
            raise answer
        return answer

    def batch(self, kind, batch, options=None):
        number = next(self.numbers)
        self.send(*frames.columns_request(number, kind, batch, options or {}))
        return self.answer(number, kind)

    def begin_read(self, request, credit=frames.READ_CREDIT):
        number = next(self.numbers)
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        self.send(frame(Kind.READ, number, body, encoder.encode(credit)))
        return number

    def read_all(self, request, credit=frames.READ_CREDIT):
        """The rows of a read, as dictionaries. Raises the broker's error."""
        number, rows, schema = self.begin_read(request, credit), [], None
        while (came := self.next()) is not None:
            if came.number != number:
                continue
            if came.kind == Kind.SCHEMA:
                schema = frames.read_schema(came)
            elif came.kind == Kind.PART:
                self.send(frames.credit(number, len(came.body)))
                if (body := self.gatherer.add(came)) is not None:
                    rows += frames.decode_batch(body, schema).to_pylist()
            elif came.kind == Kind.ERROR:
                raise frames.read_refusal(came)
            else:
                assert came.kind == Kind.DONE
                return rows
        raise ConnectionError("closed before the end")

    def parcel(self, kind, rows, options, first=(7, 1)):
        number = next(self.numbers)
        self.send(frames.parcel_request(number, Parcel(kind, rows, options, first)))
        return number

    def prepare(self, session, *bodies, sequence=1):
        rows = [("t", body, None, None, None, None, -1, 0, 0, 0, None) for body in bodies]
        return self.answer(self.parcel(Exchange.PREPARE, rows, {"session": session}, (7, sequence)))

    def plain(self, *bodies, sequence=1):
        rows = [("t", body, None, None, None, None, 0, 0, 0, 0, None) for body in bodies]
        return self.answer(self.parcel(Exchange.SEND, rows, {}, (9, sequence)))

    def receive(self, wait_ms=0, group="g", member=1, **more):
        number = next(self.numbers)
        self.send(frames.receive_request(number, {"group": group, "member": member, "wait_ms": wait_ms, **more}))
        return number

    def closed(self):
        """Read to the end; the frames that came."""
        came = []
        while (one := self.next()) is not None:
            came.append(one)
        return came
