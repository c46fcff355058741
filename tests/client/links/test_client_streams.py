"""A stream's writer: one thread at a time, and none after its end, because gRPC aborts the process otherwise."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.client.links.streams import Checks, Stream
from escrowmq.wire import Exchange


class Writer:
    """Notes what gRPC would abort the process for; ``slow`` keeps its end waiting until it is set."""

    def __init__(self) -> None:
        self.slow = threading.Event()
        self.ending = threading.Event()
        self.abuses: list[str] = []
        self.calls: list[str] = []
        self._busy = False
        self._closed = False

    def _use(self, name: str) -> None:
        if self._busy or self._closed:
            self.abuses.append(name)
        self.calls.append(name)

    def begin(self, schema: pa.Schema) -> None:
        self._use("begin")

    def write_metadata(self, metadata: bytes) -> None:
        self._use("write")

    def done_writing(self) -> None:
        self._use("done_writing")

    def close(self) -> None:
        self._use("close")
        self._busy = True
        self.ending.set()
        assert self.slow.wait(10)
        self._busy, self._closed = False, True


class Broker:
    """The other end of one exchange, which ends when ``over`` is set."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.over = threading.Event()

    def do_exchange(self, descriptor):
        return self.writer, self

    def read_chunk(self):
        assert self.over.wait(10)
        raise StopIteration

    def cancel(self) -> None:
        self.over.set()


@pytest.fixture
def broker():
    return Broker()


def checks(broker):
    return Checks(broker, 1, lambda batch: None)


def receives(broker):
    return Stream(broker, Exchange.RECEIVE, 1, lambda stream: None)


@pytest.mark.parametrize("make", [checks, receives])
def test_closing_while_the_broker_ends_the_stream_leaves_the_writer_to_one_thread(broker, make):
    stream = make(broker)
    broker.over.set()
    assert broker.writer.ending.wait(10)
    closing = threading.Thread(target=stream.close)
    closing.start()
    broker.writer.slow.set()
    closing.join(10)
    assert not closing.is_alive()
    assert (broker.writer.abuses, broker.writer.calls) == ([], ["begin", "close"])


def test_a_request_to_a_withdrawn_stream_fails_without_a_write(broker):
    broker.writer.slow.set()
    stream = receives(broker)
    stream.withdraw()
    future = stream.request(pa.RecordBatch.from_pylist([], schema=pa.schema([])), {})
    with pytest.raises(mq.Unknown, match="DISCONNECTED"):
        future.result(10)
    broker.over.set()
    stream.close()
    assert broker.writer.abuses == []
    assert "write" not in broker.writer.calls
