"""Every call over the wire: what it is answered, and that nothing a client sends can harm the broker."""

import os
import socket
import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from served import PATIENT, Served

from escrowmq.broker.reads import deliveries
from escrowmq.errors import Code, Denied, EscrowError
from escrowmq.platform.listening import check_address
from escrowmq.schemas import ENDING, OUTGOING
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame, frame_start
from escrowmq.wire.frames.rows import encoder
from traced import run_traced


@pytest.fixture
def served(tmp_path):
    broker = Served(tmp_path / "data")
    yield broker
    assert broker.act("health")["status"] == "ok", "the broker is alive after whatever was done to it"
    broker.stop()


@pytest.fixture
def client(served):
    with served.client() as made:
        yield made


@pytest.mark.invariant("I2")
def test_a_transaction_and_its_delivery_over_the_wire(client):
    session = client.act("session.open", {"group": "g", "instance": "i", "transactional": True})["session"]
    produced = client.batch(Exchange.PREPARE, outgoing([{"body": b"1"}, {"body": b"2"}]), {"session": session})
    outcomes = pa.array([1, 2], pa.uint8())
    batch = pa.RecordBatch.from_arrays([produced["transaction"], outcomes], schema=ENDING)
    ended = client.batch(Exchange.END, batch, {"session": session})
    assert ended["code"].to_pylist() == [Code.COMMITTED, Code.ROLLED_BACK]
    client.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    came = client.answer(client.receive(60_000, "c", max_messages=10), Exchange.RECEIVE)
    assert came["body"].to_pylist() == [b"1"]
    assert client.read_all({"source": "%op", "columns": ["state"]}) == [{"state": 1}, {"state": 2}]


@pytest.mark.parametrize("kind", [kind for kind in Exchange if kind is not Exchange.RECEIVE])
def test_a_wrong_schema_is_refused(client, kind):
    wrong = pa.RecordBatch.from_pylist([{"body": "x"}], schema=pa.schema([("body", pa.utf8())]))
    assert client.batch(kind, wrong).code == Code.BAD_BATCH
    assert client.batch(Exchange.SEND, outgoing([{}]))["code"].to_pylist() == [Code.OK]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused_before_it_is_inflated(client, codec):
    sink = pa.BufferOutputStream()
    batch = outgoing([{"body": bytes(1 << 20)}])
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(batch)
    message = sink.getvalue().to_pybytes()[batch.schema.serialize().size : -8]
    start = frame_start(Kind.COLUMNS, 77, len(message), encoder.encode((int(Kind.SEND), encoder.encode({}))))
    client.send(start, message)
    problem = client.answer(77)
    assert (problem.code, "compressed" in problem.message) == (Code.BAD_BATCH, True)


@pytest.mark.parametrize("session", [0, 99, 1 << 40])
def test_checks_for_no_session_are_refused(client, session):
    client.send(frames.watch(5, session))
    assert client.answer(5).code in (Code.BAD_REQUEST, Code.UNKNOWN_SESSION)


@pytest.mark.parametrize("head", [-1, "1", None, 1.5, True])
def test_a_session_that_is_no_number_is_refused(client, head):
    client.send(frame(Kind.WATCH, 5, head=encoder.encode(head)))
    assert client.answer(5).code in (Code.BAD_REQUEST, Code.UNKNOWN_SESSION)


def damaged(column, array):
    """One good row, with one column put in the place of the good one."""
    good = outgoing([{"body": b"x", "key": "k"}])
    return pa.RecordBatch.from_arrays(
        [array if f.name == column else good.column(f.name) for f in OUTGOING], schema=OUTGOING
    )


def with_offsets(start, end):
    """A batch whose body's offsets were changed behind Arrow's back, as a hostile sender could."""
    offsets = np.array([0, 1], np.int32)
    column = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(b"abcdefgh")])
    batch = damaged("body", column)
    offsets[:] = start, end
    return batch


@pytest.mark.invariant("I47")
@pytest.mark.parametrize(
    "batch",
    [
        damaged("topic", pa.array([b"\xff\xfe"]).view(pa.utf8())),
        with_offsets(0, 1 << 30),
        with_offsets(5, 2),
        damaged("body", pa.array([None], pa.binary())),
        damaged("message_id", pa.array([None], pa.binary(16))),
    ],
    ids=["not utf-8", "offset beyond the data", "offsets fall", "null body", "null id"],
)
def test_a_damaged_batch_is_refused_and_the_exchange_goes_on(tmp_path, batch):
    """Through the calls themselves: a client's own library would refuse to write some of these."""
    served = Served(tmp_path / "data")
    try:
        problem = served.calls.exchange(Exchange.SEND, batch, {}).exception(timeout=60)
        assert problem.code == Code.BAD_BATCH
        good = served.calls.exchange(Exchange.SEND, outgoing([{}]), {}).result(timeout=60)
        assert good["code"].to_pylist() == [Code.OK]
        assert good["position"][0].as_py() < 10
    finally:
        served.stop()


def test_nulls_in_a_batch_are_refused_over_the_wire_too(client):
    assert client.batch(Exchange.SEND, damaged("body", pa.array([None], pa.binary()))).code == Code.BAD_BATCH
    assert client.batch(Exchange.SEND, outgoing([{}]))["code"].to_pylist() == [Code.OK]


@pytest.mark.invariant("I46")
def test_too_many_rows_and_bytes_are_refused_before_any_work(tmp_path):
    served = Served(tmp_path / "data", max_batch_rows=10, max_batch_bytes=10_000)
    try:
        with served.client() as client:
            assert client.batch(Exchange.SEND, outgoing([{} for _ in range(11)])).code == Code.BATCH_TOO_LARGE
            assert client.batch(Exchange.SEND, outgoing([{"body": bytes(10_001)}])).code == Code.BATCH_TOO_LARGE
            assert client.batch(Exchange.SEND, outgoing([{} for _ in range(10)])).num_rows == 10
            assert client.batch(Exchange.SEND, outgoing([])).num_rows == 0
    finally:
        served.stop()


def test_one_bad_row_spoils_no_other(client):
    rows = [
        {"body": b"1"},
        {"topic": "no such name!"},
        {"key": "k" * 2000},
        {"body": b"4", "queue": 99},
        {"body": b"5"},
    ]
    codes = client.batch(Exchange.SEND, outgoing(rows))["code"].to_pylist()
    assert codes == [Code.OK, Code.BAD_TOPIC_NAME, Code.KEY_TOO_LARGE, Code.BAD_QUEUE, Code.OK]


@pytest.mark.invariant("I47")
@pytest.mark.parametrize(
    ("name", "request_", "code"),
    [
        ("nothing", {}, Code.BAD_REQUEST),
        ("hello", b"\xff", Code.BAD_REQUEST),
        ("hello", b"[1]", Code.BAD_REQUEST),
        ("session.open", {}, Code.BAD_REQUEST),
        ("session.open", {"group": "a b", "instance": "i", "transactional": True}, Code.BAD_GROUP_NAME),
        ("session.open", {"group": 1, "instance": "i", "transactional": True}, Code.BAD_REQUEST),
        ("session.open", {"group": "\ud800", "instance": "i", "transactional": True}, Code.BAD_REQUEST),
        ("session.open", {"group": "g", "instance": "i", "transactional": "yes"}, Code.BAD_REQUEST),
        ("topics.create", {"name": "%half"}, Code.BAD_TOPIC_NAME),
        ("topics.create", {"name": "../../etc"}, Code.BAD_TOPIC_NAME),
        ("topics.create", {"name": "t", "queues": 1 << 40}, Code.BAD_REQUEST),
        ("topics.create", {"name": "t", "queues": True}, Code.BAD_REQUEST),
        ("groups.subscribe", {"group": "c", "topics": "orders"}, Code.BAD_REQUEST),
        ("groups.subscribe", {"group": "c", "topics": ["t"], "start": "now"}, Code.BAD_REQUEST),
        ("groups.subscribe", {"group": "c", "topics": ["t"], "retry_backoff": -1}, Code.BAD_REQUEST),
        ("transactions.list", {"state": "odd"}, Code.BAD_REQUEST),
        ("transactions.list", {"group": "nobody"}, Code.UNKNOWN_GROUP),
        ("transactions.list", {"limit": 0}, Code.BAD_REQUEST),
        ("transactions.show", {"id": "x"}, Code.BAD_REQUEST),
        ("transactions.show", {"id": "00000001-1-1"}, Code.WRONG_SHARD),
        ("transactions.settle", {"ids": ["1-1-1"], "outcome": "maybe"}, Code.BAD_REQUEST),
        ("dead_letters.list", {"group": "nobody"}, Code.UNKNOWN_GROUP),
        ("dead_letters.list", {"group": "nobody", "after": [1]}, Code.BAD_REQUEST),
        ("dead_letters.settle", {"group": "nobody", "items": [1], "act": "retry"}, Code.BAD_REQUEST),
        ("lookup", {}, Code.BAD_REQUEST),
    ],
)
def test_bad_actions_get_their_code(client, name, request_, code):
    with pytest.raises(EscrowError) as caught:
        client.act(name, request_)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("ticket", "code"),
    [
        (b"\xff", Code.BAD_REQUEST),
        (b"{}", Code.BAD_REQUEST),
        ({"source": "nothing"}, Code.UNKNOWN_TOPIC),
        ({"source": "%nothing"}, Code.UNKNOWN_TOPIC),
        ({"source": "%dead-letters.nobody"}, Code.UNKNOWN_GROUP),
        ({"source": "%half", "columns": ["no"]}, Code.BAD_REQUEST),
        ({"source": "%half", "start": -1}, Code.BAD_REQUEST),
    ],
)
def test_bad_reads_get_their_code(client, ticket, code):
    with pytest.raises(EscrowError) as caught:
        client.read_all(ticket)
    assert caught.value.code == code


@pytest.mark.parametrize("options", [{"group": "nobody", "member": 1}, {"member": 1}, {"group": "c", "member": "x"}])
def test_bad_receives_get_their_code(client, options):
    client.send(frames.receive_request(5, options))
    assert client.answer(5).code in (Code.UNKNOWN_GROUP, Code.BAD_REQUEST)


@pytest.mark.invariant("I46", "I47")
@pytest.mark.parametrize("seed", range(8))
def test_garbage_on_the_port_harms_nobody(served, seed):
    chance = np.random.default_rng(seed)
    preface = frames.hello() if seed % 2 else b""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", served.port), timeout=60) as raw:
        raw.sendall(preface + chance.bytes(int(chance.integers(1, 100_000))))  # it may be closed in the middle of it
    assert served.act("hello")["protocol"] == 1


def test_a_client_of_version_0_1_is_told_why(served, caplog):
    """Arrow Flight is HTTP/2: its client shows what GOAWAY says."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT) as old:
        old.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        came = b""
        while data := old.recv(1 << 16):
            came += data
    length, kind = int.from_bytes(came[9:12], "big"), came[12]
    assert (came[:9], kind) == (bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 7)
    assert b"does not speak Arrow Flight" in came[18 : 18 + length]
    assert "version 0.1" in caplog.text


def test_a_log_closed_under_a_receive_is_told_as_a_stopping_broker(tmp_path, monkeypatch):
    """A client comes back to a broker that stops (SHARD_STOPPED); CLOSED would say that it closed itself."""
    served = Served(tmp_path / "data")
    client = served.client()
    client.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    client.batch(Exchange.SEND, outgoing([{}]))
    reading, closed, read = threading.Event(), threading.Event(), served.engine.log.salvage

    def late(*arguments):
        reading.set()
        assert closed.wait(60)
        return read(*arguments)

    monkeypatch.setattr(served.engine.log, "salvage", late)
    monkeypatch.setattr(deliveries, "FEW", 0)  # read by a thread beside the writer, which can stop meanwhile
    number = client.receive(60_000, "c", max_messages=10)
    assert reading.wait(60)
    served.engine.stop()
    closed.set()
    assert client.answer(number).code is Code.SHARD_STOPPED
    with pytest.raises(EscrowError) as caught:
        client.read_all({"source": "%op", "columns": ["state"]})
    assert caught.value.code is Code.SHARD_STOPPED
    client.socket.close()
    served.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""])
def test_only_loopback_without_insecure(host, caplog):
    for secured in ({}, {"tls": True}, {"rights": True}):
        with pytest.raises(Denied):
            check_address(host, insecure=False, **secured)
    check_address(host, insecure=False, tls=True, rights=True)
    assert not caplog.records
    check_address(host, insecure=True, tls=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"{host} can be reached from other machines, and there is no access rights: --insecure permits that"
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_nothing(host):
    check_address(host, insecure=False)


def test_large_messages_pass_and_are_delivered_within_the_bytes_asked_for(client):
    client.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    bodies = [os.urandom(3 << 20) for _ in range(6)]
    sent = client.batch(Exchange.SEND, outgoing([{"body": b, "key": "k"} for b in bodies]))
    assert sent["code"].to_pylist() == [0] * 6
    seen, attempts = [], set()
    while len(seen) < 6:
        batch = client.answer(client.receive(60_000, "c", max_messages=10, max_bytes=7 << 20), Exchange.RECEIVE)
        assert 1 <= batch.num_rows <= 2
        seen += batch["body"].to_pylist()
        attempts |= set(batch["attempt"].to_pylist())
    assert seen == bodies
    assert attempts == {1}, "what did not fit was kept, not given again"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"ids":[' + b"{}," * 600_000 + b'{}],"outcome":"commit"}', Code.BATCH_TOO_LARGE),
        (b'{"ids":["' + b"x" * (16 << 20) + b'"]}', Code.BATCH_TOO_LARGE),
        (b'{"ids":' + b"[" * 50 + b"]" * 50 + b"}", Code.BAD_REQUEST),
        ('{"ids":[],"outcome":"commit"}'.encode("utf-16"), Code.BAD_REQUEST),
    ],
)
def measured_an_actions_request_is_bounded_before_it_is_parsed(client, body, code):
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(EscrowError) as caught:
        client.act("transactions.settle", body)
    assert caught.value.code is code
    assert tracemalloc.get_traced_memory()[1] - before < 3 * len(body) + (4 << 20)


@pytest.mark.invariant("I35")
def test_an_actions_request_is_bounded_before_it_is_parsed():
    run_traced(__file__)


def test_texts_with_commas_are_counted_as_one_value(client):
    name = ",:[{" * 5000
    with pytest.raises(EscrowError) as caught:
        client.act("transactions.settle", {"ids": [name + '"\\' + name], "outcome": "commit"})
    assert caught.value.code is Code.BAD_REQUEST
    assert "ids look like" in caught.value.hint
    assert len(caught.value.message) <= 1000, "what it quotes is cut"
