"""The pytest plugin: a bus in memory for a test, and its clock.

pytest finds it by itself where EscrowMQ is installed. Only its fixtures import the broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from escrowmq.testing.buses import Clock, MemoryBus


@pytest.fixture
def escrow_bus() -> Iterator[MemoryBus]:
    """Yield a bus to a broker in memory, new for each test (:func:`escrowmq.testing.memory_bus`)."""
    from escrowmq.testing import memory_bus

    with memory_bus() as bus:
        yield bus


@pytest.fixture
def escrow_clock(escrow_bus: MemoryBus) -> Clock:
    """Return the clock of ``escrow_bus``: ``escrow_clock.advance(60)``."""
    return escrow_bus.clock
