"""``escrowmq serve --webhook`` and ``escrowmq webhooks test``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Run

from escrowmq.cli.failures import Exit


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a receiver, and what it was told."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204 if self.path == "/hook" else 403)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", told
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_address_is_tried_once(run: Run, posted: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, told = posted
    config = tmp_path / "escrowmq.toml"
    config.write_text(f'[webhook.pager]\nurl = "{url}/hook"\nevents = ["parked"]\n')
    ran = run("webhooks", "test", "--config", str(config), "--json")
    assert (ran.code, [row["ok"] for row in json.loads(ran.out)]) == (0, [True])
    assert [one["type"] for one in told] == ["escrowmq.test"]
    ran = run("webhooks", "test", "--config", str(config), "--webhook", f"dead={url}/wrong")
    assert (ran.code, "status 403" in ran.out) == (Exit.UNKNOWN, True)


def test_a_served_broker_tells_that_it_has_opened(
    serve: Any, posted: tuple[str, list[dict[str, Any]]], eventually: Any
) -> None:
    url, told = posted
    serve("--webhook", "opened=http://127.0.0.1:9/away", "--webhook", f"opened,parked={url}/hook")
    eventually(lambda: told, timeout=60.0)
    assert told[0]["type"] == "escrowmq.opened"


@pytest.mark.parametrize(
    "words", [(), ("--webhook", "parked"), ("--webhook", "parkd=http://127.0.0.1/"), ("--config", "absent.toml")]
)
def test_mistakes_are_told(run: Run, words: tuple[str, ...]) -> None:
    assert run("webhooks", "test", *words).code == Exit.USAGE
