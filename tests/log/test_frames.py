"""The frame codec: every batch comes back equal, without a copy, and no wrong byte gets by."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Corrupt, Misuse
from escrowmq.log import bodies, frames
from escrowmq.schemas import STORED, Kind, is_fixed_width
from escrowmq.testing.log_conformance import checked, messages

NUMBERS = {"sequence": 7, "position": 100, "time_us": 5, "epoch": 2, "synced": 4, "salt": 99}


def _encoded(kind: Kind, batch: pa.RecordBatch, lz4: bool = False) -> bytes:
    return b"".join(bytes(memoryview(c)) for c in frames.encode(kind, batch, lz4=lz4, **NUMBERS))


def _decoded(data: bytes) -> pa.RecordBatch:
    buffer = pa.py_buffer(data)
    header = frames.read_header(buffer, 0)
    assert frames.is_intact(memoryview(buffer), 0, header, NUMBERS["salt"])
    return frames.decode(buffer, 0, header, "f")


def _values(kind: pa.DataType, nullable: bool) -> st.SearchStrategy[Any]:
    values: st.SearchStrategy[Any]
    if pa.types.is_boolean(kind):
        values = st.booleans()
    elif pa.types.is_integer(kind):
        bits = kind.bit_width
        signed = pa.types.is_signed_integer(kind)
        values = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)
    elif pa.types.is_map(kind):
        values = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=3)
    elif pa.types.is_fixed_size_binary(kind):
        values = st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    elif pa.types.is_binary(kind):
        values = st.binary(max_size=40)
    else:
        values = st.text(max_size=10)
    return st.none() | values if nullable else values


@st.composite
def batches(draw: st.DrawFn) -> tuple[Kind, pa.RecordBatch]:
    """Any batch of any kind, perhaps a slice out of the middle of a larger one."""
    kind = draw(st.sampled_from(list(Kind)))
    rows = draw(st.integers(1, 6))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    columns = []
    for field in STORED[kind]:
        size = before + rows + after
        values = draw(st.lists(_values(field.type, field.nullable), min_size=size, max_size=size))
        columns.append(pa.array(values, field.type))
    return kind, pa.RecordBatch.from_arrays(columns, schema=STORED[kind]).slice(before, rows)


@given(batches(), st.booleans())
def test_round_trip(given_batch: tuple[Kind, pa.RecordBatch], lz4: bool) -> None:
    kind, batch = given_batch
    data = _encoded(kind, batch, lz4)
    assert len(data) % 8 == 0
    assert len(data) <= frames.size_bound(batch)
    header = frames.read_header(data, 0)
    assert (header.kind, header.rows, header.frame_bytes) == (kind, batch.num_rows, len(data))
    assert (header.sequence, header.position, header.time_us, header.epoch) == (7, 100, 5, 2)
    assert header.synced == 4
    again = _decoded(data)
    again.validate(full=True)
    assert again.equals(batch)
    assert again.to_pylist() == batch.to_pylist()


@given(batches(), st.data())
def test_no_flipped_bit_gets_by(given_batch: tuple[Kind, pa.RecordBatch], data: st.DataObject) -> None:
    encoded = bytearray(_encoded(*given_batch))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    header = frames.read_header(encoded, 0)
    assert not frames.is_intact(memoryview(encoded), 0, header, NUMBERS["salt"])


@pytest.mark.parametrize("kind", [k for k in Kind if is_fixed_width(STORED[k])])
def test_bare_columns_take_their_widths(kind: Kind) -> None:
    width = sum(field.type.bit_width // 8 for field in STORED[kind])
    for rows in (1, 3, 1000):
        batch = pa.RecordBatch.from_pylist([dict.fromkeys(STORED[kind].names, 1)] * rows, STORED[kind])
        assert len(_encoded(kind, batch)) == 56 + rows * width + -rows * width % 8


def test_a_lone_check_takes_64_bytes() -> None:
    """Design section 11: at most 64 bytes a check."""
    assert len(_encoded(Kind.CHECKED, checked([5]))) == 64


def test_bodies_are_not_copied() -> None:
    data = pa.py_buffer(_encoded(Kind.PLAIN, messages(50, body=1000)))
    batch = frames.decode(data, 0, frames.read_header(data, 0), "f")
    body = batch.column("body").buffers()[2]
    assert data.address < body.address < data.address + data.size
    bare = pa.py_buffer(_encoded(Kind.CHECKED, checked([1, 2, 3])))
    column = frames.decode(bare, 0, frames.read_header(bare, 0), "f").column("transaction")
    assert column.buffers()[1].address == bare.address + 56


def test_large_rows_and_lz4() -> None:
    batch = messages(200, body=10_000)
    plain, small = _encoded(Kind.HALF, batch), _encoded(Kind.HALF, batch, lz4=True)
    assert len(small) < len(plain) / 10
    assert _decoded(small).equals(batch)
    assert len(plain) <= frames.size_bound(batch)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Misuse):
        _encoded(Kind.HALF, checked([1]))
    with pytest.raises(Misuse):
        _encoded(Kind.CHECKED, checked([]))
    nulls = pa.RecordBatch.from_arrays([pa.array([1, None])], schema=STORED[Kind.CHECKED])
    with pytest.raises(Misuse, match="nulls"):
        _encoded(Kind.CHECKED, nulls)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Kind.CHECKED, {"rows": 9}),
        (Kind.PLAIN, {"rows": 2}),
        (Kind.CHECKED, {"encoding": frames.Encoding.ARROW}),
        (Kind.CHECKED, {"kind": Kind.PLAIN, "encoding": frames.Encoding.ARROW}),
    ],
)
def test_content_that_contradicts_its_header_is_corrupt(kind: Kind, change: dict[str, int]) -> None:
    """With a right checksum, even: written by something else."""
    batch = checked([1]) if kind == Kind.CHECKED else messages(1)
    data = pa.py_buffer(_encoded(kind, batch))
    header = frames.read_header(data, 0)._replace(**change)
    with pytest.raises(Corrupt, match="f, byte 0, frame 7") as caught:
        frames.decode(data, 0, header, "f")
    assert caught.value.code == Code.DAMAGED


@pytest.mark.parametrize("sizes", [[600] * 5, [600, 601, 0, 2000], [3, 3, 3], [0, 0], [5000, 0, 0]])
def test_every_body_has_its_own_checksum(sizes: list[int]) -> None:
    """Bodies of one length are digested in another way than those of several."""
    given = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    batch = messages(len(sizes), body=1)
    batch = batch.set_column(batch.schema.names.index("body"), batch.schema.field("body"), pa.array(given, pa.binary()))
    message = batch.serialize()
    found = bodies.checksums([message], batch, 7, 99)
    assert found[8:] == b"".join(xxhash.xxh3_64_digest(body) for body in given)
    assert bodies.intact_rows(message, pa.py_buffer(found), batch_of(message), 7, 99).all()


def batch_of(message: pa.Buffer) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(message, STORED[Kind.PLAIN])


@pytest.mark.parametrize("body", [0, 700, 2000])
@pytest.mark.parametrize("shared", [False, True])
def test_a_large_frame_has_the_bytes_of_one_message(body: int, shared: bool) -> None:
    """It is written from the memory of its batch, or of a slice; another column may share that of the bodies."""
    whole = messages(2000, body=body)
    if shared:
        at = whole.schema.names.index("key")
        whole = whole.set_column(at, whole.schema.field(at), whole.column("body").view(pa.utf8()))
    for batch in (whole, whole.slice(7, 1900)):
        message, data = batch.serialize(), _encoded(Kind.PLAIN, batch)
        end = frames.HEADER_BYTES + message.size
        assert data[frames.HEADER_BYTES : end] == message.to_pybytes()
        assert data[end:] == bodies.checksums([message], batch, NUMBERS["sequence"], NUMBERS["salt"])
        assert _decoded(data).equals(batch)
