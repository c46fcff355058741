"""The files of a backup: exactly the durable frames, whatever is appended, dropped, broken off, damaged or full
meanwhile.
"""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from backup_world import LogSource, contents_of, copied, drop_half, in_memory, offline, whole
from hypothesis import given, settings
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.backup import back_up, take, verify
from escrowmq.backup.manifest import COPY, NAME, read_manifest
from escrowmq.errors import Code, Corrupt, EscrowError, Misuse, Overloaded, Rejected, Unknown, error
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.offline import open_offline
from escrowmq.log.seam import LogFiles, StoredFile
from escrowmq.platform.disk import RealDisk
from escrowmq.schemas import Kind
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import MODES, FaultDisk, MemoryDisk, SimulatedCrash
from escrowmq.testing.log_conformance import START_US, messages


def opened(disk: MemoryDisk, start_us: int = START_US) -> SegmentLog:
    return open_log(disk, segment_bytes=4096, version="1", clock=SimulatedClock(start_us), seed=bytes(range(12)))


def write(log: SegmentLog, frames: int, *, rows: int = 3, body: int = 200, sync: bool = True) -> None:
    for _ in range(frames):
        log.append(Kind.PLAIN, messages(rows, log.next_position, body=body), log.last_time_us + 1)
    if sync:
        log.sync()


# What is copied


@settings(max_examples=25)
@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 1200), st.booleans()), min_size=1, max_size=12),
    piece=st.integers(1, 5000),
)
def test_a_backup_holds_exactly_what_was_durable(steps: list[tuple[int, int, bool]], piece: int) -> None:
    """Wherever the cut falls: frames that were appended and not synced are left out, nothing durable is."""
    log, target = opened(MemoryDisk()), MemoryDisk()
    for frames, body, sync in steps:
        write(log, frames, body=body, sync=sync)
    durable = log.durable_sequence
    manifest = take(LogSource(log, piece=piece), target)
    assert manifest.sequence == durable == copied(target).next_sequence
    assert contents_of(copied(target)) == contents_of(log, end=durable)
    write(log, 3)  # the copy that is there is made longer
    manifest = take(LogSource(log, piece=piece), target)
    assert contents_of(copied(target)) == contents_of(log, end=manifest.sequence)
    assert manifest.sequence == log.next_sequence


def test_what_is_there_already_is_not_read_again() -> None:
    log, target = opened(MemoryDisk()), MemoryDisk()
    write(log, 30)
    take(first := LogSource(log), target)
    write(log, 1)
    take(second := LogSource(log), target)
    assert first.fetched > 20_000
    assert second.fetched < 2_500  # one frame, and the header of the last that was here
    assert contents_of(copied(target)) == contents_of(log)


@pytest.mark.parametrize("at", range(1, 9))
def test_retention_takes_files_while_they_are_copied(at: int) -> None:
    """The files are listed anew; what was copied and is needed no longer goes with the new manifest."""
    log, target, reads = opened(MemoryDisk()), MemoryDisk(), 0

    def before(name: str) -> None:
        nonlocal reads
        reads += 1
        if reads == at:
            write(log, 4)
            drop_half(log)

    write(log, 30)
    log.save_snapshot({}, log.next_sequence, log.next_position, log.last_time_us)
    durable = log.durable_sequence
    manifest = take(LogSource(log, before), target)
    assert manifest.sequence >= durable
    found = copied(target)
    assert contents_of(found) == [one for one in contents_of(log, manifest.sequence) if one[1] >= manifest.first] or (
        manifest.first == 0  # all of it was copied before it went
    )
    assert found.load_snapshot() is not None
    assert {name for name in target.files() if name.endswith(COPY)} == {file.name + COPY for file in manifest.files}


def test_a_retention_that_is_always_faster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.backup.taking.MOST_LISTS", 5)
    log = opened(MemoryDisk())

    def before(name: str) -> None:
        raise error(Code.RANGE_PURGED)

    write(log, 3)
    with pytest.raises(Rejected, match="faster than they are copied"):
        take(LogSource(log, before), MemoryDisk())


def test_a_broker_that_is_away_for_a_moment_is_asked_again_and_one_that_stays_away_is_given_up() -> None:
    log, target, left = opened(MemoryDisk()), MemoryDisk(), 3

    def before(name: str) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error(Code.DISCONNECTED)

    write(log, 20)
    assert take(LogSource(log, before), target).sequence == log.next_sequence
    left = 1 << 30
    write(log, 1)
    with pytest.raises(Unknown):
        take(LogSource(log, before), target, patience=0.0)
    assert whole(target) is not None  # the backup before holds
    left = 0
    assert take(LogSource(log), target).sequence == log.next_sequence


def test_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, now = 0.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept, now
        slept, now = slept + seconds, now + seconds

    monkeypatch.setattr("escrowmq.backup.taking.time.sleep", sleep)
    monkeypatch.setattr("escrowmq.backup.taking.time.monotonic", lambda: now)
    log = opened(MemoryDisk())
    write(log, 60)
    manifest = take(LogSource(log, piece=1000), MemoryDisk(), rate=10_000.0)
    assert slept == pytest.approx(manifest.size / 10_000, rel=0.01)


def test_what_a_pause_of_the_source_lost_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, at, size = 0.0, list[tuple[float, int]](), 1000

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def progress(done: int, _total: int) -> None:
        nonlocal now
        at.append((now, done))
        if len(at) == 3:
            now += 60.0  # for a minute nothing comes

    monkeypatch.setattr("escrowmq.backup.taking.time.sleep", sleep)
    monkeypatch.setattr("escrowmq.backup.taking.time.monotonic", lambda: now)
    log = opened(MemoryDisk())
    write(log, 200)
    take(LogSource(log, piece=size), MemoryDisk(), rate=10_000.0, progress=progress)
    before, after = at[2][1], [done for time, done in at[3:] if time < 61.0]
    assert 0 < max(after) - before <= 10_000 + 2 * size
    assert at[-1][1] - before > 20_000


# Another history


def test_another_history_of_the_shard_is_refused_and_the_backup_stays() -> None:
    disk = MemoryDisk()
    log, target = opened(disk), MemoryDisk()
    write(log, 20)
    fork = disk.copy()
    log.sync()
    write(log, 5)
    take(LogSource(log), target)
    kept = target.files()
    other = opened(fork, START_US + 1_000_000)
    for more in (0, 5, 40):  # less than the backup has, as much, and more
        write(other, more)
        with pytest.raises(Misuse, match="another history"):
            take(LogSource(other), target)
        assert target.files() == kept


def test_another_shard_is_refused() -> None:
    target = MemoryDisk()
    take(LogSource(opened(MemoryDisk())), target)
    other = open_log(MemoryDisk(), seed=bytes(range(1, 13)))
    with pytest.raises(Misuse, match="this is shard"):
        take(LogSource(other), target)


@pytest.mark.parametrize("name", ["notes.txt", "00000000000000000000.segment", "closed"])
def test_a_folder_with_anything_else_is_refused(name: str) -> None:
    target = MemoryDisk({name: b"x"})
    with pytest.raises(Misuse, match="something else"):
        take(LogSource(opened(MemoryDisk())), target)
    assert target.files() == {name: b"x"}


# Broken off, full, damaged


def _operations(folder: Path) -> int:
    disk = FaultDisk()
    take(offline(in_memory(folder)), disk)
    return disk.operations


def test_a_crash_at_every_step_leaves_the_backup_before_or_the_new_one(kept: Path) -> None:
    """And another try goes on from there, whatever of what was not synced is left."""
    source = in_memory(kept)
    cut = offline(source)
    for at in range(1, _operations(kept) + 1):
        disk = FaultDisk(at, crash_at=at)
        with pytest.raises(SimulatedCrash):
            take(cut, disk)
        left = disk.survivors(MODES[at % len(MODES)], at)
        if NAME in left.list():
            verify(left)  # it has a manifest: then all is there
        manifest = take(cut, left)
        assert verify(left)[0] == manifest
        assert manifest.sequence == cut.log.durable_sequence


def test_a_crash_while_a_backup_is_brought_up_to_date_leaves_one_or_the_other() -> None:
    log, before = opened(MemoryDisk()), MemoryDisk()
    write(log, 12)
    old = take(LogSource(log), before)
    write(log, 12)
    disk = FaultDisk(files=before.files())
    new = take(LogSource(log), disk)
    for at in range(1, disk.operations + 1):
        disk = FaultDisk(at, files=before.files(), crash_at=at)
        with pytest.raises(SimulatedCrash):
            take(LogSource(log), disk)
        left = disk.survivors(MODES[at % len(MODES)], at)
        held = read_manifest(left)
        assert held.sequence in (old.sequence, new.sequence)
        assert contents_of(copied(left)) == contents_of(log, end=held.sequence)
        assert take(LogSource(log), left).sequence == new.sequence
        assert contents_of(copied(left)) == contents_of(log)


def test_a_full_disk_is_told_and_the_next_try_goes_on() -> None:
    log = opened(MemoryDisk())
    write(log, 30)
    disk = FaultDisk(budget=10_000)
    with pytest.raises(Overloaded) as raised:
        take(LogSource(log), disk)
    assert raised.value.code is Code.DISK_FULL
    assert whole(disk) is None
    disk.budget = None
    take(source := LogSource(log), disk)
    assert source.fetched < log.stored_bytes() - 5_000
    assert contents_of(copied(disk)) == contents_of(log)


def test_a_disk_that_fails_is_told() -> None:
    log = opened(MemoryDisk())
    write(log, 3)
    with pytest.raises(Corrupt):
        take(LogSource(log), FaultDisk(failures={3: errno.EIO}))


def test_a_flipped_bit_in_any_file_of_the_log_is_no_backup(kept: Path) -> None:
    """The record of acts has a chain of its own, and a snapshot that the log can do without is left out."""
    sound = in_memory(kept)
    chance = np.random.default_rng(7)
    for name, content in sound.files().items():
        if not name.endswith((".segment", ".snapshot")):
            continue
        for at in {0, len(content) - 1, int(chance.integers(len(content)))}:
            source, target = offline(sound.copy()), MemoryDisk()
            disk = source.log._reader.disk  # type: ignore[attr-defined]
            disk.flip(name, 8 * at + 3)
            if name.startswith("snapshot-"):
                assert name not in {file.name for file in take(source, target).files}
                verify(target)
                continue
            with pytest.raises(Corrupt) as raised:
                take(source, target)
            assert name in str(raised.value)
            assert whole(target) is None


def test_a_damaged_place_is_copied_as_it_is_if_that_is_wanted() -> None:
    source = MemoryDisk()
    log, target = opened(source), MemoryDisk()
    write(log, 30)
    write(log, 1)
    before = contents_of(log)
    source.flip(f"{log.files().segments[1].name}", 8 * 1000)
    with pytest.raises(Corrupt):
        take(LogSource(log), target)
    manifest = take(LogSource(log), target, damaged_too=True)
    (place,) = manifest.damaged
    assert log.files().segments[1].name in place
    write(log, 5)
    assert take(LogSource(log), target, damaged_too=True).damaged == (place,)  # what was copied before is still so
    whole_ones = [one for one in contents_of(open_log_as_copied(target)) if one in before]
    assert len(whole_ones) > 0


def open_log_as_copied(target: MemoryDisk):  # type: ignore[no-untyped-def]
    """Only the segments before the damage."""
    files = target.files()
    first = min(name for name in files if name.endswith(".segment" + COPY))
    return open_offline(MemoryDisk({first.removesuffix(COPY): files[first]}), in_use=False)


def test_damage_in_the_newest_segment_is_refused_in_any_case() -> None:
    source = MemoryDisk()
    log = opened(source)
    write(log, 3)
    source.flip(log.files().segments[-1].name, 8 * 500)
    with pytest.raises(Corrupt):
        take(LogSource(log), MemoryDisk(), damaged_too=True)


def test_bits_that_rotted_in_a_copy_that_was_broken_off_are_fetched_anew() -> None:
    log, disk = opened(MemoryDisk()), FaultDisk(crash_at=30)
    write(log, 30)
    with pytest.raises(SimulatedCrash):
        take(LogSource(log), disk)
    left = disk.survivors("kept")
    for name in left.list():
        if name.endswith(COPY) and len(left.files()[name]) > 1500:
            left.flip(name, 8 * 1500)
    take(LogSource(log), left)
    assert contents_of(copied(left)) == contents_of(log)


def test_a_record_of_acts_that_was_edited_since_the_backup_before_is_told(folder: Path) -> None:
    source, target = in_memory(folder), MemoryDisk()
    take(offline(source), target)
    edited = source.files()
    edited["acts.journal"] = edited["acts.journal"].replace(b'"why":"so"', b'"why":"no"')
    with pytest.raises(Corrupt, match="does not continue"):
        take(offline(MemoryDisk(edited)), target)
    verify(target)


# A backup that rots


def test_a_flipped_bit_or_a_missing_file_of_a_backup_is_found(kept: Path) -> None:
    target = MemoryDisk()
    manifest = take(offline(in_memory(kept)), target)
    assert verify(target)[0] == manifest
    assert {file.name[:4] for file in manifest.files} >= {"base", "snap", "acts"}
    chance = np.random.default_rng(11)
    names = [NAME, *(file.name + COPY for file in manifest.files)]
    for name in names:
        size = len(target.files()[name])
        for bit in {0, 8 * size - 9, int(chance.integers(8 * size - 8))}:
            rotten = target.copy()
            rotten.flip(name, bit)
            with pytest.raises(EscrowError) as raised:
                verify(rotten)
            assert raised.value.code in (Code.DAMAGED, Code.NEWER_FORMAT), (name, bit)
        missing = MemoryDisk({other: content for other, content in target.files().items() if other != name})
        with pytest.raises(EscrowError, match="missing"):
            verify(missing)


def test_two_backups_at_once_into_one_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    inner: list[EscrowError] = []

    def before(name: str) -> None:
        if not inner:
            with pytest.raises(Misuse) as raised:
                take(offline(in_memory(folder)), RealDisk(tmp_path / "backup"))
            inner.append(raised.value)

    source = offline(in_memory(folder))
    source.before = before
    take(source, RealDisk(tmp_path / "backup"))
    assert inner[0].code is Code.FOLDER_IN_USE
    verify(RealDisk(tmp_path / "backup"))


@pytest.mark.parametrize(
    "names", [[], ["../x"], ["lock"], ["00000000000000000001.segment", "00000000000000000000.segment"]]
)
def test_names_that_are_none_of_a_log_make_no_files(names: list[str]) -> None:
    class Strange(LogSource):
        def files(self) -> tuple[int, LogFiles]:
            return 1, LogFiles(1, tuple(StoredFile(name, 64) for name in names), (), 0, 0, "")

    target = MemoryDisk()
    with pytest.raises(Corrupt, match="does not list the files of a log"):
        take(Strange(opened(MemoryDisk())), target)
    assert target.files() == {}


def test_a_broker_in_this_process_is_backed_up_by_it(folder: Path, tmp_path: Path) -> None:
    with mq.connect(f"file:{folder}") as bus:
        manifest = back_up(bus, tmp_path / "backup")
        bus.producer("p").send("t", b"more")
        assert back_up(bus, tmp_path / "backup").sequence > manifest.sequence
    assert verify(RealDisk(tmp_path / "backup"))[0].sequence > manifest.sequence
