"""Test tools for your own tests: a bus in memory, ``crash_everywhere``; disks, logs, clocks, conformance suites.

Names load at their first use. ``pip install escrowmq`` and pytest are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.testing.buses import AsyncMemoryBus, MemoryBus, amemory_bus, memory_bus
    from escrowmq.testing.crashing.everywhere import Survived, crash_everywhere
    from escrowmq.testing.crashing.world import World

__all__ = ["AsyncMemoryBus", "MemoryBus", "Survived", "World", "amemory_bus", "crash_everywhere", "memory_bus"]

_HOMES = {
    "buses": ("AsyncMemoryBus", "MemoryBus", "amemory_bus", "memory_bus"),
    "crashing.everywhere": ("Survived", "crash_everywhere"),
    "crashing.world": ("World",),
}
_LAZY = {name: home for home, names in _HOMES.items() for name in names}

__getattr__ = from_extra(__name__, _LAZY, needs={}, who="testing.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
