"""What can still be read beside damage: good rows of a damaged frame, and the list of the places."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from log_scripts import START_US, checked, messages, opened

from escrowmq.errors import Code, Corrupt
from escrowmq.log import frames as codec
from escrowmq.log.commit_log import SegmentLog
from escrowmq.log.dump import dump
from escrowmq.log.report import DAMAGED_NAME, DamagedLog
from escrowmq.log.segments import index_name
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MemoryDisk

SMALL = 1024


def written(rows: int = 3, *, compression: str = "none", body: int = 12) -> tuple[MemoryDisk, str, int]:
    """A closed log with one sealed frame of messages in it: the disk, the segment's name, and the frame's offset."""
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=SMALL, compression=compression)
    log.append(Kind.PLAIN, messages(rows, body=body), START_US)
    log.append(Kind.CHECKED, checked(range(200)), START_US)
    log.sync()
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    log.close()
    (entry,) = dump(disk, kinds=[Kind.PLAIN])
    return disk, entry["segment"], entry["offset"]


def reopened(disk: MemoryDisk) -> SegmentLog:
    return opened(disk, segment_bytes=SMALL)


def spoiled(disk: MemoryDisk, name: str, at: int, bit: int = 0) -> MemoryDisk:
    files = disk.files()
    data = bytearray(files[name])
    data[at] ^= 1 << bit
    return MemoryDisk({**files, name: bytes(data)})


@pytest.mark.invariant("I2")
def test_one_flipped_bit_in_one_body_takes_no_other_row_along() -> None:
    disk, name, start = written(400)
    at = disk.files()[name].index((7).to_bytes(8, "big").ljust(12, b"."), start) + 10
    log = reopened(spoiled(disk, name, at))
    positions, expected = np.arange(1, 401), messages(400, body=12)
    batch, damaged = log.salvage(positions)
    assert list(damaged) == [7]
    assert (damaged[7].position, damaged[7].body_only) == (8, True)
    assert str(damaged[7]) == f"{name}, byte {start}, frame 1: the checksum is wrong; position 8"
    rows = [row for row in range(400) if row != 7]
    assert batch.take(rows).drop_columns(["stored_us"]).equals(expected.take(rows))
    assert batch.column("body")[7].as_py() == b""
    assert batch.column("key")[7].as_py() == "k-7"

    assert log.read(np.delete(positions, 7)).num_rows == 399
    assert log.read(positions, ["key", "message_id"]).num_rows == 400
    with pytest.raises(DamagedLog, match="position 8") as caught:
        log.read(positions[5:9])
    assert caught.value.code is Code.DAMAGED
    with pytest.raises(Corrupt):
        list(log.frames(0, [Kind.PLAIN]))
    (frame,) = log.frames(0, [Kind.PLAIN], damaged=True)
    assert frame.damage is not None
    assert frame.damage.rows.nonzero()[0].tolist() == [7]
    log.close()


@pytest.mark.invariant("I2")
def test_whatever_bit_is_flipped_what_is_called_good_is_what_was_written() -> None:
    disk, name, start = written(3)
    expected, size = messages(3, body=12), codec.read_header(memoryview(disk.files()[name]), start).frame_bytes
    whole, kept = 0, []
    for at in range(start, start + size):
        log = reopened(spoiled(disk, name, at, at % 8))
        batch, damaged = log.salvage(np.array([1, 2, 3]))
        good = pa.array([row for row in range(3) if row not in damaged], pa.int64())
        assert batch.take(good).drop_columns(["stored_us"]).equals(expected.take(good)), at
        assert all(row.body_only for row in damaged.values()) or len(damaged) == 3
        assert len(log.damages()) == 1
        whole += not damaged
        if len(damaged) == 1:
            kept.append(at)
        log.close()
    assert whole >= codec.HEADER_BYTES  # a damaged header costs nothing: the index says the same
    assert len(kept) == 3 * (12 + 8)  # each body, and each body's checksum, costs one row


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_frame_without_checksums_of_bodies_is_lost_as_a_whole(compression: str) -> None:
    disk, name, start = written(1 if compression == "none" else 3, compression=compression)
    log = reopened(spoiled(disk, name, start + codec.HEADER_BYTES + 200))
    batch, damaged = log.salvage(np.array([1]))
    assert not damaged[0].body_only
    assert batch.column("message_id")[0].as_py() == bytes(16)
    assert batch.column("transaction")[0].as_py() == -1
    assert batch.column("key")[0].as_py() is None
    log.close()


def test_a_segment_that_lost_its_end_or_its_file_is_lost_row_by_row() -> None:
    disk, name, start = written(3)
    log = reopened(disk)
    disk._nodes[name].content = disk._nodes[name].content[: start + 100]
    assert list(log.salvage(np.array([1, 2, 3]))[1]) == [0, 1, 2]
    log.close()
    disk, name, start = written(3)
    log = reopened(disk)
    disk.remove(name)
    damaged = log.salvage(np.array([1, 2, 3]))[1]
    assert "the segment is missing" in str(damaged[2])
    log.close()


@pytest.mark.invariant("I30")
def test_places_are_listed_until_they_are_put_right_or_gone() -> None:
    disk, name, start = written(3)
    intact = disk.files()[name]
    bad = spoiled(disk, name, start + codec.HEADER_BYTES + 30)
    log = reopened(bad)
    assert log.damages() == []  # nobody has read it yet
    log.salvage(np.array([1]))
    (damage,) = log.damages()
    assert (damage.file, damage.offset, damage.sequence) == (name, start, 1)
    log.close()

    log = reopened(bad)
    assert log.damages() == [damage]  # known again after a restart, before anybody reads
    log.close()
    assert list(MemoryDisk(bad.files()).files()) == list(bad.files())
    righted = MemoryDisk({**bad.files(), name: intact})
    log = reopened(righted)
    assert log.damages() == []
    assert righted.files()[DAMAGED_NAME] == b""
    log.close()

    log = reopened(bad)
    log.append(Kind.CHECKED, checked(range(200)), START_US)
    log.sync()
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    assert log.drop_before(log.next_position) >= 1
    assert log.damages() == []
    assert bad.files()[DAMAGED_NAME] == b""
    log.close()


def test_a_spoilt_list_is_no_reason_to_stop() -> None:
    disk, _, _ = written(3)
    bad = MemoryDisk({**disk.files(), DAMAGED_NAME: b"1\n\xff\xfe\n99999\n-4\n123456789012345678901234\n"})
    log = reopened(bad)
    assert log.damages() == []
    log.close()


@pytest.mark.invariant("I30")
def test_an_index_is_rebuilt_around_damage_that_a_snapshot_stands_for() -> None:
    disk, name, start = written(3)
    bad = spoiled(disk, name, start + codec.HEADER_BYTES + 30)
    intact = bad.files()[index_name(name)]
    bad.remove(index_name(name))
    log = reopened(bad)
    assert [damage.sequence for damage in log.damages()] == [1]
    assert len(log.salvage(np.array([1, 2, 3]))[1]) == 3
    log.close()
    assert bad.files()[index_name(name)] == intact

    for gone in [n for n in bad.files() if n.endswith(".snapshot")]:
        bad.remove(gone)  # nothing stands for the frame: the state cannot be known
    bad.remove(index_name(name))
    before = bad.files()
    with pytest.raises(Corrupt):
        reopened(bad)
    assert bad.files() == before
