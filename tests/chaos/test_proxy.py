"""The proxy passes on what comes, cuts, falls silent in either direction, and heals; it keeps little of what is not
taken.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from escrowmq_lab.chaos.ports import address_of, free_ports
from escrowmq_lab.chaos.proxy import BUFFER, Proxy, Route

NODE, OTHER = address_of(240), address_of(241)
SHORT = 0.3
"""Seconds in which nothing must come: where a test is wrong about that on a slow machine, it passes."""


class Echo:
    """A server that sends back what it gets, and says the end when it is told the end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._answer, args=(connection,), daemon=True))
            self.threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                pass


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture(scope="module")
def absent() -> int:
    """A port at which nobody listens."""
    return free_ports(["127.0.0.1", NODE, OTHER], 1)[0]


@pytest.fixture(scope="module")
def proxy(echo: Echo, absent: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    routes = [Route("node", NODE, "broker", echo.port), Route("other", OTHER, "broker", echo.port)]
    with Proxy([*routes, Route("node", NODE, "away", absent)], tmp_path_factory.mktemp("proxy") / "log") as made:
        yield made


@pytest.fixture(autouse=True)
def whole(proxy: Proxy) -> Iterator[None]:
    yield
    for name in ("node", "other", "broker"):
        proxy.heal(name, reset=True)


def connect(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=60)


def talk(connection: socket.socket, word: bytes = b"word") -> None:
    connection.sendall(word)
    assert hear(connection, len(word)) == word


def hear(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def is_reset(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def test_it_passes_on_and_says_the_end(proxy: Proxy, echo: Echo) -> None:
    with connect(NODE, echo.port) as connection:
        talk(connection, bytes(range(256)) * 4000)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("struck", ["node", "broker"])
def test_a_cut_resets_connections_and_refuses_new_ones(proxy: Proxy, echo: Echo, struck: str) -> None:
    with connect(NODE, echo.port) as connection:
        talk(connection)
        proxy.cut(struck)
        assert is_reset(connection)
    with pytest.raises(ConnectionRefusedError):
        connect(NODE, echo.port)
    proxy.heal(struck)
    with connect(NODE, echo.port) as connection:
        talk(connection)


def test_a_cut_node_leaves_the_others_alone_and_a_cut_broker_nobody(proxy: Proxy, echo: Echo) -> None:
    with connect(NODE, echo.port) as connection, connect(OTHER, echo.port) as other:
        talk(connection), talk(other)
        proxy.cut("node")
        assert is_reset(connection)
        talk(other)
        proxy.cut("broker")
        assert is_reset(other)


def test_what_two_faults_hold_is_whole_when_both_are_over(proxy: Proxy, echo: Echo) -> None:
    proxy.cut("node")
    proxy.cut("broker")
    proxy.heal("node")
    with pytest.raises(ConnectionRefusedError):
        connect(NODE, echo.port)
    proxy.heal("broker")
    with connect(NODE, echo.port) as connection:
        talk(connection)


@pytest.mark.parametrize("directions", [{}, {"to_brokers": False}, {"to_nodes": False}])
def test_silence_keeps_everything_and_goes_on(proxy: Proxy, echo: Echo, directions: dict[str, bool]) -> None:
    with connect(NODE, echo.port) as connection, connect(OTHER, echo.port) as other:
        talk(connection)
        proxy.silence("node", **directions)
        connection.sendall(b"late")
        connection.settimeout(SHORT)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        talk(other)
        with connect(NODE, echo.port) as new:  # is accepted, and hears nothing
            new.sendall(b"new")
            new.settimeout(SHORT)
            with pytest.raises(TimeoutError):
                new.recv(1)
            proxy.heal("node")
            new.settimeout(60)
            assert hear(new, 3) == b"new"
        connection.settimeout(60)
        assert hear(connection, 4) == b"late"
        talk(connection)


def test_a_silence_may_end_with_a_reset(proxy: Proxy, echo: Echo) -> None:
    with connect(NODE, echo.port) as connection:
        talk(connection)
        proxy.silence("broker")
        connection.sendall(b"lost")
        proxy.heal("broker", reset=True)
        assert is_reset(connection)
    with connect(NODE, echo.port) as connection:
        talk(connection)


def test_a_broker_that_is_not_there_is_a_reset(proxy: Proxy, absent: int) -> None:
    try:
        connection = connect(NODE, absent)
    except ConnectionResetError:
        return  # before this thread had seen that it was accepted
    with connection:
        assert is_reset(connection)


def test_a_receiver_that_does_not_read_holds_its_sender_up(proxy: Proxy, echo: Echo) -> None:
    """Buffers of the system and the proxy's are all that is taken; nothing is lost when it reads again."""
    with connect(NODE, echo.port) as connection:
        talk(connection)
        connection.settimeout(SHORT)
        taken = []

        def fill() -> None:
            while sum(taken) < 1 << 30:
                taken.append(connection.send(b"x" * BUFFER))

        with pytest.raises(TimeoutError):
            fill()
        connection.settimeout(60)
        assert hear(connection, sum(taken)) == b"x" * sum(taken)
        talk(connection)


def test_a_connection_that_is_over_is_forgotten(proxy: Proxy, echo: Echo) -> None:
    while proxy.connections():  # of the test before
        pass
    connection = connect(NODE, echo.port)
    talk(connection)
    assert proxy.connections() == 1
    connection.close()
    while proxy.connections():
        pass
