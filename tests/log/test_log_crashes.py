"""I1, I28, I30: a crash at every disk operation, and during recovery from it, loses nothing that was synced.

And the fault disk itself must be able to show a bug: each planted one is caught (``test_planted_*``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from log_scripts import START_US, Record, assert_recovered, checked, content, messages, opened, run

from escrowmq.errors import Corrupt, EscrowError
from escrowmq.log import active, recovery
from escrowmq.log.checking import check
from escrowmq.log.frames import encode
from escrowmq.schemas import Kind
from escrowmq.testing.disks import MODES, FaultDisk, MemoryFile, Mode, SimulatedCrash


def _operations() -> int:
    disk = FaultDisk()
    record = Record()
    run(disk, record)
    assert record.finished
    return disk.operations


OPERATIONS = _operations()
CASES: list[tuple[Mode, int]] = [("dropped", 0), ("kept", 0), *((m, s) for m in MODES[2:] for s in range(3))]


def _crashed(at: int) -> tuple[FaultDisk, Record]:
    disk, record = FaultDisk(at, crash_at=at), Record()
    with pytest.raises(SimulatedCrash):
        run(disk, record)
    return disk, record


def _goes_on(disk: FaultDisk, record: Record) -> None:
    """Recover, check, append, close, and find it all again."""
    log = opened(disk)
    assert_recovered(log, record)
    position = log.append(Kind.PLAIN, messages(2, 77), START_US + 500)
    log.sync()
    everything = [content(frame) for frame in log.frames()]
    log.close()
    assert list(check(disk)) == []
    log = opened(disk)
    assert [content(frame) for frame in log.frames()][:-1] == everything
    assert log.read(np.arange(position, position + 2)).column("message_id").to_pylist() == [
        n.to_bytes(16, "big") for n in (77, 78)
    ]
    log.close()


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
def test_crash_at_every_operation(at: int) -> None:
    disk, record = _crashed(at)
    for mode, seed in CASES:
        _goes_on(disk.survivors(mode, seed), record)


@pytest.mark.invariant("I1", "I28")
@pytest.mark.parametrize(
    ("at", "mode"),
    [
        pytest.param(at, mode, marks=[pytest.mark.long] if (at + turn) % 2 else [])
        for at in range(1, OPERATIONS + 1)
        for turn, mode in enumerate[Mode](("dropped", "reordered"))
    ],
)
def test_crash_during_recovery(at: int, mode: Mode) -> None:
    """Every pair of crashes: one in the run, one in each operation of the recovery from it. Unsynced writes are dropped
    after one crash and reordered after the next; the long form does both after each."""
    disk, record = _crashed(at)
    second = 0
    while True:
        second += 1
        again = disk.survivors(mode, at, crash_at=second)
        try:
            log = opened(again)
        except SimulatedCrash:
            log = opened(again.survivors(mode, second))
            assert_recovered(log, record)
            continue
        assert_recovered(log, record)
        break
    assert second > 3


@pytest.mark.invariant("I34")
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
def test_an_io_error_at_every_operation(at: int) -> None:
    """The log stops or refuses; what it found again after a restart of the process survives a crash of the machine."""
    disk, record = FaultDisk(at, failures={at: errno.EIO}), Record()
    try:
        run(disk, record)
    except EscrowError:
        pass
    disk.close()
    log = opened(disk)
    assert_recovered(log, record)
    found = [content(frame) for frame in log.frames()]
    for mode, seed in CASES[:3]:
        log = opened(disk.survivors(mode, seed))
        assert [content(frame) for frame in log.frames()][:-1] == found


@pytest.mark.invariant("I33")
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1, 3))
def test_a_full_disk_at_every_third_operation(at: int) -> None:
    disk, record = FaultDisk(at, failures={at: errno.ENOSPC}), Record()
    try:
        run(disk, record)
    except EscrowError:
        pass
    disk.close()
    _goes_on(disk, record)


@pytest.mark.invariant("I30")
def test_damage_before_a_durable_frame_is_told_from_a_torn_tail() -> None:
    """I30: in the last segment, a bad frame that a later frame's mark proves durable is damage; nothing is changed."""
    disk = FaultDisk()
    log = opened(disk, segment_bytes=1 << 20)
    for n in range(3):
        log.append(Kind.CHECKED, checked([n]), START_US)
        log.sync()
    crashed = disk.survivors("kept")
    (name,) = [n for n in crashed.list() if n.endswith(".segment")]
    places = [frame.sequence for frame in log.frames()]
    assert places == [0, 1, 2, 3]
    start = disk.files()[name].index(b"EMQF", 64 + 1)  # frame 1
    for offset, sequence in ((start, 1), (start + 64, 2)):
        damaged = crashed.survivors("kept")
        damaged.flip(name, 8 * (offset + 60))
        before = damaged.files()
        with pytest.raises(Corrupt, match=rf"{name}, byte {offset}, frame {sequence}"):
            opened(damaged)
        assert damaged.files() == before


def test_the_last_synced_batch_is_cut_when_damaged_after_a_crash_and_reported_after_a_clean_close() -> None:
    """What nothing later speaks of cannot be told from a torn tail, unless the log was closed or a snapshot was
    made."""
    disk = FaultDisk()
    log = opened(disk, segment_bytes=1 << 20)
    log.append(Kind.CHECKED, checked([1]), START_US)
    log.sync()
    crashed = disk.survivors("kept")
    (name,) = [n for n in crashed.list() if n.endswith(".segment")]
    last = crashed.files()[name].rindex(b"EMQF")
    crashed.flip(name, 8 * (last + 60))
    reopened = opened(crashed)
    assert reopened.cut is not None
    assert (reopened.cut.file, reopened.cut.offset) == (name, last)
    log.close()
    closed = disk.survivors("kept")
    closed.flip(name, 8 * (last + 60))
    with pytest.raises(Corrupt, match=rf"{name}, byte {last}, frame 1"):
        opened(closed)


def test_a_lost_segment_end_is_reported_when_a_snapshot_speaks_of_it() -> None:
    disk = FaultDisk()
    log = opened(disk, segment_bytes=1 << 20)
    log.append(Kind.CHECKED, checked([1]), START_US)
    log.sync()
    log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
    crashed = disk.survivors("kept")
    (name,) = [n for n in crashed.list() if n.endswith(".segment")]
    file = crashed.open(name)
    file.truncate(crashed.files()[name].rindex(b"EMQF"))
    file.sync()
    with pytest.raises(Corrupt, match="frames below 2 were durable"):
        opened(crashed)


@pytest.mark.invariant("I16", "I17")
def test_stale_frames_never_resurrect() -> None:
    """I16: a frame of an opener before, left behind where the next one is expected, is not taken for it."""
    disk = FaultDisk()
    opened(disk, segment_bytes=1 << 20).close()
    log = opened(disk, segment_bytes=1 << 20)
    salt = log._segment.header.salt
    crashed = disk.survivors("kept")
    (name,) = [n for n in crashed.list() if n.endswith(".segment")]
    end = log._active.end
    for epoch, sequence, survives in ((1, 2, False), (2, 1, False), (2, 3, False), (2, 2, True)):
        stale = crashed.survivors("kept")
        numbers = {"sequence": sequence, "position": 2, "epoch": epoch, "synced": 0}
        chunks = encode(Kind.CHECKED, checked([9]), time_us=START_US, salt=salt, **numbers)
        stale.open(name).write_at(end, chunks)
        assert [f.kind for f in opened(stale).frames(2)] == [Kind.CHECKED] * survives + [Kind.OPENED]


# Planted bugs: a suite that cannot fail proves nothing.


def _finds_a_loss() -> bool:
    for at in range(1, OPERATIONS + 1):
        disk, record = FaultDisk(at, crash_at=at), Record()
        try:
            run(disk, record)
        except SimulatedCrash:
            pass
        for mode, seed in CASES:
            try:
                _goes_on(disk.survivors(mode, seed), record)
            except (AssertionError, EscrowError):
                return True
    return False


@pytest.mark.invariant("I1")
def test_planted_reply_before_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultDisk, "_sync", lambda self, node: None)
    assert _finds_a_loss()


def test_planted_no_folder_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultDisk, "sync_folder", lambda self: None)
    assert _finds_a_loss()


@pytest.mark.invariant("I2")
def test_planted_no_checksum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.log.frames.is_intact", lambda data, offset, header, salt: True)
    assert _finds_a_loss()


@pytest.mark.invariant("I30")
def test_planted_cut_at_the_first_bad_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "later_frames", lambda *args: iter(()))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_damage_before_a_durable_frame_is_told_from_a_torn_tail()


def test_planted_seal_without_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = active.ActiveSegment.seal

    def seal(self: active.ActiveSegment) -> Any:
        sync = MemoryFile.sync
        MemoryFile.sync = lambda file: None  # type: ignore[method-assign]
        try:
            return real(self)
        finally:
            MemoryFile.sync = sync  # type: ignore[method-assign]

    monkeypatch.setattr(active.ActiveSegment, "seal", seal)
    assert _finds_a_loss()
