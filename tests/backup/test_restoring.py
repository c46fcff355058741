"""A restored folder: whole or refused by every broker, another opener than the shard that went on, and itself on
record.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from backup_world import in_memory, offline

import escrowmq as mq
from escrowmq.acts.journal import Journal
from escrowmq.backup import restore, take, verify
from escrowmq.backup.manifest import COPY, NAME, UNFINISHED, CopiedFile, Manifest
from escrowmq.errors import Code, Corrupt, EscrowError, Misuse, Overloaded
from escrowmq.log.checking import check
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.offline import open_offline
from escrowmq.platform.disk import RealDisk
from escrowmq.testing.disks import MODES, FaultDisk, MemoryDisk, SimulatedCrash

NOW_US = 1_800_000_000_000_000
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def backup(kept: Path) -> MemoryDisk:
    disk = MemoryDisk()
    take(offline(in_memory(kept)), disk)
    return disk


def frames(disk: MemoryDisk) -> list[object]:
    log = open_offline(disk, in_use=False)
    return [(f.kind, f.sequence, f.position, f.time_us, f.epoch, f.batch.to_pylist()) for f in log.frames()]


def test_a_restored_folder_holds_what_the_backup_did_and_begins_another_history(kept: Path, backup: MemoryDisk) -> None:
    target = MemoryDisk()
    made = restore(backup, target, by="anna@shop-1", why="the disk died", now_us=lambda: NOW_US)
    before = frames(in_memory(kept))
    after = frames(target)
    assert after[: len(before)] == before
    assert [one[0].name for one in after[len(before) :]] == ["OPENED", "SESSION", "FORGOTTEN"]  # type: ignore[index]
    assert made.epoch == 1_800_000_000
    assert verify(backup)[1] == made.contents
    assert list(check(target)) == []
    log = open_log(target)
    assert (log.epoch, log.shard) == (made.epoch + 1, made.manifest.shard)
    (act,) = [one for one in log.acts.listed() if one.begun.act == "restore"]
    assert (act.begun.by, act.begun.why) == ("anna@shop-1", "the disk died")
    assert act.begun.what["sequence"] == made.manifest.sequence
    assert log.acts.verify()[2] == []
    log.close()


def test_ids_of_what_was_lost_are_nobodys(
    folder: Path, again: Callable[[Path, int, int], None], tmp_path: Path
) -> None:
    """A session and a transaction of after the backup are unknown to the restored shard: it gives no such number
    again."""
    take(offline(in_memory(folder)), RealDisk(tmp_path / "backup"))
    with mq.connect(f"file:{folder}") as bus:
        lost = bus.producer("shop", unasked=True).prepare("t", b"lost").transaction_id
    restore(RealDisk(tmp_path / "backup"), RealDisk(tmp_path / "new"))
    with mq.connect(f"file:{tmp_path / 'new'}") as bus:
        new = bus.producer("shop", unasked=True).prepare("t", b"new").transaction_id
        assert new.shard == lost.shard
        assert new.epoch > lost.epoch + 1000
        with pytest.raises(mq.Rejected) as raised:
            bus.admin.commit(lost)
        assert raised.value.code is Code.UNKNOWN_TRANSACTION
        assert bus.admin.commit(new) is Code.COMMITTED
        assert "nobody" not in str(bus.admin.producers())
    again(tmp_path / "new", 10, 900)


def test_a_restored_folder_goes_on_and_can_be_backed_up_where_the_other_was(
    folder: Path, again: Callable[[Path, int, int], None], tmp_path: Path
) -> None:
    """The backup goes on with the restored shard; the one that it was a copy of is another history then."""
    target = tmp_path / "backup"
    take(offline(in_memory(folder)), RealDisk(target))
    restore(RealDisk(target), RealDisk(tmp_path / "new"))
    again(tmp_path / "new", 10, 900)
    again(folder, 10, 800)
    take(offline(in_memory(tmp_path / "new")), RealDisk(target))
    with pytest.raises(Misuse, match="another history"):
        take(offline(in_memory(folder)), RealDisk(target))
    assert verify(RealDisk(target))[0].epoch > 1_700_000_000


def test_a_new_shard_stands_beside_the_one_that_it_was_a_copy_of(folder: Path, tmp_path: Path) -> None:
    take(offline(in_memory(folder)), RealDisk(tmp_path / "backup"))
    made = restore(RealDisk(tmp_path / "backup"), RealDisk(tmp_path / "new"), as_new_shard=True)
    assert made.shard != made.manifest.shard
    with mq.connect(f"file:{folder}") as old, mq.connect(f"file:{tmp_path / 'new'}") as new:
        (open_,) = old.admin.transactions("open")
        with pytest.raises(mq.Rejected) as raised:
            new.admin.commit(open_["id"])
        assert raised.value.code is Code.WRONG_SHARD
        (own,) = new.admin.transactions("open")
        assert new.admin.commit(own["id"]) is Code.COMMITTED
        assert [one["broken"] for one in new.admin.verify_acts()] == [[]]
        assert old.admin.read("t").read_all()["body"].to_pylist() == [
            body for body in new.admin.read("t").read_all()["body"].to_pylist() if body != b"half 2"
        ]
        assert old.admin.lookup(key="k150")[0]["message_id"] == new.admin.lookup(key="k150")[0]["message_id"]
    journal = tmp_path / "new" / f"acts-of-{made.manifest.shard:08x}.journal"
    assert journal.read_bytes() == (folder / "acts.journal").read_bytes()


def test_what_was_recorded_goes_on_in_the_same_chain(kept: Path, backup: MemoryDisk) -> None:
    target = MemoryDisk()
    made = restore(backup, target)
    old = in_memory(kept).files()["acts.journal"]
    assert target.files()["acts.journal"].startswith(old)
    count, _, breaks = Journal(target, made.shard).verify()
    assert (count, breaks) == (made.manifest.acts + 2, [])


# Refused


@pytest.mark.parametrize("name", ["notes.txt", "00000000000000000000.segment", "closed", "x" + COPY])
def test_a_folder_that_is_not_empty_is_refused_and_left_alone(backup: MemoryDisk, name: str) -> None:
    target = MemoryDisk({name: b"x"})
    with pytest.raises(Misuse, match="not empty"):
        restore(backup, target)
    assert target.files() == {name: b"x"}


def test_a_folder_without_a_manifest_is_no_backup(backup: MemoryDisk) -> None:
    parts = MemoryDisk({name: content for name, content in backup.files().items() if name != NAME})
    with pytest.raises(Misuse, match="no complete backup"):
        restore(parts, MemoryDisk())


def test_a_backup_that_is_not_what_was_copied_makes_nothing_visible(backup: MemoryDisk) -> None:
    for name in backup.files():
        if name == NAME:
            continue
        rotten, target = backup.copy(), MemoryDisk()
        rotten.flip(name, 8 * (len(backup.files()[name]) // 2))
        with pytest.raises(Corrupt, match="the copy is damaged"):
            restore(rotten, target)
        assert target.files() == {}


def test_a_full_disk_leaves_an_empty_folder(backup: MemoryDisk) -> None:
    size = sum(map(len, backup.files().values()))
    for part in (0.1, 0.5, 0.99):
        target = FaultDisk(budget=int(size * part))
        with pytest.raises(Overloaded) as raised:
            restore(backup, target)
        assert raised.value.code is Code.DISK_FULL
        assert target.files() == {}


def test_neither_a_backup_nor_half_a_restore_is_opened_by_a_broker(backup: MemoryDisk) -> None:
    with pytest.raises(Misuse) as raised:
        open_log(backup.copy())
    assert raised.value.code is Code.NOT_A_DATA_FOLDER


def _operations(backup: MemoryDisk) -> int:
    disk = FaultDisk()
    restore(backup, disk)
    return disk.operations


def _opened(disk: MemoryDisk) -> SegmentLog | None:
    """The log, or None if it is refused: as no log, or for the segment that is not there yet."""
    try:
        return open_log(disk)
    except EscrowError as problem:
        if problem.code in (Code.NOT_A_DATA_FOLDER, Code.DAMAGED):
            return None
        raise


def test_a_crash_at_every_step_leaves_nothing_that_a_broker_opens_or_all_of_it(backup: MemoryDisk) -> None:
    """Not before everything is there; and another try succeeds where it is not."""
    told = verify(backup)[1]
    whole = 0
    for at in range(1, _operations(backup) + 1):
        disk = FaultDisk(at, crash_at=at)
        with pytest.raises(SimulatedCrash):
            restore(backup, disk)
        left = disk.survivors(MODES[at % len(MODES)], at)
        if left.list():
            log = _opened(left.survivors("kept"))
            if log is not None:
                whole += 1
                assert log.next_sequence > verify(backup)[0].sequence
                with pytest.raises(Misuse, match="not empty"):
                    restore(backup, left)
                continue
        assert restore(backup, left).contents == told
        assert not [name for name in left.list() if name.endswith(UNFINISHED)]
    assert whole >= 1


# The manifest


MANIFEST = Manifest(
    shard=0x1A2B3C4D,
    first=12,
    sequence=345,
    position=6789,
    time_us=1_790_000_000_000_000,
    epoch=7,
    checksum="00ff00ff00ff00ff",
    acts=4,
    acts_hash="ab" * 32,
    begun_us=1_790_000_001_000_000,
    made_us=1_790_000_002_000_000,
    source="escrow://127.0.0.1:7700",
    version="0.1.0",
    files=(CopiedFile("00000000000000000012.segment", 4096, "cd" * 32), CopiedFile("acts.journal", 100, "ef" * 32)),
    damaged=("00000000000000000012.segment, byte 1000, frame 20: the checksum is wrong",),
)


def test_the_manifest_is_what_it_was() -> None:
    assert (GOLDEN / NAME).read_bytes() == MANIFEST.pack()
    assert Manifest.unpack((GOLDEN / NAME).read_bytes()) == MANIFEST


def test_a_manifest_of_a_newer_format_is_told_from_damage() -> None:
    import hashlib
    import json

    fields = json.loads(MANIFEST.pack())
    del fields["digest"]
    fields |= {"format": 2, "more": 1}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    with pytest.raises(Corrupt) as raised:
        Manifest.unpack(json.dumps({**fields, "digest": digest}).encode())
    assert raised.value.code is Code.NEWER_FORMAT
