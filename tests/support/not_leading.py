"""A broker that does not lead, in a few lines: what it says of the leader is what the test orders, true or not."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from escrowmq.errors import Code, error
from escrowmq.wire import frames
from escrowmq.wire.frames import Assembler, Kind, Welcome


class Standby:
    """Welcomes as a standby, and answers everything but ``hello`` with NOT_LEADER.

    ``leader``, ``replicas``: what it names. ``boasts``: in its welcome it says that it leads, of this epoch. ``asked``:
    how often it was greeted or asked ``hello``, ``refused``: how often it was asked anything else.
    """

    def __init__(self, shard: int, leader: str | None = None, replicas: tuple[str, ...] = (), port: int = 0) -> None:
        self.shard, self.leader, self.replicas = shard, leader, replicas
        self.boasts: int | None = None
        self.asked = self.refused = 0
        self._count = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        self.url = f"escrow://127.0.0.1:{self.port}"
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        assembler = Assembler(1 << 26)
        with client, suppress(OSError):
            while count := client.recv_into(assembler.target()):
                for frame in assembler.filled(count):
                    if (answer := self._answer(frame)) is not None:
                        client.sendall(answer)

    def _hello(self) -> dict[str, Any]:
        with self._count:
            self.asked += 1
        hello: dict[str, Any] = {
            "protocol": 1,
            "version": "0",
            "shard": self.shard,
            "epoch": self.boasts or 1,
            "limits": {},
            "role": "leader" if self.boasts else "standby",
            "replicas": list(self.replicas),
        }
        return hello if self.leader is None else {**hello, "leader": self.leader}

    def _answer(self, frame: frames.Frame) -> bytes | None:
        if frame.kind == Kind.HELLO:
            limits = Welcome(frames.FORMAT_VERSION, 1, "0", 1 << 26, 4096, 1 << 26)
            return frames.welcome(limits, self._hello())
        if frame.kind == Kind.ACTION and frames.action_name(frame) == "hello":
            return frames.result(frame.number, self._hello())
        if frame.kind == Kind.PING:
            return frames.pong(bytes(frame.body))
        if frame.kind in (Kind.GOODBYE, Kind.CANCEL, Kind.CREDIT):
            return None
        with self._count:
            self.refused += 1
        return frames.refused(frame.number, error(Code.NOT_LEADER, hint=self.leader or ""))

    def shutdown(self) -> None:
        """Stop listening, and break all connections."""
        for one in (self._server, *self._clients):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
