"""The bytes of a Kafka record of the log: a header of 64 bytes with two checksums, and a payload (see FORMAT.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.message.hashes import checksum

MAGIC = b"EMQK"
VERSION = 1
HEADER_BYTES = 64
LARGEST_RECORD = 900_000
"""Maximum bytes of a record with its header: below Kafka's ``max.message.bytes`` (1 MiB), with room for framing."""
LARGEST_PAYLOAD = LARGEST_RECORD - HEADER_BYTES
_HEADER = struct.Struct("<4sHHIIQQQIB3xQ")
_CHECKSUM = struct.Struct("<Q")
_HINT = "nothing was deleted; check each node's copy of the log with `escrowmq log dump --check` on its folder"

Payload = bytes | memoryview
_T = TypeVar("_T")


class RecordType(IntEnum):
    """The type of a record. The number is stored."""

    CLAIM = 1  # its sender owns the log from here on
    BEAT = 2  # the owner is alive
    RELEASE = 3  # the owner has stopped: another node may claim at once
    FRAMES = 4  # consecutive whole frames of the log, byte for byte as in a segment
    PART = 5  # a part of a frame or act larger than a record, continued by the owner's next FRAMES or ACT
    ACT = 6  # bytes of the record of operator actions


class RecordHeader(NamedTuple):
    """The fields of a record's header, in order."""

    magic: bytes
    version: int
    header_bytes: int
    shard: int
    epoch: int  # the owner's epoch; 0 in a claim, whose epoch follows from its place
    nonce: int  # random number of the owner, chosen for its claim
    number: int  # number of the record among its owner's; a claim is 0
    sequence: int  # sequence of its first frame, or of the log's next frame
    payload_bytes: int
    type: int
    payload_checksum: int


FOREIGN = RecordHeader(b"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Placeholder for the header of a record written by another program."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """The payload of a claim, as JSON."""

    salt: int  # seed of the frames' checksums, as in every segment header
    url: str  # URL of its sender
    version: str = ""  # version of its program
    silence: float = 0.0  # seconds without a sign of life after which it may be replaced; 0: not stated


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """The payload of a beat, as JSON."""

    url: str
    replicas: tuple[str, ...] = ()  # URLs of the nodes known to the owner, itself included


def pack(type: RecordType, *payload: Payload, shard: int, epoch: int, nonce: int, number: int, sequence: int) -> bytes:
    """Encode one record; its payload is these pieces joined. Raises Misuse above :data:`LARGEST_RECORD`."""
    size = sum(map(len, payload))
    if size > LARGEST_PAYLOAD:
        raise Misuse(Code.BATCH_TOO_LARGE, f"a record of {size} bytes; at most {LARGEST_PAYLOAD} go into one")
    place = (shard, epoch, nonce, number, sequence)
    head = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *place, size, type, checksum(*payload))
    return b"".join((head, _CHECKSUM.pack(checksum(head)), *payload))


def is_foreign(raw: bytes) -> bool:
    """Return whether a record is of another program, or ours with damaged first bytes: the owner's numbers decide."""
    return raw[:4] != MAGIC


def read_header(raw: bytes, offset: int) -> RecordHeader:
    """Read and check the header of the record at ``offset`` of the partition, one that is not foreign. Raises
    Corrupt(DAMAGED, NEWER_FORMAT)."""
    if len(raw) < HEADER_BYTES:
        raise damage_error(offset, "it is shorter than its header")
    version, length = struct.unpack_from("<HH", raw, 4)
    sound = 16 <= length <= len(raw) and raw[length - 8 : length] == _CHECKSUM.pack(checksum(raw[: length - 8]))
    if not sound:
        raise damage_error(offset, "the checksum of its header is wrong")
    if version > VERSION or length != HEADER_BYTES:
        raise error(Code.NEWER_FORMAT, f"the record at offset {offset} is of format version {version}")
    header = RecordHeader._make(_HEADER.unpack_from(raw))
    if header.type not in _TYPES:
        raise error(Code.NEWER_FORMAT, f"the record at offset {offset} is of type {header.type}, which is not known")
    return header


def payload_of(raw: bytes, header: RecordHeader, offset: int) -> memoryview:
    """Return the checked payload of a record whose header was read. Raises Corrupt(DAMAGED)."""
    payload = memoryview(raw)[HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        raise damage_error(offset, f"it holds {len(payload)} bytes, its header says {header.payload_bytes}")
    if checksum(payload) != header.payload_checksum:
        raise damage_error(offset, "the checksum of its content is wrong")
    return payload


def pack_claim(claim: Claim, *, shard: int, nonce: int, sequence: int) -> bytes:
    """Encode the record of a claim."""
    place = {"shard": shard, "epoch": 0, "nonce": nonce, "number": 0, "sequence": sequence}
    return pack(RecordType.CLAIM, msgspec.json.encode(claim), **place)


def read(payload: Payload, type: type[_T], offset: int) -> _T:
    """Decode the claim or beat in a checked payload. Raises Corrupt(DAMAGED)."""
    try:
        return msgspec.json.decode(payload, type=type)
    except msgspec.DecodeError as problem:
        raise damage_error(offset, f"its content does not decode: {problem}") from problem


def cut(chunks: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut chunks of bytes to the size of records without joining them. Yields, for each record, the pieces it holds."""
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


def damage_error(offset: int, message: str) -> EscrowError:
    """Return the error Corrupt(DAMAGED) for the invalid record at ``offset`` of the partition."""
    return error(Code.DAMAGED, f"the record at offset {offset} of the partition: {message}", _HINT)


_TYPES = frozenset(RecordType)
