"""The disk seam on the real file system, and the fault disk's own promises."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.log.commit_log import open_log
from escrowmq.platform.disk import LOCK_NAME, Disk, Holder, RealDisk, note_url, replace_file
from escrowmq.schemas import Kind
from escrowmq.testing.disks import FaultDisk, MemoryDisk, SimulatedCrash
from escrowmq.testing.log_conformance import START_US, messages


@pytest.fixture(params=["real", "memory", "fault"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return {"real": lambda: RealDisk(tmp_path / "d"), "memory": MemoryDisk, "fault": FaultDisk}[request.param]()


def test_write_read_map_truncate(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.write_at(0, [b"hello ", memoryview(b"wide"), b"", b" world"])
    assert (file.read_at(0, 100), file.read_at(6, 4), file.size()) == (b"hello wide world", b"wide", 16)
    assert file.read_at(100, 5) == b""
    mapped = file.map(16)
    file.write_at(6, [b"mmap"])
    file.sync()
    assert mapped.to_pybytes() == b"hello mmap world"
    disk.remove("a")
    assert mapped.to_pybytes() == b"hello mmap world"
    file.truncate(5)
    assert file.size() == 5
    file.close()
    assert disk.list() == []


def test_many_chunks(disk: Disk) -> None:
    file = disk.open("a", create=True)
    chunks: list[bytes | memoryview] = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    file.write_at(3, list(chunks))
    assert file.read_at(3, 1 << 20) == b"".join(chunks)
    assert file.map(0).size == 0
    file.close()


def test_allocate_keeps_content(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.write_at(0, [b"abc"])
    file.allocate(10_000)
    file.allocate(100)
    assert (file.size(), file.read_at(0, 5)) == (10_000, b"abc\0\0")
    file.close()


def test_names(disk: Disk) -> None:
    for name in ("", ".", "..", "a/b", "a\\b", "a\0"):
        with pytest.raises(Misuse):
            disk.open(name, create=True)
    with pytest.raises(FileNotFoundError):
        disk.open("a")
    with pytest.raises(FileNotFoundError):
        disk.remove("a")
    with pytest.raises(FileNotFoundError):
        disk.rename("a", "b")
    disk.open("a", create=True).close()
    disk.open("b", create=True).close()
    file = disk.open("a")
    file.write_at(0, [b"1"])
    disk.rename("a", "b")
    disk.sync_folder()
    assert (disk.list(), disk.open("b").read_at(0, 9)) == (["b"], b"1")
    file.close()
    assert disk.free_bytes() > 0


def test_one_holder(disk: Disk, tmp_path: Path) -> None:
    disk.lock()
    other = RealDisk(tmp_path / "d") if isinstance(disk, RealDisk) else disk
    with pytest.raises(Misuse, match=f"in use by process {os.getpid()}") as caught:
        other.lock()
    assert caught.value.code == Code.FOLDER_IN_USE
    disk.close()
    other.lock()
    other.close()


def test_the_lock_names_another_process_and_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import sys; from escrowmq.platform.disk import RealDisk\n"
        "RealDisk(sys.argv[1]).lock(); print('locked', flush=True); sys.stdin.read()"
    )
    folder = tmp_path / "d"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(Misuse, match=f"in use by process {holder.pid}"):
            open_log(RealDisk(folder))
        holder.kill()
        holder.wait()
    open_log(RealDisk(folder)).close()


def test_read_only_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(Misuse) as caught:
        RealDisk(tmp_path / "no", read_only=True)
    assert caught.value.code == Code.NOT_A_DATA_FOLDER
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Misuse):
        RealDisk(tmp_path / "file")
    disk = RealDisk(tmp_path, read_only=True)
    assert disk.open("file").read_at(0, 5) == b"x"
    with pytest.raises(OSError):
        disk.open("file").write_at(0, [b"y"])
    with pytest.raises(FileNotFoundError):
        disk.open("new", create=True)


def test_no_descriptor_stays_open_for_a_map(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "d")
    file = disk.open("a", create=True)
    file.write_at(0, [b"x" * 100])
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    maps = [file.map(100) for _ in range(50)]
    after = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert len(maps) == 50
    assert after < before + 25, "threads of other tests may open some meanwhile"
    file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.invariant("I33")
def test_a_really_full_disk_refuses_and_goes_on_with_space(small_disk: Path) -> None:
    """I33, on a file system that is really full."""
    log = open_log(RealDisk(small_disk / "data"), segment_bytes=1 << 18)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    appended = 0

    def append() -> int:
        log.append(Kind.PLAIN, messages(10, 10 * appended, body=1000), START_US)
        log.sync()
        return appended + 1

    with pytest.raises(EscrowError) as caught:  # noqa: PT012
        while appended < 1000:
            appended = append()
    assert caught.value.code == Code.DISK_FULL
    assert appended > 20
    assert sum(frame.batch.num_rows for frame in log.frames(kinds=[Kind.PLAIN])) == 10 * appended
    ballast.unlink()
    append()
    log.close()
    log = open_log(RealDisk(small_disk / "data"), segment_bytes=1 << 18)
    assert sum(frame.batch.num_rows for frame in log.frames(kinds=[Kind.PLAIN])) == 10 * appended + 10
    log.close()


# The fault disk must do what it says, or the tests that stand on it show nothing.


def _after_crash(disk: FaultDisk, mode: str) -> set[bytes]:
    return {disk.survivors(mode, seed).files().get("a", b"(gone)") for seed in range(200)}  # type: ignore[arg-type]


def test_fault_disk_forgets_what_was_not_synced() -> None:
    disk = FaultDisk()
    file = disk.open("a", create=True)
    file.write_at(0, [b"one"])
    file.sync()
    assert _after_crash(disk, "dropped") == {b"(gone)"}  # the name was not synced
    disk.sync_folder()
    file.write_at(0, [b"two"])
    file.write_at(600, [b"three"])
    assert _after_crash(disk, "dropped") == {b"one"}
    assert _after_crash(disk, "kept") == {b"two".ljust(600, b"\0") + b"three"}
    torn = _after_crash(disk, "torn")
    assert {b"one", b"tne", b"twe", b"two"} <= torn
    assert not any(data.startswith(b"one") and b"t" in data for data in torn)
    assert b"one".ljust(600, b"\0") + b"three" in _after_crash(disk, "reordered")
    disk.remove("a")
    assert _after_crash(disk, "dropped") == {b"one"}


def test_fault_disk_tears_writes_by_sector() -> None:
    disk = FaultDisk(files={"a": bytes(2048)})
    disk.open("a").write_at(500, [b"x" * 600])
    patterns = {tuple(data[i] for i in (500, 511, 512, 1023, 1024, 1099)) for data in _after_crash(disk, "reordered")}
    x = ord("x")
    assert len(patterns) == 8
    assert (0, 0, x, x, 0, 0) in patterns


def test_fault_disk_crashes_once_and_for_all() -> None:
    disk = FaultDisk(crash_at=2)
    file = disk.open("a", create=True)
    with pytest.raises(SimulatedCrash):
        file.write_at(0, [b"x"])
    with pytest.raises(SimulatedCrash):
        file.sync()
    assert _after_crash(disk, "kept") == {b"x"}


@pytest.mark.invariant("I34")
def test_fault_disk_failed_sync_is_not_made_good_by_the_next() -> None:
    disk = FaultDisk(files={"a": b"old"})
    file = disk.open("a")
    lost = set()
    for seed in range(20):
        disk = FaultDisk(seed, files={"a": b"old"})
        file = disk.open("a")
        file.write_at(0, [b"new"])
        disk.fail_next_sync = True
        with pytest.raises(OSError) as caught:
            file.sync()
        assert caught.value.errno == errno.EIO
        file.sync()
        assert file.read_at(0, 3) == b"new"
        lost |= _after_crash(disk, "kept")
    assert lost == {b"old", b"new"}


def test_fault_disk_budget() -> None:
    disk = FaultDisk(budget=1000)
    file = disk.open("a", create=True)
    file.allocate(900)
    for act in (lambda: file.allocate(1001), lambda: file.write_at(990, [b"x" * 20])):
        with pytest.raises(OSError) as caught:
            act()
        assert caught.value.errno == errno.ENOSPC
    assert (file.size(), disk.free_bytes()) == (900, 100)


@pytest.mark.parametrize("step", [1, 3, 5, 100])
def test_a_large_file_is_synced_in_steps_and_is_the_same(step: int) -> None:
    disk, whole = FaultDisk(1), FaultDisk(1)
    parts = [[b"ab", memoryview(b"cdefg")], [], [b"", pa.py_buffer(b"hi")]]
    replace_file(disk, "file", parts, step=step)
    replace_file(whole, "file", parts)
    assert disk.files()["file"] == whole.files()["file"] == b"abcdefghi"
    assert 9 // (2 * step) + 1 <= disk.journal.count("sync") <= 9 // step + 1
    assert whole.journal.count("sync") == 1


def test_the_holder_of_a_folder_and_its_url(tmp_path: Path) -> None:
    disk, looking = RealDisk(tmp_path / "d"), RealDisk(tmp_path / "d", read_only=True)
    note_url(disk.folder, "escrow://127.0.0.1:1")
    assert disk.list() == [], "nobody has it: nothing is made"
    assert looking.holder() is None
    disk.lock()
    assert looking.holder() == Holder(str(os.getpid()))
    for url in ("escrow://127.0.0.1:17700", "escrow://127.0.0.1:1"):
        note_url(disk.folder, url)
        assert looking.holder() == Holder(str(os.getpid()), url)
    (disk.folder / LOCK_NAME).write_text("4711\nescrow://half a li")
    assert looking.holder() == Holder("4711"), "a line that is not whole is none"
    note_url(disk.folder, "escrow://127.0.0.1:2")
    assert looking.holder() == Holder("4711"), "the folder is another process's"
    disk.close()
    assert looking.holder() is None
    disk.lock()
    assert looking.holder() == Holder(str(os.getpid())), "what was noted before is gone"
    disk.close()


def test_who_looks_for_the_holder_keeps_nobody_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes the lock for an instant, in which an opener must not be refused."""
    disk = RealDisk(tmp_path / "d")
    disk.lock()
    disk.close()
    looker = os.open(disk.folder / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr("escrowmq.platform.disk.time.sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
    disk.lock()
    disk.close()
    os.close(looker)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o720])
def test_a_folder_that_others_can_write_is_refused_and_unchanged(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(Misuse, match="other users can write"):
        RealDisk(folder).lock()
    folder.chmod(0o700)
    RealDisk(folder).lock()


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o700])
def test_a_folder_that_others_can_read_causes_a_warning(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(mode)
    RealDisk(folder).lock()
    warned = any("can read the data folder" in record.getMessage() for record in caplog.records)
    assert warned == (mode != 0o700)


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "d")
    disk.lock()
    disk.open("a", create=True).close()
    modes = [path.stat().st_mode & 0o777 for path in (disk.folder, disk.folder / "a", disk.folder / "lock")]
    assert modes == [0o700, 0o600, 0o600]


def test_symbolic_links_inside_are_not_followed(tmp_path: Path) -> None:
    disk, victim = RealDisk(tmp_path / "d"), tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in ("a", LOCK_NAME):
        (disk.folder / name).symlink_to(victim)
    (disk.folder / "b").symlink_to(tmp_path / "absent")
    for create in (False, True):
        for name in ("a", "b"):
            with pytest.raises(OSError, match="symbolic links"):
                disk.open(name, create=create)
    with pytest.raises(Misuse, match="cannot be written"):
        disk.lock()
    with pytest.raises(OSError, match="symbolic links"):
        RealDisk(disk.folder, read_only=True).open("a")
    disk.remove("a")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "absent").exists()
