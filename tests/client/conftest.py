"""What the client's tests share: a bus over a link without a broker."""

import pytest

from escrowmq.client.bus import Bus
from escrowmq.testing.link import TwinLink


@pytest.fixture
def twin():
    return TwinLink()


@pytest.fixture
def bus(twin):
    with Bus([twin]) as bus:
        yield bus
