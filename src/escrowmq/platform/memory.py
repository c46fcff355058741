"""Whether the C allocator keeps freed memory: for the next batch, in processes that read a lot, or not.

A batch is some megabytes. Allocators return such a piece to the system at once, and the system zeroes every page of the
next one: in a virtual machine that costs a reader more than copying the bytes.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress

import pyarrow as pa

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 256 << 20  # bytes of freed memory that the process keeps
_LARGEST = 32 << 20  # maximum bytes of one kept piece, the largest value that the GNU C library accepts


@functools.cache
def keep_freed_memory() -> bool:
    """Enable it once for this process. Returns whether the C library supports it: only the GNU one (Linux)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    if not (mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _KEPT)):
        return False
    pa.set_memory_pool(pa.system_memory_pool())
    return True


def return_freed_memory() -> None:
    """Return memory that the C allocator has freed and kept. This takes some milliseconds per 100 MiB.

    It does nothing with another C library than GNU's. Arrow's ``release_unused`` of its system pool does not do it.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
