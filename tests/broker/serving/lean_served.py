"""A broker with the lean carrier inside a test's process, and a client of bare sockets."""

import itertools
import socket
import threading

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import open_engine
from escrowmq.broker.serving.lean.listening import listen_tcp
from escrowmq.broker.serving.lean.server import LeanServer
from escrowmq.broker.serving.room import Room
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Exchange, Parcel, lean
from escrowmq.wire.lean import Kind

PATIENT = 60.0
"""Seconds after which something that should happen has surely not happened."""


class Served:
    """What is inside can be stopped piece by piece. ``calls`` may stand in for an engine's."""

    def __init__(self, folder, **settings):
        self.engine = open_engine(folder, BrokerSettings(segment_bytes=1 << 22, **settings))
        self.engine.start()
        self.calls = Calls(self.engine)
        self.room = Room(self.engine.settings.max_held_bytes, self.engine.settings.max_calls, lambda _: None)
        self.serve()

    def serve(self):
        listener = listen_tcp("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.server = LeanServer(self.calls, self.room, [listener], "test")
        self.server.start()

    def client(self, *, greet=True):
        return Client(self.port, greet=greet)

    def session(self, group="shop", instance="one", transactional=True):
        request = {"group": group, "instance": instance, "transactional": transactional}
        return self.calls.action("session.open", request)["session"]

    def until(self, ready):
        """Look until something is so; the loop has no other way to say so."""
        ended = threading.Event()
        for _ in range(int(PATIENT * 100)):
            if ready():
                return
            ended.wait(0.01)
        raise AssertionError("it did not come to that")

    def stop(self):
        self.engine.stop()
        self.calls.close()
        self.server.stop()


class Client:
    """One connection. ``ask`` sends a frame and waits for an answer to its number."""

    def __init__(self, port, *, greet=True, family=socket.AF_INET, address=None, small=False):
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if small:  # little fits into the system's buffers
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(PATIENT)
        self.socket.connect(address or ("127.0.0.1", port))
        self.reader = lean.Reader(1 << 30)
        self.frames = []
        self.numbers = itertools.count(1)
        self.welcome = None
        if greet:
            self.socket.sendall(lean.hello())
            self.welcome = lean.read_answer(self.next())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def next(self):
        """The next frame; None at the end of the stream."""
        while not self.frames:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)

    def answer(self, number, kind=None):
        """The answer to a request, whatever else comes before it is dropped."""
        while (came := self.next()) is not None:
            if came.number == number and came.kind != Kind.WELCOME:
                return lean.read_answer(came, kind)
        raise ConnectionError("closed before the answer")

    def parcel(self, kind, rows, options, first=(7, 1)):
        number = next(self.numbers)
        self.send(lean.parcel_request(number, Parcel(kind, rows, options, first)))
        return number

    def prepare(self, session, *bodies, sequence=1):
        rows = [("t", body, None, None, None, None, -1, 0, 0, 0, None) for body in bodies]
        return self.answer(self.parcel(Exchange.PREPARE, rows, {"session": session}, (7, sequence)))

    def plain(self, *bodies, sequence=1):
        rows = [("t", body, None, None, None, None, 0, 0, 0, 0, None) for body in bodies]
        return self.answer(self.parcel(Exchange.SEND, rows, {}, (9, sequence)))

    def receive(self, wait_ms=0, group="g", member=1, **more):
        number = next(self.numbers)
        self.send(lean.receive_request(number, {"group": group, "member": member, "wait_ms": wait_ms, **more}))
        return number

    def closed(self):
        """Read to the end; the frames that came."""
        came = []
        while (frame := self.next()) is not None:
            came.append(frame)
        return came
