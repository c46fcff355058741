"""Streams of record batches: iterated, read whole, given to other Arrow libraries, and abandoned at the exit."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from escrowmq.errors import Code, EscrowError, error
from escrowmq.wire import BatchStream

SCHEMA = pa.schema({"n": pa.int64()})
WAITING = """
import threading, time
import pyarrow as pa
from escrowmq.wire import BatchStream

def batches():
    started.set()
    while True:
        time.sleep(0.001)
    yield

started = threading.Event()
stream = BatchStream(pa.schema({"n": pa.int64()}), batches())
threading.Thread(target=list, args=(stream,), daemon=True).start()
started.wait()
"""


def of(*numbers):
    return BatchStream(SCHEMA, (pa.record_batch([[n]], schema=SCHEMA) for n in numbers))


def test_a_stream_is_read_batch_by_batch_or_whole():
    stream = of(1, 2, 3)
    assert next(stream)["n"].to_pylist() == [1]
    assert stream.read_all()["n"].to_pylist() == [2, 3]
    assert stream.read_all().schema == SCHEMA, "an exhausted stream is an empty table"


def test_other_arrow_libraries_accept_a_stream():
    assert pa.table(of(1, 2))["n"].to_pylist() == [1, 2]
    assert of(1, 2).to_reader().read_all()["n"].to_pylist() == [1, 2]


def test_an_error_of_the_broker_reaches_the_reader():
    def batches():
        yield pa.record_batch([[1]], schema=SCHEMA)
        raise error(Code.RANGE_PURGED, "removed by retention")

    for read in (list, BatchStream.read_all):
        with pytest.raises(EscrowError, match="removed by retention"):
            read(BatchStream(SCHEMA, batches()))


def test_closing_gives_up_the_rest():
    given_up = []

    def batches():
        try:
            yield from of(1, 2)
        finally:
            given_up.append(True)

    stream = BatchStream(SCHEMA, batches())
    next(stream)
    stream.close()
    assert given_up
    assert list(stream) == []


@pytest.mark.invariant("I35")
def test_a_process_may_end_while_a_thread_waits_for_a_batch():
    """A thread that waits inside ``pyarrow.RecordBatchReader`` would abort the process at its exit."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
