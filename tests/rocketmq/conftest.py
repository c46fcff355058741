"""A served broker, RocketMQ gateways over it, and raw clients."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rocketmq_runs import QUICK, GatewayProcess, RawClient, Start

import escrowmq as mq
from escrowmq.broker.serving.serve import serve as serve_broker
from escrowmq.settings import BrokerSettings


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker; tests use topics of their own."""
    ready: list[dict[str, Any]] = []
    started, stop = threading.Event(), threading.Event()

    def announce(facts: dict[str, Any]) -> None:
        ready.append(facts)
        started.set()

    def work() -> None:
        folder = tmp_path_factory.mktemp("rocketmq") / "data"
        serve_broker(folder, listen="127.0.0.1:0", settings=BrokerSettings(**QUICK), announce=announce, stop=stop)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(60)
    yield str(ready[0]["url"])
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def module_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def gateway(broker: str, module_stack: ExitStack) -> GatewayProcess:
    """A gateway for all tests of a module; groups named ``fifo-...`` are ordered."""
    found = GatewayProcess(broker, ("--fifo", "fifo-*"))
    module_stack.callback(found.stop)
    return found


@pytest.fixture
def start(broker: str) -> Iterator[Start]:
    """Start a gateway that the test stops or kills."""
    started: list[GatewayProcess] = []

    def run(*words: str, url: str = broker, **ports: str) -> GatewayProcess:
        started.append(GatewayProcess(url, words, **ports))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def connect(gateway: GatewayProcess) -> Iterator[Callable[..., RawClient]]:
    """Connect raw clients, to the module's gateway unless an address is given."""
    clients: list[RawClient] = []

    def make(address: str | None = None, **given: Any) -> RawClient:
        clients.append(RawClient(address or gateway.ready["rocketmq"], **given))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def raw(connect: Callable[..., RawClient]) -> RawClient:
    return connect()


@pytest.fixture
def bus(broker: str) -> Iterator[mq.Bus]:
    with mq.connect(broker) as found:
        yield found


@pytest.fixture
def topic() -> str:
    """A topic of the test's own."""
    return f"t-{uuid.uuid4().hex[:12]}"
