"""A TCP proxy before a server, which cuts a connection at a place in what the client says."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class CuttingProxy:
    """Passes everything on, both ways, until the client says ``cut_at``.

    Then, ``answered`` False: what came before these bytes is passed on, and both sides are cut. ``answered`` True: the
    server hears all, and the client is cut when the server has answered.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()
        self.cut_at: bytes | None = None
        self.answered = False
        self.cuts = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._open:
            _cut(one)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                answered = threading.Event()
                for work in (
                    lambda c=client, s=server, a=answered: self._up(c, s, a),
                    lambda c=client, s=server, a=answered: self._down(c, s, a),
                ):
                    self._threads.append(threading.Thread(target=work))
                    self._threads[-1].start()

    def _up(self, client: socket.socket, server: socket.socket, last: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while said := client.recv(1 << 20):
                if self.cut_at is None or self.cut_at not in said:
                    server.sendall(said)
                    continue
                self.cuts += 1
                if not self.answered:
                    server.sendall(said[: said.index(self.cut_at)])
                    break
                last.set()
                server.sendall(said)
                return
        _cut(client)
        _cut(server)

    def _down(self, client: socket.socket, server: socket.socket, last: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while heard := server.recv(1 << 20):
                if last.is_set():
                    break
                client.sendall(heard)
        _cut(client)
        _cut(server)


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
