"""Bounds what Arrow may take for data that clients send: a compressed batch of some kilobytes may say that it becomes gigabytes.

Arrow's server inflates a batch before anybody can look at it, with the default pool of the C++ library, which has no limit. Its allocator
(mimalloc) has: told so by the environment when the library is loaded, it takes one piece of address space and never more, and
Arrow refuses a batch that does not fit, before it writes a byte. What the broker itself makes uses another pool, so that it never
runs out because of what clients send. This module must not import Arrow.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ARENA = "256MiB"
"""What clients' batches may become together when they are compressed; batches that are not compressed take nothing of it."""
_SETTINGS = {"MIMALLOC_DISALLOW_OS_ALLOC": "1", "MIMALLOC_RESERVE_OS_MEMORY": ARENA}


def limit_arena(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give Arrow's default pool its limit. To be called before Arrow is loaded; what an operator has set stays."""
    if not any(name in environment for name in _SETTINGS):
        environment.update(_SETTINGS)


def use_own_pool() -> None:
    """Let everything that this process makes itself come from a pool without that limit; to be called once Arrow is loaded."""
    import pyarrow as pa

    own = pa.jemalloc_memory_pool if "jemalloc" in pa.supported_memory_backends() else pa.system_memory_pool
    pa.set_memory_pool(own())
