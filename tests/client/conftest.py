"""What the client's tests share: a bus over a link without a broker."""

import contextlib

import pytest

from escrowmq.client.bus import Bus
from escrowmq.client.links import presence
from escrowmq.testing.link import TwinLink


@pytest.fixture
def twin():
    return TwinLink()


@pytest.fixture
def bus(twin):
    with Bus([twin]) as bus:
        yield bus


@pytest.fixture
def patient(monkeypatch):
    """Brokers that are all there are waited for, however slow the machine: none is passed over for another."""
    monkeypatch.setattr(presence, "AWAY_SECONDS", 60.0)


@pytest.fixture
def hurried():
    """A context in which the calls of a producer give up soon: for what is held up on purpose. Before and after it they
    have their time, however slow the machine."""

    @contextlib.contextmanager
    def hurrying(producer, seconds=0.05):
        production = producer._production
        patience = production.timeout

        def give(timeout):
            production.timeout = timeout
            for lane in [lane for lanes in production._by_kind.values() for lane in lanes if lane is not None]:
                lane._timeout = timeout

        give(seconds)
        try:
            yield
        finally:
            give(patience)

    return hurrying
