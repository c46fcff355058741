"""The key hash: golden values (changing them moves keys between queues), and independence of where the bytes lie."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.message.hashes import hash_keys

MASK = (1 << 64) - 1
GOLDEN = {
    "": 0x0000000000000000,
    "a": 0xEDA3EBE27E2EDB64,
    "order-17": 0x05E3CBFD0A9755DE,
    "ключ": 0xC9D8A839D7786926,
    "a key of more than sixteen bytes": 0xA492856244796DC4,
}


def by_the_book(key: str) -> int:
    """The same hash with Python's numbers, word by word."""
    raw = key.encode()
    value = len(raw) * 0x9E3779B97F4A7C15 & MASK
    for at in range(0, len(raw), 8):
        word = int.from_bytes(raw[at : at + 8], "little")
        value = (value ^ word) * 0x9E3779B97F4A7C15 & MASK
        value ^= value >> 32
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def test_golden_values():
    assert dict(zip(GOLDEN, hash_keys(pa.array(list(GOLDEN))).tolist(), strict=True)) == GOLDEN


@given(st.lists(st.text(max_size=40)), st.integers(0, 2), st.integers(0, 2))
def test_hash_is_that_of_the_book_wherever_the_key_lies(keys, front, back):
    column = pa.array(["front"] * front + keys + ["back"] * back, pa.utf8()).slice(front, len(keys))
    assert hash_keys(column).tolist() == [by_the_book(key) for key in keys]


def test_no_key_hashes_like_the_empty_one():
    assert hash_keys(pa.array([None, "", "a", None])).tolist() == [by_the_book(k) for k in ("", "", "a", "")]


def test_padding_makes_no_two_keys_equal():
    keys = ["a" + "\0" * n for n in range(20)]
    assert len(set(hash_keys(pa.array(keys)).tolist())) == len(keys)
