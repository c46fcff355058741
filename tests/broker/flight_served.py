"""A served broker inside a test's process."""

import json
from contextlib import contextmanager

from pyarrow import flight

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import open_engine
from escrowmq.broker.serving.service import Service
from escrowmq.settings import BrokerSettings
from escrowmq.wire import unpack_error, unpack_json


class Served:
    """A broker in this process, and a client of Flight's own. What is inside can be stopped piece by piece."""

    def __init__(self, folder, **settings):
        self.folder, self.settings, self.port = folder, BrokerSettings(segment_bytes=1 << 22, **settings), 0
        self.start()
        self.client = flight.connect(f"grpc+tcp://127.0.0.1:{self.port}")

    def start(self):
        self.engine = open_engine(self.folder, self.settings)
        self.engine.start()
        self.calls = Calls(self.engine)
        self.service = Service(self.calls, "127.0.0.1", self.port)
        self.port = self.service.port

    def stop(self):
        self.engine.stop()
        self.calls.close()
        self.service.stop()

    def act(self, name, request=None):
        body = request if isinstance(request, bytes) else json.dumps(request or {}).encode()
        try:
            (result,) = self.client.do_action(flight.Action(name, body))
        except flight.FlightError as problem:
            raise told(problem) from None
        return json.loads(result.body.to_pybytes())

    @contextmanager
    def exchange(self, command, schema):
        raw = command if isinstance(command, bytes) else json.dumps(command).encode()
        writer, reader = self.client.do_exchange(flight.FlightDescriptor.for_command(raw))
        try:
            writer.begin(schema)
            yield writer, reader
        finally:
            reader.cancel()

    def close(self):
        self.client.close()
        self.stop()


def told(problem):
    """The EscrowError that a Flight error carries."""
    assert problem.extra_info, f"no reason given: {problem}"
    return unpack_error(unpack_json(problem.extra_info))
