"""The bytes of one Kafka record of the log: a header of 64 bytes with two checksums, and a payload (FORMAT.md has
the map).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from escrowmq.errors import Code, EscrowError, Misuse, error

MAGIC = b"EMQK"
VERSION = 1
HEADER_BYTES = 64
LARGEST_RECORD = 900_000
"""Bytes of a record, header included: below Kafka's own limit of a message (``max.message.bytes``, 1 MiB) with room for
its framing.
"""
LARGEST_PAYLOAD = LARGEST_RECORD - HEADER_BYTES
_HEADER = struct.Struct("<4sHHIIQQQIB3xQ")
_CHECKSUM = struct.Struct("<Q")
_WHAT_TO_DO = (
    "nothing was deleted; a node's folder holds the log as far as it followed: `escrowmq log dump --check` "
    "on each of them"
)

Payload = bytes | memoryview
_T = TypeVar("_T")


class RecordType(IntEnum):
    """The type of a record. The number is stored."""

    CLAIM = 1
    """Its sender owns the log from here on."""
    BEAT = 2
    """The owner lives."""
    RELEASE = 3
    """The owner has stopped: somebody else may claim at once."""
    FRAMES = 4
    """Whole frames of the log, one after the other, byte for byte as in a segment."""
    PART = 5
    """The beginning of what the next FRAMES or ACT of the same owner ends: something larger than a record, cut."""
    ACT = 6
    """Bytes of the record of operators' acts."""


class RecordHeader(NamedTuple):
    """The fields of a record's header, in their order."""

    magic: bytes
    version: int
    header_bytes: int
    shard: int
    epoch: int
    """The owner's; 0 in a claim, whose epoch is where it lies."""
    nonce: int
    """The owner's, chosen at random with its claim."""
    number: int
    """Of the record, among its owner's; a claim is 0."""
    sequence: int
    """Of the first frame in it, or of the log's next frame."""
    payload_bytes: int
    type: int
    payload_checksum: int


FOREIGN = RecordHeader(b"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Stands for the header of a record that another program wrote."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """The payload of a claim, as JSON."""

    salt: int
    """Of the frames' checksums, as in every segment's header."""
    url: str
    """Where its sender answers."""
    version: str = ""
    """Of its program."""
    silence: float = 0.0
    """Seconds without a sign of life after which it may be replaced; 0: not given."""


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """The payload of a beat, as JSON."""

    url: str
    replicas: tuple[str, ...] = ()
    """Where the nodes answer that the owner knows of, itself included."""


def pack(type: RecordType, *payload: Payload, shard: int, epoch: int, nonce: int, number: int, sequence: int) -> bytes:
    """One record, whose payload is these pieces one after the other. Misuse if it is larger than
    :data:`LARGEST_RECORD`."""
    size = sum(map(len, payload))
    if size > LARGEST_PAYLOAD:
        raise Misuse(Code.BATCH_TOO_LARGE, f"a record of {size} bytes; at most {LARGEST_PAYLOAD} go into one")
    digest = xxhash.xxh3_64()
    for piece in payload:
        digest.update(piece)
    head = _HEADER.pack(
        MAGIC, VERSION, HEADER_BYTES, shard, epoch, nonce, number, sequence, size, type, digest.intdigest()
    )
    return b"".join((head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), *payload))


def is_foreign(raw: bytes) -> bool:
    """Return whether a record was made by another program, or is one of ours whose first bytes are damaged: the
    owner's numbers tell which."""
    return raw[:4] != MAGIC


def read_header(raw: bytes, offset: int) -> RecordHeader:
    """Return the checked header of the record at ``offset`` of the partition, which is not foreign.
    Corrupt(DAMAGED, NEWER_FORMAT)."""
    if len(raw) < HEADER_BYTES:
        raise damaged(offset, "it is shorter than its header")
    version, length = struct.unpack_from("<HH", raw, 4)
    if not 16 <= length <= len(raw) or raw[length - 8 : length] != _CHECKSUM.pack(
        xxhash.xxh3_64_intdigest(raw[: length - 8])
    ):
        raise damaged(offset, "the checksum of its header is wrong")
    if version > VERSION or length != HEADER_BYTES:
        raise error(Code.NEWER_FORMAT, f"the record at offset {offset} is of format version {version}")
    header = RecordHeader._make(_HEADER.unpack_from(raw))
    if header.type not in _TYPES:
        raise error(Code.NEWER_FORMAT, f"the record at offset {offset} is of type {header.type}, which is not known")
    return header


def payload_of(raw: bytes, header: RecordHeader, offset: int) -> memoryview:
    """Return the checked payload of a record whose header was read. Corrupt(DAMAGED)."""
    payload = memoryview(raw)[HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        raise damaged(offset, f"it holds {len(payload)} bytes, its header says {header.payload_bytes}")
    if xxhash.xxh3_64_intdigest(payload) != header.payload_checksum:
        raise damaged(offset, "the checksum of its content is wrong")
    return payload


def pack_claim(claim: Claim, *, shard: int, nonce: int, sequence: int) -> bytes:
    """Return the record of a claim."""
    return pack(
        RecordType.CLAIM, msgspec.json.encode(claim), shard=shard, epoch=0, nonce=nonce, number=0, sequence=sequence
    )


def read_claim(payload: Payload, offset: int) -> Claim:
    """Return the claim in a checked payload."""
    return _read(payload, Claim, offset)


def read_beat(payload: Payload, offset: int) -> Beat:
    """Return the beat in a checked payload."""
    return _read(payload, Beat, offset)


def pieces(payload: Payload) -> Iterator[memoryview]:
    """Cut a payload that is too large for one record; all but the last piece are for PART records."""
    view = memoryview(payload)
    for start in range(0, max(len(view), 1), LARGEST_PAYLOAD):
        yield view[start : start + LARGEST_PAYLOAD]


def cut(chunks: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut chunks as :func:`pieces` does, without joining them: for each record the pieces that it holds."""
    pieces, size = list[memoryview](), 0
    for chunk in chunks:
        at = 0
        while len(chunk) - at > LARGEST_PAYLOAD - size:
            end = at + LARGEST_PAYLOAD - size
            yield [*pieces, chunk[at:end]]
            pieces, size, at = [], 0, end
        pieces.append(chunk[at:])
        size += len(chunk) - at
    yield pieces


def damaged(offset: int, what: str) -> EscrowError:
    """Return the error for a record that cannot be what it should."""
    return error(Code.DAMAGED, f"the record at offset {offset} of the partition: {what}", _WHAT_TO_DO)


def _read(payload: Payload, type: type[_T], offset: int) -> _T:
    try:
        return msgspec.json.decode(payload, type=type)
    except msgspec.DecodeError as problem:
        raise damaged(offset, f"its content does not decode: {problem}") from problem


_TYPES = frozenset(RecordType)
