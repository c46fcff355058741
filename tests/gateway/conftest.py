"""Gateways over embedded and served brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_runs import Client, Receiver

from escrowmq.broker.serving.serve import serve as serve_broker
from escrowmq.connecting import links
from escrowmq.gateway import Address, GatewaySettings, beside
from escrowmq.settings import BrokerSettings

QUICK: dict[str, Any] = {
    "transaction_timeout": 0.1,
    "check_interval": 0.1,
    "check_max": 1000,
    "retry_backoff": 0.02,
    "lease_seconds": 600.0,
}
"""Settings under which check-back and redelivery come to pass within a test."""


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Links to a broker of a kind: one broker a kind and module, their topics and groups do not meet."""
    import threading

    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def served() -> str:
            ready: list[dict[str, Any]] = []
            started, stop = threading.Event(), threading.Event()

            def announce(told: dict[str, Any]) -> None:
                ready.append(told)
                started.set()

            def work() -> None:
                settings = BrokerSettings(**QUICK)
                folder = tmp_path_factory.mktemp("served") / "data"
                serve_broker(folder, listen="127.0.0.1:0", settings=settings, announce=announce, stop=stop)

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            assert started.wait(60)
            stack.callback(thread.join)
            stack.callback(stop.set)
            return str(ready[0]["url"])

        def get(kind: str) -> Any:
            if kind not in urls:
                urls[kind] = served() if kind == "served" else f"file:{tmp_path_factory.mktemp('embedded') / 'data'}"
            return links(urls[kind], QUICK if kind == "embedded" else {})

        yield get


@pytest.fixture(params=["embedded", "served"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run_gateway() -> Iterator[Callable[..., Client]]:
    """Run a gateway over links, with limits and addresses, and a client of it. What is limited has no limit of time
    that a busy machine could exceed, unless it is given one."""
    with ExitStack() as stack:

        def run(over: Any, addresses: dict[str, Address] | None = None, **limits: Any) -> Client:
            settings = GatewaySettings(**{"timeout": 60.0, "header_timeout": 60.0, "body_timeout": 60.0, **limits})
            ready = stack.enter_context(
                beside(lambda _: over, listen="127.0.0.1:0", addresses=addresses, settings=settings)
            )
            client = Client(ready["http"])
            stack.callback(client.http.close)
            return client

        yield run


@pytest.fixture
def client(kind: str, brokers: Callable[[str], Any], run_gateway: Callable[..., Client]) -> Client:
    """A client of a gateway of its own."""
    return run_gateway(brokers(kind))


@pytest.fixture
def embedded(tmp_path: Path) -> Callable[..., Any]:
    """Links to a broker of this test alone."""
    return lambda **settings: links(f"file:{tmp_path / 'data'}", {**QUICK, **settings})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()
