"""What the gateway's tests share: running gateways, a client that speaks JSON, receivers of check-backs, counted
links."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pyarrow as pa

from escrowmq.wire import Exchange, Link, ParcelsByExchange


class Counted(ParcelsByExchange):
    """A link that counts its exchanges by kind, parcels too, and can be told to hold them up."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.counts: dict[Exchange, int] = dict.fromkeys(Exchange, 0)
        self.rows: dict[Exchange, int] = dict.fromkeys(Exchange, 0)
        self.gate = threading.Event()
        self.gate.set()

    def forget(self) -> None:
        self.counts = dict.fromkeys(Exchange, 0)
        self.rows = dict.fromkeys(Exchange, 0)

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        if kind is not Exchange.RECEIVE:
            assert self.gate.wait(120)
        self.counts[kind] += 1
        self.rows[kind] += batch.num_rows
        return self._link.exchange(kind, batch, options)

    def __getattr__(self, name: str) -> Any:
        if name == "attach":  # it may block, so no event loop sends through it
            raise AttributeError(name)
        return getattr(self._link, name)


class Client:
    """JSON over HTTP: the status and the content of each answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        # The server closes a connection that was idle for five seconds; one that it is about to close must not be used
        # again.
        limits = httpx.Limits(keepalive_expiry=1.0)
        # Without TLS there is nothing to verify: to read the certificates for it takes 25 ms of processor time.
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=60.0, limits=limits, verify=False)

    def post(self, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content is None:
            answer = self.http.post(path, headers=named)
        elif isinstance(content, bytes):
            answer = self.http.post(
                path, content=content, headers={"content-type": "application/octet-stream", **named}
            )
        else:
            answer = self.http.post(path, json=content, headers=named)
        return answer.status_code, answer.json()

    def get(self, path: str, **query: Any) -> tuple[int, Any]:
        answer = self.http.get(path, params=query)
        return answer.status_code, answer.json()

    def ok(self, path: str, content: Any = None, **headers: str) -> Any:
        status, told = self.post(path, content, **headers)
        assert status == 200, (status, told)
        return told

    def prepare(self, group: str, topic: str, text: str = "half", **headers: str) -> str:
        half = {"messages": [{"topic": topic, "text": text}]}
        return str(self.ok(f"/v1/groups/{group}/transactions", half, **headers)["transaction_id"])

    def state(self, group: str, transaction: str) -> str:
        status, told = self.get(f"/v1/groups/{group}/transactions/{transaction}")
        assert status == 200, told
        return str(told["state"])

    def receive(self, group: str, topic: str, **options: Any) -> list[Any]:
        asked = {"topics": [topic], "as_text": True, **options}
        return list(self.ok(f"/v1/consumers/{group}/receive", asked)["messages"])


Answer = Callable[["Asked"], tuple[int, dict[str, str], bytes]]


class Asked:
    """One question as the receiver got it."""

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.headers = headers
        self.body = body

    @property
    def transactions(self) -> list[dict[str, Any]]:
        return list(json.loads(self.body)["transactions"])

    @property
    def ids(self) -> list[str]:
        return [one["transaction_id"] for one in self.transactions]

    def all(self, word: str) -> bytes:
        return json.dumps({"outcomes": dict.fromkeys(self.ids, word)}).encode()


class Receiver:
    """A receiver of check-backs that answers as it is told; ``asked`` are the questions that came. Unless it
    ``listens``, its port is its own and refuses connections until :meth:`listen`."""

    def __init__(self, *, listens: bool = True) -> None:
        self.asked: list[Asked] = []
        self.came = threading.Condition()
        self.answer: Answer = lambda asked: (200, {}, asked.all("in progress"))
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                asked = Asked({name.lower(): value for name, value in self.headers.items()}, body)
                if asked.ids:
                    with receiver.came:
                        receiver.asked.append(asked)
                        receiver.came.notify_all()
                    status, headers, content = receiver.answer(asked)
                else:  # somebody knocks
                    status, headers, content = 200, {}, asked.all("in progress")
                try:
                    self.send_response(status)
                    for name, value in {"content-length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the gateway did not want to hear more

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server.daemon_threads = True
        self.server.server_bind()
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/checks"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        if listens:
            self.listen()

    def listen(self) -> None:
        self.server.server_activate()
        self._thread.start()

    def wait(self, count: int) -> None:
        """Until ``count`` questions came."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.asked) >= count, 60)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def raw_connection(url: str) -> Iterator[socket.socket]:
    """A bare connection, for requests that no client would send."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


@contextmanager
def raw_request(url: str, path: str, content: Any) -> Iterator[None]:
    """A client that has posted JSON, and hangs up at the end of the block without an answer."""
    with raw_connection(url) as connection:
        body = json.dumps(content).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the problem of a raw answer that ends with the connection or with its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    head, _, rest = received.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    while len(rest) < length:
        chunk = connection.recv(65536)
        assert chunk, rest
        rest += chunk
    return int(head.split()[1]), json.loads(rest)
