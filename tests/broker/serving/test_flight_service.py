"""The Flight service: what it answers, and that nothing a client sends can harm it."""

import json
import os
import socket
import threading
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from flight_served import Served, told
from pyarrow import flight

from escrowmq.broker.reads import deliveries
from escrowmq.errors import Code, Denied, EscrowError
from escrowmq.platform.listening import check_address
from escrowmq.schemas import CHECKS, ENDING, OUTGOING, PRODUCED
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, pack_metadata, unpack_error, unpack_metadata
from traced import run_traced

NOTHING = pa.schema([])


def kind(name, **options):
    return {"protocol": 1, "exchange": name, **options}


@pytest.fixture
def served(tmp_path):
    broker = Served(tmp_path / "data")
    yield broker
    assert broker.act("health")["status"] == "ok", "the broker is alive after whatever was done to it"
    broker.close()


def ask(writer, reader, batch, number=7, **options):
    writer.write_with_metadata(batch, pack_metadata(number, options))
    chunk = reader.read_chunk()
    request_id, content = unpack_metadata(chunk.app_metadata.to_pybytes())
    assert request_id == number
    return chunk.data if chunk.data is not None else unpack_error(content["error"])


def test_requests_are_pipelined_and_answered_by_id(served):
    with served.exchange(kind("send"), OUTGOING) as (writer, reader):
        assert reader.schema.equals(PRODUCED)
        for number in range(50):
            writer.write_with_metadata(outgoing([{"body": b"x"}]), pack_metadata(number))
        answers = [reader.read_chunk() for _ in range(50)]
        assert sorted(unpack_metadata(a.app_metadata.to_pybytes())[0] for a in answers) == list(range(50))
        writer.done_writing()
        with pytest.raises(StopIteration):
            reader.read_chunk()


def test_a_transaction_and_its_delivery_over_the_wire(served):
    session = served.act("session.open", {"group": "g", "instance": "i", "transactional": True})["session"]
    with served.exchange(kind("prepare", session=session), OUTGOING) as pipe:
        produced = ask(*pipe, outgoing([{"body": b"1"}, {"body": b"2"}]))
    outcomes = pa.array([1, 2], pa.uint8())
    with served.exchange(kind("end"), ENDING) as pipe:
        batch = pa.RecordBatch.from_arrays([produced["transaction"], outcomes], schema=ENDING)
        assert ask(*pipe, batch, session=session)["code"].to_pylist() == [Code.COMMITTED, Code.ROLLED_BACK]
    served.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    with served.exchange(kind("receive", group="c", member=1), NOTHING) as (writer, reader):
        writer.write_metadata(pack_metadata(1, {"max_messages": 10, "wait_ms": 10_000}))
        assert reader.read_chunk().data["body"].to_pylist() == [b"1"]
    ticket = flight.Ticket(json.dumps({"source": "%op", "columns": ["state"]}).encode())
    assert served.client.do_get(ticket).read_all().to_pydict() == {"state": [1, 2]}


def test_questions_come_over_the_checks_exchange(tmp_path):
    served = Served(tmp_path / "data", transaction_timeout=0.05)
    try:
        session = served.act("session.open", {"group": "g", "instance": "i", "transactional": True})["session"]
        with served.exchange(kind("checks", session=session), NOTHING) as (_, reader):
            assert reader.schema.equals(CHECKS)
            with served.exchange(kind("prepare", session=session), OUTGOING) as pipe:
                produced = ask(*pipe, outgoing([{"body": b"?"}]))
            question = reader.read_chunk().data
            assert question["transaction"].to_pylist() == produced["transaction"].to_pylist()
            assert question["body"].to_pylist() == [b"?"]
        (group,) = served.act("producers.list")["producers"]
        assert group["open"] == 1
    finally:
        served.close()


def gone(condition):
    """Wait until ``condition`` is true; the signal is the broker's own round, so each look is a call."""
    return any(condition() for _ in range(2000))


def test_a_client_that_leaves_takes_its_members_and_receives_along(served):
    session = served.act("session.open", {"group": "g", "instance": "i", "transactional": True})["session"]
    served.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    with (
        served.exchange(kind("checks", session=session), NOTHING) as (_, questions),
        served.exchange(kind("receive", group="c", member=1), NOTHING) as (writer, _),
    ):
        assert questions.schema.equals(CHECKS)
        writer.write_metadata(pack_metadata(1, {"wait_ms": 60_000}))
        assert gone(lambda: served.act("stats")["parked_receives"] == 1)
        assert served.act("producers.list")["producers"][0]["members"] == 1
    assert gone(lambda: served.act("producers.list")["producers"][0]["members"] == 0)
    with served.exchange(kind("send"), OUTGOING) as pipe:
        ask(*pipe, outgoing([{"body": b"x"}]))
    assert served.act("stats")["delivered_total"] == 0, "no lease is given to the dead"


@pytest.mark.parametrize(
    "command",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{",
        b"[" * 100_000,
        {"protocol": 1},
        kind("fly"),
        {"protocol": 2, "exchange": "send"},
        {"protocol": "1", "exchange": "send"},
        {"protocol": 1, "exchange": ["send"]},
    ],
)
def test_a_bad_command_is_refused(served, command):
    with pytest.raises(flight.FlightError) as caught, served.exchange(command, OUTGOING) as (_, reader):
        reader.read_chunk()
    assert told(caught.value).code == Code.BAD_REQUEST


@pytest.mark.parametrize("name", list(Exchange))
def test_a_wrong_schema_is_refused(served, name):
    schema = pa.schema([("body", pa.utf8())])
    with pytest.raises(flight.FlightError) as caught, served.exchange(kind(name), schema) as (_, reader):
        reader.read_chunk()
    assert told(caught.value).code == Code.BAD_BATCH


@pytest.mark.parametrize("session", [0, 99, -1, 1 << 40, "1", None, 1.5, True])
def test_checks_for_no_session_are_refused(served, session):
    with (
        pytest.raises(flight.FlightError) as caught,
        served.exchange(kind("checks", session=session), NOTHING) as (_, r),
    ):
        r.read_chunk()
    assert told(caught.value).code in (Code.BAD_REQUEST, Code.UNKNOWN_SESSION)


@pytest.mark.parametrize("metadata", [b"", b"1234567", pack_metadata(1) + b"{", pack_metadata(1) + b"[]"])
def test_a_chunk_with_bad_metadata_ends_the_exchange_with_its_reason(served, metadata):
    with served.exchange(kind("send"), OUTGOING) as (writer, reader):
        writer.write_with_metadata(outgoing([{}]), metadata)
        with pytest.raises(flight.FlightError) as caught:
            reader.read_chunk()
    assert told(caught.value).code == Code.BAD_REQUEST


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
        problem = served.calls.exchange(Exchange.SEND, batch, {}).exception(timeout=10)
        assert problem.code == Code.BAD_BATCH
        good = served.calls.exchange(Exchange.SEND, outgoing([{}]), {}).result(timeout=10)
        assert good["code"].to_pylist() == [Code.OK]
        assert good["position"][0].as_py() < 10
    finally:
        served.close()


def test_nulls_in_a_batch_are_refused_over_the_wire_too(served):
    with served.exchange(kind("send"), OUTGOING) as pipe:
        assert ask(*pipe, damaged("body", pa.array([None], pa.binary()))).code == Code.BAD_BATCH
        assert ask(*pipe, outgoing([{}]))["code"].to_pylist() == [Code.OK]


def test_too_many_rows_and_bytes_are_refused_before_any_work(tmp_path):
    served = Served(tmp_path / "data", max_batch_rows=10, max_batch_bytes=10_000)
    try:
        with served.exchange(kind("send"), OUTGOING) as pipe:
            assert ask(*pipe, outgoing([{} for _ in range(11)])).code == Code.BATCH_TOO_LARGE
            assert ask(*pipe, outgoing([{"body": bytes(10_001)}])).code == Code.BATCH_TOO_LARGE
            assert ask(*pipe, outgoing([{} for _ in range(10)])).num_rows == 10
            assert ask(*pipe, outgoing([])).num_rows == 0
    finally:
        served.close()


def test_one_bad_row_spoils_no_other(served):
    rows = [
        {"body": b"1"},
        {"topic": "no such name!"},
        {"key": "k" * 2000},
        {"body": b"4", "queue": 99},
        {"body": b"5"},
    ]
    with served.exchange(kind("send"), OUTGOING) as pipe:
        codes = ask(*pipe, outgoing(rows))["code"].to_pylist()
    assert codes == [Code.OK, Code.BAD_TOPIC_NAME, Code.KEY_TOO_LARGE, Code.BAD_QUEUE, Code.OK]


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
def test_bad_actions_get_their_code(served, name, request_, code):
    from escrowmq.errors import EscrowError

    with pytest.raises(EscrowError) as caught:
        served.act(name, request_)
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
def test_bad_reads_get_their_code(served, ticket, code):
    raw = ticket if isinstance(ticket, bytes) else json.dumps(ticket).encode()
    with pytest.raises(flight.FlightError) as caught:
        served.client.do_get(flight.Ticket(raw)).read_all()
    assert told(caught.value).code == code


@pytest.mark.parametrize("options", [{"group": "nobody", "member": 1}, {"member": 1}, {"group": "c", "member": "x"}])
def test_bad_receives_get_their_code(served, options):
    with served.exchange(kind("receive"), NOTHING) as (writer, reader):
        writer.write_metadata(pack_metadata(1, options))
        _, content = unpack_metadata(reader.read_chunk().app_metadata.to_pybytes())
    assert unpack_error(content["error"]).code in (Code.UNKNOWN_GROUP, Code.BAD_REQUEST)


@pytest.mark.parametrize("seed", range(8))
def test_garbage_on_the_port_harms_nobody(served, seed):
    chance = np.random.default_rng(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if seed % 2 else b""
    with socket.create_connection(("127.0.0.1", served.service.port), timeout=10) as raw:
        raw.sendall(preface + chance.bytes(int(chance.integers(1, 100_000))))
    assert served.act("hello")["protocol"] == 1


def test_a_stopping_broker_hangs_up_on_clients_that_stay(tmp_path):
    served = Served(tmp_path / "data")
    with served.exchange(kind("send"), OUTGOING) as (writer, reader):
        assert ask(writer, reader, outgoing([{}])).num_rows == 1
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
        with pytest.raises((flight.FlightError, StopIteration)):
            reader.read_chunk()
    served.client.close()


def test_a_log_closed_under_a_receive_is_told_as_a_stopping_broker(tmp_path, monkeypatch):
    """A client comes back to a broker that stops (SHARD_STOPPED); CLOSED would say that it closed itself."""
    served = Served(tmp_path / "data")
    served.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    with served.exchange(kind("send"), OUTGOING) as pipe:
        ask(*pipe, outgoing([{}]))
    reading, closed, read = threading.Event(), threading.Event(), served.engine.log.salvage

    def late(*arguments):
        reading.set()
        assert closed.wait(30)
        return read(*arguments)

    monkeypatch.setattr(served.engine.log, "salvage", late)
    monkeypatch.setattr(deliveries, "FEW", 0)  # read by a thread beside the writer, which can stop meanwhile
    with served.exchange(kind("receive", group="c", member=1), NOTHING) as (writer, reader):
        writer.write_metadata(pack_metadata(1, {"max_messages": 10, "wait_ms": 10_000}))
        assert reading.wait(30)
        served.engine.stop()
        closed.set()
        _, content = unpack_metadata(reader.read_chunk().app_metadata.to_pybytes())
        assert unpack_error(content["error"]).code is Code.SHARD_STOPPED
    with pytest.raises(flight.FlightError) as caught:
        served.client.do_get(flight.Ticket(json.dumps({"source": "%op", "columns": ["state"]}).encode())).read_all()
    assert told(caught.value).code is Code.SHARD_STOPPED
    served.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""])
def test_only_loopback_without_insecure(host):
    with pytest.raises(Denied):
        check_address(host, insecure=False)
    check_address(host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_nothing(host):
    check_address(host, insecure=False)


def test_large_messages_pass_and_are_delivered_within_the_bytes_asked_for(served):
    served.act("groups.subscribe", {"group": "c", "topics": ["orders"]})
    bodies = [os.urandom(3 << 20) for _ in range(6)]
    with served.exchange(kind("send"), OUTGOING) as pipe:
        assert ask(*pipe, outgoing([{"body": b, "key": "k"} for b in bodies]))["code"].to_pylist() == [0] * 6
    seen, attempts = [], set()
    with served.exchange(kind("receive", group="c", member=1), NOTHING) as (writer, reader):
        while len(seen) < 6:
            writer.write_metadata(pack_metadata(1, {"max_messages": 10, "max_bytes": 7 << 20, "wait_ms": 10_000}))
            batch = reader.read_chunk().data
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
def measured_an_actions_request_is_bounded_before_it_is_parsed(served, body, code):
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(EscrowError) as caught:
        served.act("transactions.settle", body)
    assert caught.value.code is code
    assert tracemalloc.get_traced_memory()[1] - before < 3 * len(body) + (4 << 20)


def test_an_actions_request_is_bounded_before_it_is_parsed():
    run_traced(__file__)


def test_texts_with_commas_are_counted_as_one_value(served):
    name = ",:[{" * 5000
    with pytest.raises(EscrowError) as caught:
        served.act("transactions.settle", {"ids": [name + '"\\' + name], "outcome": "commit"})
    assert caught.value.code is Code.BAD_REQUEST
    assert "ids look like" in caught.value.hint
    assert len(caught.value.message) <= 1000, "what it quotes is cut: gRPC would not carry it"
