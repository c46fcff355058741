"""`escrowmq serve` with the lean carrier: where it listens, what `hello` and the metrics say of it, and what cannot be."""

import socket
import threading
from contextlib import contextmanager

import pytest
from lean_served import PATIENT, Client

from escrowmq.broker.serving.serve import LEAN_PORT_AWAY, serve
from escrowmq.wire.addresses import Address
from escrowmq.client.links.flight import FlightLink
from escrowmq.errors import Code, Misuse
from escrowmq.wire import lean
from escrowmq.wire.actions.brokers import Hello
from escrowmq.wire.lean import Kind
from wire_conformance import check


@contextmanager
def serving(folder, **options):
    """What it announced; it stops at the end, and cleanly."""
    stop, announced, told, codes = threading.Event(), threading.Event(), {}, []

    def announce(facts):
        told.update(facts)
        announced.set()

    options = {"listen": "127.0.0.1:0", **options}
    thread = threading.Thread(target=lambda: codes.append(serve(folder, announce=announce, stop=stop, **options)))
    thread.start()
    assert announced.wait(PATIENT)
    try:
        yield told
    finally:
        stop.set()
        thread.join(PATIENT)
    assert codes == [0]


def flight(told):
    return FlightLink([Address("127.0.0.1", int(told["url"].rpartition(":")[2]))])


def test_hello_tells_where_it_is_and_the_welcome_who(tmp_path):
    path = tmp_path / "lean.sock"
    with serving(tmp_path / "data", lean_socket=path) as told:
        link = flight(told)
        hello = link.action("hello", {}, PATIENT)
        check(hello, Hello, "hello")
        assert hello["lean"] == told["lean"] == {"port": told["lean"]["port"], "socket": str(path)}
        with (
            Client(told["lean"]["port"]) as by_port,
            Client(0, family=socket.AF_UNIX, address=str(path)) as by_path,
        ):
            for client in (by_port, by_path):
                assert client.welcome[2:5] == (hello["shard"], hello["epoch"], hello["version"])
            assert by_path.plain(b"x")[0][0] == Code.OK
            stats = link.action("stats", {}, PATIENT)
            assert (stats["lean_connections"], stats["lean_requests_total"]) == (2, 1)
        link.close()
    assert not path.exists()


def test_it_can_be_left_out(tmp_path):
    with serving(tmp_path / "data", lean=False) as told:
        link = flight(told)
        assert told["lean"] is None
        assert "lean" not in link.action("hello", {}, PATIENT)
        link.close()


def free_port():
    """One whose neighbour for the lean carrier is free as well, as far as can be known."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_beside_a_fixed_port_it_is_a_hundred_above_or_anywhere(tmp_path):
    for _ in range(20):
        port = free_port()
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port + LEAN_PORT_AWAY))
            except (OSError, OverflowError):
                continue
            taken.listen()
            with serving(tmp_path / "data", listen=f"127.0.0.1:{port}") as told:
                assert told["lean"]["port"] not in (0, port, port + LEAN_PORT_AWAY)
            with pytest.raises(Misuse) as caught:
                serve(tmp_path / "data", listen="127.0.0.1:0", lean_port=port + LEAN_PORT_AWAY)
            assert caught.value.code is Code.BAD_URL
        with serving(tmp_path / "data", listen=f"127.0.0.1:{port}") as told:
            assert told["lean"]["port"] == port + LEAN_PORT_AWAY
        return
    pytest.fail("no two free ports were found")


def test_a_path_that_cannot_be_had_is_said(tmp_path):
    for path in (tmp_path / "absent" / "lean.sock", tmp_path / ("x" * 200)):
        with pytest.raises(Misuse) as caught:
            serve(tmp_path / "data", listen="127.0.0.1:0", lean_socket=path)
        assert caught.value.code is Code.BAD_URL


def test_a_clean_stop_says_goodbye_on_this_carrier_too(tmp_path):
    with serving(tmp_path / "data") as told:
        client = Client(told["lean"]["port"])
    with client:
        assert [frame.kind for frame in client.closed()] == [Kind.GONE]
        assert lean.read_answer(lean.Frame(Kind.GONE, 0, memoryview(b""))) is None
