"""Admission: limits hold before memory is taken, and browsers are no way in."""

from __future__ import annotations

import json
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_runs import Client, answer_of, raw_connection

from escrowmq.broker.serving.certificates import ServerCertificate
from escrowmq.cli.development import Authority
from escrowmq.errors import Misuse
from escrowmq.gateway import GatewaySettings, beside
from escrowmq.gateway.server import listen_on
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange
from traced import run_traced

RunGateway = Callable[..., Client]
JSON = "Content-Type: application/json\r\n"


def head(client: Client, *lines: str, path: str = "/v1/topics/t/messages", host: str | None = None) -> bytes:
    name = host if host is not None else client.url.removeprefix("http://")
    return f"POST {path} HTTP/1.1\r\nHost: {name}\r\n{''.join(line + chr(13) + chr(10) for line in lines)}\r\n".encode()


KIND = "Content-Type: application/json"


@pytest.fixture
def twin() -> TwinLink:
    return TwinLink()


@pytest.mark.invariant("I46")
def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], max_request_bytes=1000)
    with raw_connection(client.url) as connection:
        connection.sendall(head(client, KIND, "Content-Length: 1001", "Expect: 100-continue"))
        status, told = answer_of(connection)
        assert (status, told["name"]) == (413, "BATCH_TOO_LARGE")
        assert connection.recv(10) == b"", "the connection is closed: nobody reads on"
    assert client.ok("/v1/topics/t/messages", {"text": "x" * 900})


@pytest.mark.invariant("I46")
def test_a_chunked_body_over_the_limit_is_refused_at_the_chunk_that_goes_over(
    run_gateway: RunGateway, twin: TwinLink
) -> None:
    client = run_gateway([twin], max_request_bytes=100_000)
    with raw_connection(client.url) as connection:
        connection.sendall(head(client, KIND, "Transfer-Encoding: chunked"))
        for _ in range(3):  # never ended: whoever waits for the end waits for ever
            connection.sendall(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        status, told = answer_of(connection)
    assert (status, told["name"]) == (413, "BATCH_TOO_LARGE")


@pytest.mark.invariant("I46")
def test_bodies_that_wait_together_are_bounded(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], max_request_bytes=1000, max_bytes_in_flight=1500)
    with raw_connection(client.url) as first, raw_connection(client.url) as second:
        first.sendall(head(client, KIND, "Content-Length: 1000", "Expect: 100-continue"))
        assert first.recv(100).startswith(b"HTTP/1.1 100"), "there is room: it may send"
        second.sendall(head(client, KIND, "Content-Length: 600", "Expect: 100-continue"))
        status, told = answer_of(second)
        assert (status, told["name"]) == (503, "QUEUE_FULL")
        assert told["retry_after"] > 0
        body = json.dumps({"text": "x"}).encode()
        first.sendall(body + b" " * (1000 - len(body)))
        assert answer_of(first)[0] == 200
    assert client.ok("/v1/topics/t/messages", {"text": "x" * 900}), "the room is given back"


@pytest.mark.invariant("I46")
def test_requests_that_wait_together_are_bounded(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], max_requests=1)
    twin.hold(Exchange.SEND)
    first = threading.Thread(target=lambda: client.ok("/v1/topics/t/messages", {"text": "x"}))
    first.start()
    while not twin.seen(Exchange.SEND):
        pass
    other = Client(client.url)
    status, told = other.post("/v1/topics/t/messages", {"text": "y"})
    assert (status, told["name"]) == (503, "QUEUE_FULL")
    twin.release(Exchange.SEND)
    first.join()
    assert other.ok("/v1/topics/t/messages", {"text": "y"})
    other.http.close()


def test_a_body_that_does_not_come_is_given_up(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], body_timeout=0.1)
    with raw_connection(client.url) as connection:
        connection.sendall(head(client, KIND, "Content-Length: 100") + b"{")
        status, told = answer_of(connection)
    assert (status, told["name"]) == (408, "BAD_REQUEST")


def test_a_client_that_leaves_while_sending_leaves_nothing_behind(
    run_gateway: RunGateway, twin: TwinLink, eventually: Callable[..., Any]
) -> None:
    client = run_gateway([twin], max_requests=1, max_bytes_in_flight=1000, max_request_bytes=1000)
    for _ in range(3):
        with raw_connection(client.url) as connection:
            connection.sendall(head(client, KIND, "Content-Length: 1000", "Expect: 100-continue"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100")
        eventually(lambda: client.post("/v1/topics/t/messages", {"text": "x" * 900})[0] == 200)


@pytest.mark.invariant("I47")
@pytest.mark.parametrize(
    ("lines", "host", "status"),
    [
        ((KIND,), "evil.example", 403),
        ((KIND,), "127.0.0.1.evil.example:80", 403),
        ((KIND,), "", 403),
        ((KIND, "Origin: http://evil.example"), None, 403),
        ((KIND, "Origin: null"), None, 403),
        (("Content-Type: text/plain",), None, 415),
        (("Content-Type: application/x-www-form-urlencoded",), None, 415),
        ((), None, 415),
        ((KIND, "Content-Encoding: gzip"), None, 415),
    ],
)
def test_pages_of_other_sites_are_no_way_in(
    run_gateway: RunGateway, twin: TwinLink, lines: tuple[str, ...], host: str | None, status: int
) -> None:
    client = run_gateway([twin])
    with raw_connection(client.url) as connection:
        connection.sendall(head(client, *lines, "Content-Length: 12", host=host) + b'{"text":"x"}')
        assert answer_of(connection)[0] == status
    assert not twin.topics


def test_a_post_without_a_body_from_another_site_is_refused(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin])
    transaction = client.prepare("g", "t")
    path = f"/v1/groups/g/transactions/{transaction}/commit"
    assert client.post(path, **{"Origin": "https://evil.example"})[0] == 403
    assert client.post(path, **{"Origin": client.url})[0] == 200


def test_headers_are_bounded(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin])
    with raw_connection(client.url) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nX: " + b"x" * 200_000)
        try:
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
        except ConnectionResetError:
            pass


@pytest.mark.invariant("I46")
def test_messages_of_one_receive_are_bounded_in_bytes(run_gateway: RunGateway, embedded: Callable[..., Any]) -> None:
    client = run_gateway(embedded(), max_receive_bytes=10_000)
    messages = [{"text": "x" * 4000, "key": "k"} for _ in range(6)]
    client.ok("/v1/topics/t/messages", {"messages": messages})
    client.ok("/v1/topics/t/messages", {"text": "y" * 50_000, "key": "k"})
    taken: list[int] = []
    while sum(taken) < 7:
        got = client.receive("g", "t", wait=30, max_messages=100)
        assert {message["attempt"] for message in got} == {1}, "what did not fit comes with the next receive"
        taken.append(len(got))
    assert max(taken) <= 2
    assert taken[-1] == 1


def test_two_requests_on_one_connection_are_both_answered(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin])
    with raw_connection(client.url) as connection:
        for _ in range(2):
            connection.sendall(head(client, KIND, "Content-Length: 12") + b'{"text":"x"}')
            assert answer_of(connection)[0] == 200


@pytest.mark.parametrize(
    "values",
    [{"unheard": 1}, {"max_requests": 0}, {"max_wait": "long"}, {"max_requests": "1.5"}, {"timeout": True}],
)
def test_limits_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        GatewaySettings.of(values)


def test_limits_are_read_from_text() -> None:
    settings = GatewaySettings.of({"max_request_bytes": "1MiB", "max_wait": "1min", "max_requests": "7"})
    assert (settings.max_request_bytes, settings.max_wait, settings.max_requests) == (1 << 20, 60.0, 7)


def test_beyond_loopback_only_if_it_is_spelled_out(twin: TwinLink) -> None:
    from escrowmq.errors import Denied
    from escrowmq.gateway import beside

    with pytest.raises(Denied), beside(lambda _: [twin], listen="0.0.0.0:0"):
        pass
    with beside(lambda _: [twin], listen="0.0.0.0:0", insecure=True) as ready:
        port = int(ready["http"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
            assert answer_of(connection)[0] == 200


def many(count: int, item: str = "{}") -> bytes:
    return b'{"messages":[' + b",".join([item.encode()] * count) + b"]}"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/topics/t/messages", many(50_000), 413),
        ("/v1/topics/t/messages", many(20_000), 400),
        ("/v1/topics/t/messages", many(20_000, '{"text":1}'), 400),
        ("/v1/topics/t/messages", b"[" * 30_000, 400),
        (
            "/v1/topics/t/messages",
            b'{"text":"x","properties":{' + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}}",
            400,
        ),
        ("/v1/topics/t/messages", b'{"text":"x",' + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}", 400),
        ("/v1/topics/t/messages", '{"text":"x"}'.encode("utf-16"), 400),
        ("/v1/consumers/g/ack", b'{"handles":[' + b",".join([b"1"] * 30_000) + b"]}", 400),
    ],
)
def measured_a_small_body_costs_little_memory_and_a_short_answer(
    run_gateway: RunGateway, twin: TwinLink, path: str, body: bytes, status: int
) -> None:
    client = run_gateway([twin])
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    answer = client.http.post(path, content=body, headers={"content-type": "application/json"})
    _, most = tracemalloc.get_traced_memory()
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 2000
    assert most - before < 40 * len(body) + (4 << 20)


@pytest.mark.invariant("I35")
def test_a_small_body_costs_little_memory_and_a_short_answer() -> None:
    run_traced(__file__)


def test_a_text_may_hold_any_number_of_commas(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin])
    assert client.ok("/v1/topics/t/messages", {"text": '{"a":[1,2]}\\",' * 20_000})


def closed_by(connection: socket.socket) -> bool:
    """Whether the gateway closes the connection without a further word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def turned_away(url: str) -> bool:
    """Whether a new connection is closed without a word, be it while it is still being made."""
    try:
        with raw_connection(url) as connection:
            return closed_by(connection)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: "])
def test_a_connection_without_a_request_is_closed(
    run_gateway: RunGateway, twin: TwinLink, said: bytes, eventually: Callable[..., Any]
) -> None:
    client = run_gateway([twin], header_timeout=0.1)
    with raw_connection(client.url) as connection:
        connection.sendall(said)
        assert closed_by(connection)

    def is_served() -> bool:
        with suppress(httpx.TransportError):  # so busy a machine that this one is closed, too
            return bool(client.ok("/v1/topics/t/messages", {"text": "x"}))
        return False

    eventually(is_served)


def test_half_a_second_request_has_the_same_deadline(
    run_gateway: RunGateway, twin: TwinLink, eventually: Callable[..., Any]
) -> None:
    client = run_gateway([twin], header_timeout=0.2)

    def is_closed_after_an_answer() -> bool:
        with raw_connection(client.url) as connection:
            try:
                connection.sendall(head(client, KIND, "Content-Length: 12") + b'{"text":"x"}')
                if not connection.recv(1, socket.MSG_PEEK):
                    return False  # so busy a machine that it came too late
            except ConnectionError:
                return False
            assert answer_of(connection)[0] == 200
            with suppress(ConnectionError):
                connection.sendall(b"GET /hea")
            return closed_by(connection)

    eventually(is_closed_after_an_answer)


@pytest.mark.invariant("I35")
def test_a_client_that_reads_no_answer_is_closed(run_gateway: RunGateway, embedded: Callable[..., Any]) -> None:
    client = run_gateway(embedded(), answer_timeout=0.2, max_receive_bytes=8 << 20)
    for _ in range(4):
        client.ok("/v1/topics/t/messages", {"text": "x" * (3 << 20), "key": "k"})
    asked = json.dumps({"topics": ["t"]}).encode()
    with raw_connection(client.url) as connection:
        connection.sendall(head(client, KIND, f"Content-Length: {len(asked)}", path="/v1/consumers/g/receive") + asked)
        # Not a byte is read until the gateway has hung up: then the connection is in error, and only then there is an
        # event.
        errors = select.poll()
        errors.register(connection, 0)
        assert errors.poll()


def test_connections_are_bounded_and_the_longest_silent_one_makes_room(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], max_connections=4)
    with ExitStack() as stack:
        silent = [stack.enter_context(raw_connection(client.url)) for _ in range(8)]
        assert client.ok("/v1/topics/t/messages", {"text": "x"})
        for connection in silent[:4]:
            assert closed_by(connection)
        assert client.ok("/v1/topics/t/messages", {"text": "x"})


def test_when_all_connections_are_at_work_a_new_one_is_closed(run_gateway: RunGateway, twin: TwinLink) -> None:
    client = run_gateway([twin], max_connections=2)
    with raw_connection(client.url) as first, raw_connection(client.url) as second:
        for connection in (first, second):
            connection.sendall(head(client, KIND, "Content-Length: 12", "Expect: 100-continue"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100")
        assert turned_away(client.url)
        for connection in (first, second):
            connection.sendall(b'{"text":"x"}')
            assert answer_of(connection)[0] == 200


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    host, listening = listen_on("127.0.0.1:0", insecure=False)
    with listening, socket.create_connection((host, listening.getsockname()[1])), listening.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_answers_over_tls(twin: TwinLink, tmp_path: Path) -> None:
    """Small and large responses: asyncio's limits of write buffers differ over TLS."""
    Authority(tmp_path, 1).issue("broker", ["localhost"])
    tls = ServerCertificate(tmp_path / "broker.pem", tmp_path / "broker.key", None)
    with (
        beside(lambda _: [twin], listen="127.0.0.1:0", tls=tls.context) as at,
        httpx.Client(base_url=at["http"], trust_env=False, verify=False, timeout=60) as client,
    ):
        assert at["http"].startswith("https://")
        for _ in range(3):
            assert client.get("/nothing").status_code == 404
            assert len(client.get("/openapi.json").content) > 10_000
