"""Hash of keys and ids, equal on all machines and in all versions: it determines queues, and places in look-up files.

Bytes are read as little-endian 64-bit words, the last one padded with zeros, and mixed word by word, starting with the
length, so padding cannot make two keys equal. Tests contain golden values: a change would move keys between queues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINISH_1 = np.uint64(0xBF58476D1CE4E5B9)
_FINISH_2 = np.uint64(0x94D049BB133111EB)


def checksum(*chunks: bytes | memoryview | pa.Buffer, seed: int = 0) -> int:
    """Return the xxh3_64 of these bytes, joined: the checksum in all formats of files and records."""
    digest = xxhash.xxh3_64(seed=seed)
    for chunk in chunks:
        digest.update(chunk)
    return int(digest.intdigest())


def hash_keys(keys: pa.Array) -> UInt64s:
    """Return one uint64 per row of a utf8 array; rows without a key get the hash of the empty key."""
    data, starts, lengths = _bytes_and_ranges(keys)
    longest = int(lengths.max(initial=0))
    if longest and len(lengths) and longest == int(lengths.min()):
        padded = np.zeros((len(lengths), longest + -longest % 8), np.uint8)
        padded[:, :longest] = data[: len(lengths) * longest].reshape(-1, longest)
        return _hash_words(padded.view(np.uint64), longest)
    hashes = lengths.astype(np.uint64) * _MULTIPLIER
    for word in range((longest + 7) // 8):
        rows = np.flatnonzero(lengths > 8 * word)
        at = starts[rows] + 8 * word
        words = data[at[:, None] + np.arange(8)].view(np.uint64).ravel()
        rest = np.minimum(lengths[rows] - 8 * word, 8).astype(np.uint64)
        words &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(8) * (np.uint64(8) - rest))
        mixed = (hashes[rows] ^ words) * _MULTIPLIER
        hashes[rows] = mixed ^ (mixed >> np.uint64(32))
    return _finish(hashes)


def hash_ids(ids: pa.Array) -> UInt64s:
    """Return one uint64 per row of a column of ids: the hash of their 16 bytes."""
    words = np.frombuffer(ids.buffers()[1], np.uint64, 2 * len(ids), 16 * ids.offset).reshape(-1, 2)
    return _hash_words(words, 16)


def _hash_words(words: UInt64s, length: int) -> UInt64s:
    hashes = np.full(len(words), length, np.uint64) * _MULTIPLIER
    for column in range(words.shape[1]):
        hashes ^= words[:, column]
        hashes *= _MULTIPLIER
        hashes ^= hashes >> np.uint64(32)
    return _finish(hashes)


def _finish(hashes: UInt64s) -> UInt64s:
    hashes ^= hashes >> np.uint64(30)
    hashes *= _FINISH_1
    hashes ^= hashes >> np.uint64(27)
    hashes *= _FINISH_2
    hashes ^= hashes >> np.uint64(31)
    return hashes


_MASK = (1 << 64) - 1


def hash_key(key: str) -> int:
    """Hash one key like :func:`hash_keys`."""
    return hash_bytes(key.encode())


def hash_bytes(data: bytes) -> int:
    """Hash the bytes of one key or id like :func:`hash_keys` and :func:`hash_ids`."""
    mixed = len(data) * int(_MULTIPLIER) & _MASK
    for at in range(0, len(data), 8):
        mixed = (mixed ^ int.from_bytes(data[at : at + 8], "little")) * int(_MULTIPLIER) & _MASK
        mixed ^= mixed >> 32
    mixed = (mixed ^ (mixed >> 30)) * int(_FINISH_1) & _MASK
    mixed = (mixed ^ (mixed >> 27)) * int(_FINISH_2) & _MASK
    return mixed ^ (mixed >> 31)


def _bytes_and_ranges(keys: pa.Array) -> tuple[npt.NDArray[np.uint8], Int64s, Int64s]:
    """Return the bytes of a utf8 array (with eight zeros appended), and each row's start and length."""
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
