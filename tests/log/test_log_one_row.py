"""One row of a large frame: read without the other bodies, verified all the same; and how much a look-up reads, counted
in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from log_scripts import START_US, checked, messages, opened

from escrowmq.log import bodies, frames, reading
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.dump import dump
from escrowmq.log.lookups import runs
from escrowmq.log.lookups.parts import Sizes
from escrowmq.log.reading import Reader
from escrowmq.log.rows import sound_columns
from escrowmq.message import hashes
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MemoryDisk

ROWS = 40
SIZES = Sizes(threaded=False, late_frames=3, late_rows=100)


@pytest.fixture(autouse=True)
def small_ones_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGE", 512)


class Digested:
    """Stands for ``xxhash`` where a module uses it: counts the bytes of which checksums were made."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.bytes = 0

    def xxh3_64(self, data: Any = b"", seed: int = 0) -> Any:
        self.bytes += memoryview(data).nbytes
        return _Digest(self, self._real.xxh3_64(data, seed=seed))

    def xxh3_64_intdigest(self, data: Any) -> int:
        self.bytes += memoryview(data).nbytes
        return int(self._real.xxh3_64_intdigest(data))

    def xxh3_64_digest(self, data: Any) -> bytes:
        self.bytes += memoryview(data).nbytes
        return bytes(self._real.xxh3_64_digest(data))


class _Digest:
    def __init__(self, counter: Digested, real: Any) -> None:
        self._counter, self._real = counter, real
        self.digest, self.intdigest = real.digest, real.intdigest

    def update(self, data: Any) -> None:
        self._counter.bytes += memoryview(data).nbytes
        self._real.update(data)


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> Digested:
    """Whatever a look-up reads it verifies, so this is what it reads."""
    counter = Digested(bodies.xxhash)
    for module in (bodies, hashes, runs):
        monkeypatch.setattr(module, "xxhash", counter)
    monkeypatch.setattr(bodies, "_digest", counter.xxh3_64_digest)
    return counter


def written(rows: int = 3, *, body: int = 200, compression: str = "none", sizes: Sizes | None = None) -> MemoryDisk:
    """A closed log of one frame of messages, sealed, and others behind it."""
    disk = MemoryDisk()
    log = open_log(disk, segment_bytes=1024, compression=compression, lookups=sizes)
    log.append(Kind.PLAIN, messages(rows, body=body), START_US)
    log.append(Kind.CHECKED, checked(range(200)), START_US)
    log.sync()
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    log.close()
    return disk


def whole_frames(log: SegmentLog, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences of the frames that are read whole from now on."""
    read: list[int] = []
    real = Reader.frame

    def frame(reader: Reader, sequence: int, *, keep: bool = True) -> Any:
        read.append(sequence)
        return real(reader, sequence, keep=keep)

    monkeypatch.setattr(Reader, "frame", frame)
    return read


def test_a_row_is_what_it_was_written_as_and_no_frame_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(written(ROWS))
    expected = messages(ROWS, body=200)
    read = whole_frames(log, monkeypatch)
    for row in (0, 7, ROWS - 1):
        batch = log.read(np.array([row + 1]))
        assert batch.drop_columns(["stored_us"]).equals(expected.slice(row, 1))
        assert batch.column("stored_us").to_pylist() == [START_US]
    assert read == []
    assert log.read(np.arange(1, ROWS + 1)).num_rows == ROWS
    assert read == [1]
    log.close()


@pytest.mark.parametrize(("rows", "compression"), [(1, "none"), (ROWS, "lz4")])
def test_what_has_no_checksums_of_bodies_is_read_whole(
    rows: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(written(rows, body=900, compression=compression))
    read = whole_frames(log, monkeypatch)
    assert log.read(np.array([rows])).drop_columns(["stored_us"]).equals(messages(rows, body=900).slice(rows - 1, 1))
    assert read == [1]
    log.close()


@pytest.mark.invariant("I2")
def test_whatever_bit_is_flipped_a_row_that_is_given_is_what_was_written() -> None:
    """Every bit of a frame of three rows: seen in all rows, in the one whose body or checksum it is in, or (of the
    header) in none."""
    disk = written(3, body=24)
    (entry,) = dump(disk, kinds=[Kind.PLAIN])
    start, name = entry["offset"], entry["segment"]
    header = frames.read_header(memoryview(disk.files()[name]), start)
    log = opened(disk)
    salt = log._reader.segments[0].header.salt
    log.close()
    intact = disk.files()[name][start : start + header.frame_bytes]
    expected = messages(3, body=24)
    fields = (int(header.kind), header.sequence, header.position, header.time_us, header.epoch)
    outcomes: dict[str, int] = {"refused": 0, "given": 0}
    alone = [0, 0, 0]
    for bit in range(8 * len(intact)):
        data = bytearray(intact)
        data[bit // 8] ^= 1 << bit % 8
        found = sound_columns(fields, 3, pa.py_buffer(bytes(data)), salt)
        if found is None:
            outcomes["refused"] += 1
            continue
        given = [found.row(row) for row in range(3)]
        assert all(one is None or one.equals(expected.slice(row, 1)) for row, one in enumerate(given)), bit
        missing = [row for row, one in enumerate(given) if one is None]
        assert len(missing) <= 1
        for row in missing:
            alone[row] += 1
        outcomes["given"] += not missing
    assert alone == [8 * (24 + 8)] * 3
    assert 0 < outcomes["given"] <= 8 * frames.HEADER_BYTES
    assert sum(outcomes.values()) + sum(alone) == 8 * len(intact)


def test_damage_is_met_by_whom_it_concerns() -> None:
    """A spoilt body is noticed by who reads that row, and no other; a spoilt column by everybody."""
    disk = written(ROWS)
    (entry,) = dump(disk, kinds=[Kind.PLAIN])
    name, start = entry["segment"], entry["offset"]
    body = disk.files()[name].index((7).to_bytes(8, "big").ljust(12, b"."), start)
    key = disk.files()[name].index(b"k-7", start)

    spoilt = disk.copy()
    spoilt.flip(name, 8 * (body + 10))
    log = opened(spoilt)
    assert log.salvage(np.array([7]))[1] == {}
    assert not log.is_damaged
    batch, damaged = log.salvage(np.array([8]))
    assert damaged[0].body_only
    assert batch.column("body").to_pylist() == [b""]
    assert log.is_damaged
    assert log.salvage(np.array([7]))[1] == {}
    log.close()

    spoilt = disk.copy()
    spoilt.flip(name, 8 * key)
    log = opened(spoilt)
    assert not log.salvage(np.array([1]))[1][0].body_only
    (match,) = log.find("key", "k-31", end=log.next_sequence)
    assert match.lost
    log.close()


def test_a_look_up_reads_columns_and_one_body(digested: Digested) -> None:
    """Bodies of 4 KB: the first look-up in a frame reads its columns, the next ones their bodies; and both a block of
    each file."""
    rows, body = 400, 4096
    log = opened(written(rows, body=body, sizes=Sizes(wake_rows=1, spare_bytes=0)))
    assert [type(part) for part in log._lookups._parts] == [runs.Run]
    columns = rows * 250  # what the columns take, roughly; a tenth of the bodies

    def spent(key: str) -> int:
        before = digested.bytes
        (match,) = log.find("key", key, end=log.next_sequence)
        assert log.read(match.positions).column("key").to_pylist() == [key]
        return digested.bytes - before

    assert body < spent("k-7") <= columns + body + 8 * 2048
    assert body <= spent("k-301") <= body + 8 * 2048
    assert rows * body > 10 * columns
    log.close()


def killed(count: int) -> MemoryDisk:
    """What a kill leaves of ``count`` frames of four messages, none of which is in a file."""
    disk = MemoryDisk()
    log = open_log(disk, lookups=SIZES)
    for number in range(count):
        log.append(Kind.PLAIN, messages(4, body=20), START_US + number)
    log.sync()
    log.close(clean=False)
    return disk


@pytest.mark.parametrize(("count", "late"), [(3, 3), (4, 0), (200, 0)])
def test_after_a_kill_opening_takes_in_what_no_file_knows(
    count: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look-up reads no frame for that, unless they are few; nor does it for a key that nobody has."""
    log = open_log(killed(count), lookups=SIZES)
    read = whole_frames(log, monkeypatch)
    assert list(log.find("key", "unknown", end=log.next_sequence)) == []
    assert len(read) == late
    (newest, *others) = log.find("key", "k-2", end=log.next_sequence)
    assert newest.positions.tolist() == [4 * (count - 1) + 3]
    assert len(others) == count - 1
    log.close()


def test_a_tail_that_cannot_be_read_at_the_opening_is_read_by_the_first_look_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = killed(20)
    real, refused = Reader.frame, [1]

    def frame(reader: Reader, sequence: int, *, keep: bool = True) -> Any:
        if refused and sequence > 5:
            refused.clear()
            raise MemoryError
        return real(reader, sequence, keep=keep)

    monkeypatch.setattr(Reader, "frame", frame)
    log = open_log(disk, lookups=SIZES)
    assert not refused
    assert len(list(log.find("key", "k-2", end=log.next_sequence))) == 20
    log.close()
