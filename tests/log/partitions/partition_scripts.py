"""Senders and frames for tests of the log on a partition. Everything about them is fixed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from escrowmq.log import frames
from escrowmq.log.kafka import records
from escrowmq.log.kafka.channel import Channel, Round
from escrowmq.log.kafka.records import Claim, RecordType
from escrowmq.schemas import STORED, Kind
from escrowmq.testing.log_conformance import START_US, messages

SHARD, SALT = 77, 0xFEDCBA9876543210


def frame(sequence: int, position: int, *, rows: int = 1, body: int = 20, epoch: int = 1, salt: int = SALT) -> bytes:
    """One frame of messages."""
    batch = messages(rows, position, body=body)
    return _encoded(Kind.PLAIN, batch, sequence, position, epoch, salt)


def opening(sequence: int, position: int, epoch: int, *, salt: int = SALT) -> bytes:
    """The frame with which an opener begins."""
    batch = pa.RecordBatch.from_pylist([{"shard": SHARD, "version": "1"}], STORED[Kind.OPENED])
    return _encoded(Kind.OPENED, batch, sequence, position, epoch, salt)


def _encoded(kind: Kind, batch: pa.RecordBatch, sequence: int, position: int, epoch: int, salt: int) -> bytes:
    chunks = frames.encode(
        kind, batch, sequence=sequence, position=position, time_us=START_US, epoch=epoch, synced=0, salt=salt
    )
    return b"".join(bytes(memoryview(chunk)) for chunk in chunks)


def send_frames(channel: Channel, data: bytes) -> Round:
    """Send the consecutive frames in ``data``."""
    parts, rest = [], memoryview(data)
    while rest:
        size = frames.read_header(rest, 0).frame_bytes
        parts.append([rest[:size]])
        rest = rest[size:]
    return channel.send_frames(parts)


@dataclass
class Sender:
    """Makes the records of one opener, without sending them. ``epoch``: the one that its claim gave it."""

    nonce: int
    epoch: int = 1
    number: int = 1
    sequence: int = 0
    position: int = 0
    shard: int = SHARD
    made: list[bytes] = field(default_factory=list)

    def claim(self, *, salt: int = SALT, url: str = "") -> bytes:
        claim = Claim(salt=salt, url=url or f"escrow://node{self.nonce}", version="1")
        return records.pack_claim(claim, shard=self.shard, nonce=self.nonce, sequence=self.sequence)

    def record(self, type: RecordType, payload: bytes) -> bytes:
        raw = records.pack(
            type,
            payload,
            shard=self.shard,
            epoch=self.epoch,
            nonce=self.nonce,
            number=self.number,
            sequence=self.sequence,
        )
        self.number += 1
        return raw

    def frames(self, count: int = 1, *, rows: int = 1) -> bytes:
        """A record of the next ``count`` frames; the first that an opener sends is its OPENED."""
        data, sequence, position = b"", self.sequence, self.position
        for _ in range(count):
            data += frame(sequence, position, rows=rows, epoch=0)
            sequence, position = sequence + 1, position + rows
        raw = self.record(RecordType.FRAMES, data)
        self.sequence, self.position = sequence, position
        return raw

    def cut(self, data: bytes, sizes: list[int], last: RecordType = RecordType.FRAMES) -> list[bytes]:
        """Records of ``data``, cut into pieces of these sizes and the rest."""
        made = []
        for size in sizes:
            made.append(self.record(RecordType.PART, data[:size]))
            data = data[size:]
        return [*made, self.record(last, data)]

    def beat(self) -> bytes:
        return self.record(RecordType.BEAT, b'{"url":"escrow://node%d","replicas":["a","b"]}' % self.nonce)

    def act(self, line: bytes = b'{"act":"x"}\n') -> bytes:
        return self.record(RecordType.ACT, line)
