"""kombu's own tests of transports, on this one. They are in kombu's source distribution, unpacked in the folder that
KOMBU_TESTS names (``pip download --no-deps --no-binary kombu kombu``)."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import kombu
import pytest

import escrowmq.celery

FOLDER = os.environ.get("KOMBU_TESTS", "")
if not FOLDER and os.environ.get("CI"):
    pytest.fail("KOMBU_TESTS is not set", pytrace=False)
if not FOLDER:
    pytest.skip("kombu's source distribution is not here", allow_module_level=True)

sys.path.append(FOLDER)  # behind the installed kombu
common: Any = importlib.import_module("t.integration.common")
virtual: Any = importlib.import_module("t.unit.transport.virtual.test_base")
from t.unit.conftest import stdouts  # noqa: E402, F401

__all__ = ["escrowmq"]


@pytest.fixture
def connection(shared_broker: str) -> kombu.Connection:
    return kombu.Connection(shared_broker, transport_options={"requeue_delay": 0.0})


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection("escrow://127.0.0.1:1", connect_timeout=0.1)


@pytest.fixture
def failover_connection(shared_broker: str) -> kombu.Connection:
    return kombu.Connection(f"escrow://127.0.0.1:1;{shared_broker}", connect_timeout=0.5)


class TestBasics(common.BasicFunctionality):
    pass


class TestExchanges(common.BaseExchangeTypes):
    pass


class TestMessages(common.BaseMessage):
    pass


class TestFailover(common.BaseFailover):
    test_failover_switches_to_alternate_url = None
    """It reads the port of the first URL; a URL of ours may name several brokers, so kombu does not take it apart."""


@pytest.fixture(autouse=True)
def _on_escrow(shared_broker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "client", lambda **given: kombu.Connection(shared_broker, **given))


class TestQoS(virtual.test_QoS):
    pass


class TestMessage(virtual.test_Message):
    pass


class TestChannel(virtual.test_Channel):
    pass


class TestTransport(virtual.test_Transport):
    pass
