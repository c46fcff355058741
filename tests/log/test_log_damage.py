"""I29 to I32: damage is reported with its place and deletes nothing; derived files are rebuilt equal; newer formats are
refused.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import Any

import pytest
from log_scripts import START_US, Content, checked, content, group, messages, opened

from escrowmq.errors import Code, Corrupt, EscrowError, Misuse
from escrowmq.log import frames, segments
from escrowmq.log.checking import check
from escrowmq.log.report import DamagedLog
from escrowmq.schemas import Kind
from escrowmq.testing.disks import FaultDisk, MemoryDisk

SMALL = 1024


def _sealed() -> tuple[MemoryDisk, list[Content]]:
    """A closed log of three small segments, the first two sealed."""
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=SMALL)
    for n in range(5):
        log.append(Kind.CHECKED, checked([n, n + 1, n + 2]), START_US + n)
        log.append(Kind.GROUP, group(f"g{n}"), START_US + n)
        log.sync()
    everything = [content(frame) for frame in log.frames()]
    log.close()
    assert len(_segments(disk)) == 3
    return disk, everything


def _segments(disk: MemoryDisk) -> list[str]:
    return [name for name in disk.list() if name.endswith(".segment")]


def _found(disk: MemoryDisk) -> DamagedLog | None:
    """What opening and reading everything comes upon first."""
    log = None
    try:
        log = opened(disk, segment_bytes=SMALL)
        for _ in log.frames():
            pass
    except DamagedLog as damaged:
        return damaged
    finally:
        if log is not None:
            log.close(clean=False)
    return None


def _frame_starts(disk: MemoryDisk, name: str) -> list[int]:
    data = disk.files()[name]
    header = segments.SegmentHeader.unpack(data[:64], name)
    return [0, *segments.scan(segments.pa.py_buffer(data), header).offsets]


@pytest.mark.invariant("I30")
@pytest.mark.parametrize("number", [0, 1])
def test_every_flipped_bit_of_a_sealed_segment_is_reported_with_its_place(number: int) -> None:
    disk, _ = _sealed()
    name = _segments(disk)[number]
    starts = _frame_starts(disk, name)
    before = disk.files()
    for bit in range(8 * len(before[name])):
        damaged = disk.copy()
        damaged.flip(name, bit)
        expected = max(start for start in starts if start <= bit // 8)
        findings = list(check(damaged))
        assert [(f.file, f.offset) for f in findings] == [(name, expected)], bit
        if bit % 7 == 0:
            found = _found(damaged)
            assert found is not None, bit
            assert (found.damage.file, found.damage.offset) == (name, expected)
            damaged.flip(name, bit)
            after = damaged.files()
            assert {n: after[n] for n in _segments(disk)[:2]} == {n: before[n] for n in _segments(disk)[:2]}


def test_every_flipped_bit_of_a_closed_last_segment_is_reported() -> None:
    disk, _ = _sealed()
    name = _segments(disk)[-1]
    starts = _frame_starts(disk, name)
    for bit in range(0, 8 * len(disk.files()[name]), 3):
        damaged = disk.copy()
        damaged.flip(name, bit)
        with pytest.raises(DamagedLog) as caught:
            opened(damaged, segment_bytes=SMALL)
        assert (caught.value.damage.file, caught.value.damage.offset) == (
            name,
            max(start for start in starts if start <= bit // 8),
        )


@pytest.mark.invariant("I30")
def test_every_truncation_is_reported() -> None:
    disk, _ = _sealed()
    for name in _segments(disk):
        for size in range(0, len(disk.files()[name]), 5):
            files = disk.files()
            damaged = MemoryDisk({**files, name: files[name][:size]})
            with pytest.raises(Corrupt):
                opened(damaged, segment_bytes=SMALL)
            assert next(iter(check(damaged))).file == name


def test_a_missing_segment_is_reported() -> None:
    disk, _ = _sealed()
    for name in _segments(disk):
        files = disk.files()
        del files[name]
        with pytest.raises(Corrupt):
            opened(MemoryDisk(files), segment_bytes=SMALL)
        assert list(check(MemoryDisk(files)))


def test_no_segment_at_all_is_damage_when_a_snapshot_or_mark_is_there() -> None:
    disk, _ = _sealed()
    files = {name: data for name, data in disk.files().items() if name == "closed"}
    with pytest.raises(Corrupt, match="every segment is missing"):
        opened(MemoryDisk(files))


def test_a_segment_of_another_log_is_refused() -> None:
    disk, _ = _sealed()
    name = _segments(disk)[1]
    other = MemoryDisk()
    log = opened(other, segment_bytes=SMALL)
    log.close()
    files = disk.files()
    foreign = segments.SegmentHeader.unpack(files[name][:64], name)
    changed = segments.SegmentHeader(7, foreign.epoch, foreign.sequence, foreign.position, foreign.created_us, 7)
    with pytest.raises(Corrupt, match="another log"):
        opened(MemoryDisk({**files, name: changed.pack() + files[name][64:]}), segment_bytes=SMALL)


@pytest.mark.invariant("I29")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: None,
        lambda data: b"",
        lambda data: data[:-8],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    ],
    ids=["deleted", "emptied", "cut", "first bit", "last bit"],
)
def test_indexes_are_rebuilt_equal(spoil: Callable[[bytes], bytes | None]) -> None:
    """I29"""
    disk, everything = _sealed()
    before = {name: data for name, data in disk.files().items() if name.endswith(".index")}
    assert len(before) == len(_segments(disk)) - 1
    files = disk.files()
    for name, data in before.items():
        spoiled = spoil(data)
        if spoiled is None:
            del files[name]
        else:
            files[name] = spoiled
    again = MemoryDisk(files)
    log = opened(again, segment_bytes=SMALL)
    assert [content(frame) for frame in log.frames()][:-1] == everything
    log.close()
    assert {name: again.files()[name] for name in before} == before


def test_an_index_says_of_durability_what_its_frames_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync ends on another thread while a frame is appended: the frame's header was made before."""
    encode, under_way = frames.encode, []

    def encode_while_a_sync_ends(*content: Any, **place: Any) -> Any:
        chunks = encode(*content, **place)
        while under_way:
            under_way.pop()()
        return chunks

    monkeypatch.setattr(frames, "encode", encode_while_a_sync_ends)
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=SMALL)
    for n in range(20):
        log.append(Kind.CHECKED, checked([n]), START_US + n)
        under_way.append(log.hand_over())
    log.append(Kind.CHECKED, checked([20]), START_US + 20)
    log.close()
    assert len(_segments(disk)) == 2
    assert list(check(disk)) == []


def _with_snapshots() -> MemoryDisk:
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=SMALL)
    for n in range(6):
        log.append(Kind.GROUP, group(f"g{n}"), START_US + n)
        log.sync()
        if n >= 2:
            tables = {"t": segments_table(n), "u": segments_table(n + 1)}
            log.save_snapshot(tables, log.next_sequence, log.next_position, START_US + n)
    log.close()
    return disk


def segments_table(n: int) -> segments.pa.Table:
    return segments.pa.table({"n": [n], "text": ["x" * n]})


@pytest.mark.invariant("I29")
def test_every_flipped_bit_of_a_snapshot_is_passed_over() -> None:
    disk = _with_snapshots()
    older, newer = (name for name in disk.list() if name.endswith(".snapshot"))
    for bit in range(0, 8 * len(disk.files()[newer]), 5):
        damaged = disk.copy()
        damaged.flip(newer, bit)
        assert [f.file for f in check(damaged)] == [newer]
        log = opened(damaged, segment_bytes=SMALL)
        snapshot = log.load_snapshot()
        assert snapshot is not None
        assert snapshot.sequence == 6
        assert snapshot.tables["t"].to_pylist() == [{"n": 4, "text": "xxxx"}]
    damaged = disk.copy()
    damaged.flip(newer, 999)
    damaged.flip(older, 999)
    assert opened(damaged, segment_bytes=SMALL).load_snapshot() is None  # frames stand in from the beginning


def test_a_damaged_or_missing_base_is_corrupt() -> None:
    disk = _with_snapshots()
    log = opened(disk, segment_bytes=SMALL)
    assert log.drop_before(log.next_position) > 0
    log.close()
    bases = [name for name in disk.list() if name.startswith("base-")]
    assert len(bases) == 1
    damaged = disk.copy()
    damaged.flip(bases[0], 4321)
    for name in damaged.list():
        if name.startswith("snapshot-"):
            damaged.remove(name)  # one after the first frame would stand in
    with pytest.raises(Corrupt, match=bases[0]):
        opened(damaged, segment_bytes=SMALL).load_snapshot()
    files = disk.files()
    del files[bases[0]]
    with pytest.raises(Corrupt, match="the segment is missing"):
        opened(MemoryDisk(files), segment_bytes=SMALL)


def test_a_newer_snapshot_stands_in_for_a_damaged_base() -> None:
    disk = _with_snapshots()
    log = opened(disk, segment_bytes=SMALL)
    log.drop_before(log.next_position)
    log.save_snapshot({}, log.next_sequence, log.next_position, log.last_time_us)
    log.close()
    (base,) = [name for name in disk.list() if name.startswith("base-")]
    disk.flip(base, 4321)
    log = opened(disk, segment_bytes=SMALL)
    snapshot = log.load_snapshot()
    assert snapshot is not None
    assert snapshot.tables == {}
    log.close()


def test_old_snapshots_go_and_the_base_stays() -> None:
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=SMALL)
    for n in range(30):
        log.append(Kind.GROUP, group(f"g{n}"), START_US + n)
        log.sync()
        log.save_snapshot({}, log.next_sequence, log.next_position, START_US + n)
        if n in (10, 20):
            assert log.drop_before(log.next_position) > 0
    kept = [name for name in disk.list() if name.endswith(".snapshot")]
    assert [name.split("-")[0] for name in kept] == ["base", "snapshot", "snapshot"]
    assert log.first_position > 10
    log.close()


@pytest.mark.invariant("I32")
@pytest.mark.parametrize("ending", [".segment", ".snapshot"])
def test_a_newer_format_is_refused(ending: str) -> None:
    """I32, though its header may be longer and mean something else: magic, version, size and checksum keep their
    places."""
    disk = _with_snapshots()
    name = [name for name in disk.list() if name.endswith(ending)][-1]
    files = disk.files()
    newer = segments.seal_header(files[name][:4] + struct.pack("<HH", 2, 80) + bytes(64))
    with pytest.raises(Corrupt) as caught:
        opened(MemoryDisk({**files, name: newer + files[name][64:]}), segment_bytes=SMALL).load_snapshot()
    assert caught.value.code == Code.NEWER_FORMAT


@pytest.mark.invariant("I31", "I32")
@pytest.mark.parametrize(("field", "value"), [(4, 2), (5, 200), (6, 3), (7, 1)])
def test_a_frame_of_a_newer_version_is_refused_and_kept(field: int, value: int) -> None:
    """A frame that checks, of an unknown version, kind, encoding or flag: not skipped, not cut."""
    import xxhash

    disk = MemoryDisk()
    log = opened(disk)
    log.append(Kind.CHECKED, checked([1]), START_US)
    log.close()
    files = disk.files()
    (name,) = _segments(disk)
    start = files[name].rindex(b"EMQF")
    frame = bytearray(files[name][start:])
    frame[field] = value
    salt = segments.SegmentHeader.unpack(files[name][:64], name).salt
    frame[48:56] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(frame[:48] + frame[56:]), salt))
    newer = MemoryDisk({**files, name: files[name][:start] + bytes(frame)})
    before = newer.files()
    with pytest.raises(Corrupt) as caught:
        opened(newer)
    assert caught.value.code == Code.NEWER_FORMAT
    assert newer.files() == before


@pytest.mark.invariant("I31")
def test_a_folder_of_other_files_is_refused_untouched() -> None:
    disk = MemoryDisk({"holiday.jpg": b"...", ".hidden": b""})
    with pytest.raises(Misuse, match=r"holiday\.jpg"):
        opened(disk)
    assert disk.list() == [".hidden", "holiday.jpg"]
    opened(MemoryDisk({".hidden": b""})).close()


def test_a_failed_opening_gives_the_folder_back() -> None:
    disk = FaultDisk(failures={5: errno.EIO})
    with pytest.raises(EscrowError) as caught:
        opened(disk)
    assert caught.value.code == Code.LOG_FAILED
    opened(disk).close()
    full = FaultDisk(budget=100)
    with pytest.raises(EscrowError) as caught:
        opened(full)
    assert caught.value.code == Code.DISK_FULL
    full.budget = None
    opened(full).close()


@pytest.mark.invariant("I2")
def test_reads_check_what_they_read() -> None:
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=1 << 20)
    position = log.append(Kind.PLAIN, messages(3), START_US)
    log.sync()
    (name,) = _segments(disk)
    disk._nodes[name].content[disk.files()[name].index(b"\0\0\0\x01....") + 5] ^= 1
    with pytest.raises(DamagedLog, match=f"{name}, byte .*frame 1: the checksum is wrong"):
        log.read(segments.np.arange(position, position + 3))
    log.close(clean=False)
