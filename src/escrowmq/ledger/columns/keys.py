"""The key hash: which queue a key belongs to, the same on every machine and version.

Keys are read as little-endian 64-bit words, the last one padded with zeros, and mixed word by word; the length goes in
first, so padding cannot make two keys equal. Golden values stand in the tests: changing this moves keys between queues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Int64s, UInt8s

UInt64s = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINISH_1 = np.uint64(0xBF58476D1CE4E5B9)
_FINISH_2 = np.uint64(0x94D049BB133111EB)


def hash_keys(keys: pa.Array) -> UInt64s:
    """One uint64 per row of a utf8 array; rows without a key get the hash of the empty key."""
    data, starts, lengths = _bytes_of(keys)
    hashes = lengths.astype(np.uint64) * _MULTIPLIER
    for word in range(int((lengths.max(initial=0) + 7) // 8)):
        rows = np.flatnonzero(lengths > 8 * word)
        at = starts[rows] + 8 * word
        words = data[at[:, None] + np.arange(8)].view(np.uint64).ravel()
        rest = np.minimum(lengths[rows] - 8 * word, 8).astype(np.uint64)
        words &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(8) * (np.uint64(8) - rest))
        mixed = (hashes[rows] ^ words) * _MULTIPLIER
        hashes[rows] = mixed ^ (mixed >> np.uint64(32))
    hashes = (hashes ^ (hashes >> np.uint64(30))) * _FINISH_1
    hashes = (hashes ^ (hashes >> np.uint64(27))) * _FINISH_2
    return hashes ^ (hashes >> np.uint64(31))


_MASK = (1 << 64) - 1


def hash_key(key: str) -> int:
    """As :func:`hash_keys`, of one key."""
    data = key.encode()
    mixed = len(data) * int(_MULTIPLIER) & _MASK
    for at in range(0, len(data), 8):
        mixed = (mixed ^ int.from_bytes(data[at : at + 8], "little")) * int(_MULTIPLIER) & _MASK
        mixed ^= mixed >> 32
    mixed = (mixed ^ (mixed >> 30)) * int(_FINISH_1) & _MASK
    mixed = (mixed ^ (mixed >> 27)) * int(_FINISH_2) & _MASK
    return mixed ^ (mixed >> 31)


def _bytes_of(keys: pa.Array) -> tuple[UInt8s, Int64s, Int64s]:
    """The bytes of a utf8 array (eight zeros added), each row's start in them and its length."""
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(keys) + 1, 4 * keys.offset).astype(np.int64)
    low, high = int(offsets[0]), int(offsets[-1])
    data = np.zeros(high - low + 8, np.uint8)
    if high > low:
        data[: high - low] = np.frombuffer(data_buffer, np.uint8, high - low, low)
    lengths = np.diff(offsets)
    if keys.null_count:
        lengths = np.where(keys.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    return data, offsets[:-1] - low, lengths
