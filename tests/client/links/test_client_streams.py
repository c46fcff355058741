"""A stream is half-closed by the thread that reads it and by nobody else: gRPC aborts the process otherwise."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.client.links import streams
from escrowmq.client.links.streams import Checks, Stream
from escrowmq.wire import LAST, Exchange, unpack_metadata

NOTHING = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


class Broker:
    """The other end of one exchange, and its writer and reader. It ends the exchange when ``over`` is set.

    ``polite``: also when the client says that it wants no more. ``full``: writes wait until the exchange is over.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.polite, self.full = True, False
        self.calls: list[str] = []
        self.half_closed_by: list[str] = []
        self._writing = threading.Lock()
        self.overlapped = False

    def do_exchange(self, descriptor):
        return self, self

    def begin(self, schema: pa.Schema) -> None:
        self.calls.append("begin")

    def write_metadata(self, metadata: bytes) -> None:
        last = unpack_metadata(metadata)[1] == LAST
        self.calls.append("last" if last else "write")
        self.overlapped |= not self._writing.acquire(blocking=False)
        if self.full:
            assert self.over.wait(10)
        self._writing.release()
        if last and self.polite:
            self.over.set()

    def done_writing(self) -> None:
        self.half_closed_by.append(threading.current_thread().name)

    close = done_writing

    def read_chunk(self):
        assert self.over.wait(10)
        raise StopIteration

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.over.set()


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(streams, "CLOSE_SECONDS", 0.05)


def checks(broker):
    return Checks(broker, 1, lambda batch: None)


def receives(broker):
    return Stream(broker, Exchange.RECEIVE, 1, lambda stream: None)


READERS = {checks: "escrowmq-checks", receives: "escrowmq-receive"}


@pytest.mark.parametrize("make", [checks, receives])
def test_closing_says_so_and_leaves_the_half_close_to_the_thread_that_reads(broker, make):
    make(broker).close()
    assert broker.calls == ["begin", "last"]
    assert broker.half_closed_by == [READERS[make]]


@pytest.mark.parametrize("make", [checks, receives])
def test_closing_a_stream_that_the_broker_has_ended_writes_nothing(broker, make):
    stream = make(broker)
    broker.over.set()
    assert stream.ends_by(time.monotonic() + 10)
    stream.close()
    assert broker.calls == ["begin"]
    assert broker.half_closed_by == [READERS[make]]


@pytest.mark.parametrize("make", [checks, receives])
def test_a_broker_that_does_not_end_the_exchange_is_cut_off(broker, make, impatient):
    broker.polite = False
    make(broker).close()
    assert broker.calls == ["begin", "last", "cancel"]
    assert broker.half_closed_by == [READERS[make]]


def test_a_full_connection_holds_up_neither_withdrawing_nor_closing(broker, impatient):
    broker.full = True
    stream = receives(broker)
    sending = threading.Thread(target=stream.request, args=(NOTHING, {}))
    sending.start()
    stream.withdraw()
    stream.close()
    sending.join(10)
    assert not sending.is_alive()
    assert "cancel" in broker.calls
    assert not broker.overlapped
    assert broker.half_closed_by == [READERS[receives]]


def test_closing_twice_and_from_two_threads_says_so_once(broker):
    stream = receives(broker)
    closing = [threading.Thread(target=stream.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    stream.close()
    for thread in closing:
        thread.join(10)
    stream.close()
    assert broker.calls.count("last") <= 1
    assert broker.half_closed_by == [READERS[receives]]


def test_a_request_to_a_withdrawn_stream_fails_without_a_write(broker):
    broker.polite = False
    stream = receives(broker)
    stream.withdraw()
    future = stream.request(NOTHING, {})
    with pytest.raises(mq.Unknown, match="DISCONNECTED"):
        future.result(10)
    broker.over.set()
    stream.close()
    assert "write" not in broker.calls
