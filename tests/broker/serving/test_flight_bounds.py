"""What clients that do not read, or send much at once, may hold of a served broker, and that others are served beside them."""

import itertools
import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pyarrow as pa
import pytest
from flight_served import Served
from pyarrow import flight

from escrowmq.broker import requests
from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import open_engine
from escrowmq.broker.serving import service
from escrowmq.broker.serving.room import Held, Room
from escrowmq.broker.serving.service import Service
from escrowmq.errors import Rejected
from escrowmq.platform.listening import shown
from escrowmq.schemas import OUTGOING, PRODUCED, empty
from escrowmq.settings import BrokerSettings
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, pack_metadata, unpack_metadata

OWN = [("grpc.use_local_subchannel_pool", 1)]
"""A connection of one's own."""


def test_reads_that_are_held_open_are_bounded_together_and_others_read(tmp_path):
    served = Served(tmp_path / "data", max_held_bytes=80 << 20, default_queues=1)
    try:
        command = json.dumps({"protocol": 1, "exchange": "send"}).encode()
        with served.exchange(command, OUTGOING) as (writer, reader):
            for number in range(12):
                writer.write_with_metadata(outgoing([{"topic": "t", "body": bytes(3 << 20)}]), pack_metadata(number))
                reader.read_chunk()
        ticket = flight.Ticket(json.dumps({"source": "t"}).encode())
        slow = [flight.connect(f"grpc+tcp://127.0.0.1:{served.port}", generic_options=OWN) for _ in range(8)]
        held = [client.do_get(ticket) for client in slow]
        assert served.client.do_get(ticket).read_all().num_rows == 12
        assert served.service.room.used <= 80 << 20
        served.act("topics.list")
        for reader, client in zip(held, slow, strict=True):
            reader.cancel()
            client.close()
    finally:
        served.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_guard_closes_the_connection_of_a_call(tmp_path, host):
    """Flight and the system name the same client in different ways."""
    engine = open_engine(tmp_path / "data", BrokerSettings())
    engine.start()
    calls = Calls(engine)
    served = Service(calls, host, 0)
    client = flight.connect(f"grpc+tcp://{shown(host)}:{served.port}", generic_options=OWN)
    command = json.dumps({"protocol": 1, "exchange": "send"}).encode()
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command))
    writer.begin(OUTGOING)
    assert reader.schema.equals(PRODUCED)
    (peer,) = served.room.peers()
    served.guard.shut(peer)
    with pytest.raises(flight.FlightUnavailableError):
        reader.read_chunk()
    with pytest.raises(pa.ArrowException):
        writer.close()
    client.close()
    engine.stop()
    calls.close()
    served.stop()


class Stream:
    """A client that sends without end and takes no answer before it is told to."""

    schema = OUTGOING

    def __init__(self, batch):
        self.batch, self.numbers, self.reads, self.written = batch, itertools.count(), threading.Event(), []
        self.left = False

    def begin(self, schema):
        assert schema.equals(PRODUCED)

    def read_chunk(self):
        if self.left:
            raise StopIteration
        metadata = pa.py_buffer(pack_metadata(next(self.numbers)))
        return SimpleNamespace(data=self.batch, app_metadata=metadata)

    def write_with_metadata(self, batch, metadata):
        assert self.reads.wait(60)
        self.written.append(unpack_metadata(metadata)[0])


def answered(*_):
    answer = Future()
    answer.set_result(empty(PRODUCED))
    return answer


@pytest.fixture
def waits(monkeypatch):
    """Set when an exchange takes no further request for the time being."""
    came, may_begin = threading.Event(), service._BatchExchange._may_begin

    def watched(self):
        may = may_begin(self)
        if not may:
            came.set()
        return may

    monkeypatch.setattr(service._BatchExchange, "_may_begin", watched)
    return came


def run(stream, calls, room):
    held = Held("peer")
    exchange = service._BatchExchange(SimpleNamespace(exchange=calls), Exchange.SEND, {}, stream, room, held)
    thread = threading.Thread(target=exchange.serve, args=(stream,))
    thread.start()
    return thread


def test_who_takes_no_answers_is_not_read_from(waits):
    stream, room = Stream(outgoing([{"body": b"x"}])), Room(256 << 20, 10, pytest.fail)
    thread = run(stream, answered, room)
    assert waits.wait(60)
    assert room.used < 2 * service.UNREAD_BYTES
    begun = next(stream.numbers)
    assert begun < 4096, "it stopped for the bytes"
    stream.left = True
    stream.reads.set()
    thread.join(60)
    assert len(stream.written) >= begun - 1
    assert room.used == 0


def test_requests_of_one_exchange_are_bounded_in_bytes(waits):
    waiting: list[Future] = []

    def later(*_):
        waiting.append(Future())
        return answered() if stream.left else waiting[-1]

    stream, room = Stream(outgoing([{"body": bytes(1 << 20)}])), Room(256 << 20, 10, pytest.fail)
    stream.reads.set()
    thread = run(stream, later, room)
    assert waits.wait(60)
    assert len(waiting) * (1 << 20) <= service.PIPELINED_BYTES + (2 << 20)
    stream.left = True
    for answer in waiting:
        answer.set_result(empty(PRODUCED))
    thread.join(60)
    assert not thread.is_alive()


def test_actions_hold_room_for_what_their_json_becomes(tmp_path):
    served = Served(tmp_path / "data", max_calls=1)
    try:
        command = json.dumps({"protocol": 1, "exchange": "send"}).encode()
        with served.exchange(command, OUTGOING) as (_, reader):
            assert reader.schema.equals(PRODUCED)  # it has begun
            with pytest.raises(Exception, match="QUEUE_FULL"):
                served.act("health")
        while True:  # until the exchange has left
            try:
                assert served.act("health")["status"] == "ok"
                break
            except Exception as problem:
                assert "QUEUE_FULL" in str(problem)  # noqa: PT017
    finally:
        served.close()


def test_a_schema_of_many_columns_is_refused_without_naming_them_all(monkeypatch):
    many = pa.schema([(f"c{number}", pa.int32()) for number in range(100_000)])
    monkeypatch.setattr(requests, "MOST_SHOWN", 3)
    with pytest.raises(Rejected) as caught:
        requests.check_schema(Exchange.SEND, many)
    assert "given c0: int32, c1: int32, c2: int32, ..." in caught.value.message
    assert "c3" not in caught.value.message
