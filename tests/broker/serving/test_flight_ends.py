"""The end of an exchange at the broker: the client says so, and what was begun is answered first."""

import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pyarrow as pa
import pytest
from flight_served import Served

from escrowmq.broker.serving.room import Held, Room
from escrowmq.broker.serving.service import _BatchExchange
from escrowmq.schemas import DELIVERY, OUTGOING, empty
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import LAST, Exchange, pack_metadata, unpack_metadata

NOTHING = pa.schema([])


def kind(name, **options):
    return {"protocol": 1, "exchange": name, **options}


@pytest.fixture
def served(tmp_path):
    broker = Served(tmp_path / "data")
    yield broker
    broker.close()


def test_an_exchange_ends_when_the_client_says_that_it_wants_no_more(served):
    served.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    with served.exchange(kind("receive", group="c", member=1), NOTHING) as (writer, reader):
        writer.write_metadata(pack_metadata(1, {"wait_ms": 60_000}))
        writer.write_metadata(pack_metadata(0, LAST))
        with pytest.raises(StopIteration):
            reader.read_chunk()
    session = served.act("session.open", {"group": "p", "instance": "i", "transactional": True})["session"]
    with served.exchange({"protocol": 1, "exchange": "checks", "session": session}, NOTHING) as (writer, reader):
        writer.write_metadata(pack_metadata(0, LAST))
        with pytest.raises(StopIteration):
            reader.read_chunk()
    with served.exchange(kind("send"), OUTGOING) as (writer, reader):
        writer.write_with_metadata(outgoing([{}]), pack_metadata(7))
        writer.write_metadata(pack_metadata(0, LAST))
        assert unpack_metadata(reader.read_chunk().app_metadata.to_pybytes())[0] == 7
        with pytest.raises(StopIteration):
            reader.read_chunk()


def test_what_was_begun_is_answered_before_the_exchange_ends():
    """A receive that is being read cannot be withdrawn any more: its messages are leased, so they must arrive."""
    answer, asked_to_end = Future(), threading.Event()
    answer.cancel = lambda: False

    class Queue(queue.SimpleQueue):
        def put(self, item):
            super().put(item)
            if item is None:
                asked_to_end.set()

    class Stream:
        schema, chunks, written = NOTHING, [pack_metadata(5, {})], []

        def begin(self, schema):
            pass

        def read_chunk(self):
            if not self.chunks:
                raise StopIteration
            return SimpleNamespace(data=None, app_metadata=pa.py_buffer(self.chunks.pop()))

        def write_with_metadata(self, batch, metadata):
            self.written.append(unpack_metadata(metadata)[0])

    stream = Stream()
    calls = SimpleNamespace(exchange=lambda *_: answer)
    exchange = _BatchExchange(calls, Exchange.RECEIVE, {}, stream, Room(1 << 20, 1, print), Held("peer"))
    exchange._answers = Queue()
    serving = threading.Thread(target=exchange.serve, args=(stream,))
    serving.start()
    assert asked_to_end.wait(10)
    answer.set_result(empty(DELIVERY))
    serving.join(10)
    assert stream.written == [5]
