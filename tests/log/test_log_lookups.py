"""Look-ups by id and key: the files say what a scan of the log says, whatever became of them."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_scripts import SEED, START_US, checked

from escrowmq.errors import EscrowError
from escrowmq.log import reading, recovery
from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.dump import dump, findings
from escrowmq.log.lookups import runs
from escrowmq.log.lookups.entries import Query, positions_of
from escrowmq.log.lookups.parts import Sizes, choose_merge
from escrowmq.log.lookups.runs import BLOCK, Extent, open_run
from escrowmq.log.lookups.writing import merge, write_run
from escrowmq.log.offline import open_offline
from escrowmq.platform.disk import Disk, RealDisk
from escrowmq.schemas import STORED, Kind
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import MODES, FaultDisk, MemoryDisk, SimulatedCrash
from escrowmq.testing.log_conformance import packed
from escrowmq.testing.memory_log import MemoryLog

SMALL = Sizes(
    run_rows=24,
    run_frames=6,
    wake_rows=4,
    wake_frames=3,
    late_rows=8,
    late_frames=1,
    fanout=3,
    chunk=1,
    spare_bytes=0,
    recent_bytes=900,
    threaded=False,
)
TOPICS = ("orders", "paid")


@pytest.fixture(autouse=True, scope="module")
def some_frames_are_large() -> Iterator[None]:
    """Frames of several messages are read without their bodies here, of one message whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "LARGE", 1000)
        yield


KEYS = ("a", "b", "a longer key, of more words than one", "", None)
IDS = tuple(hashlib.md5(bytes([n])).digest() for n in range(4))


def opened(disk: Disk, sizes: Sizes = SMALL) -> SegmentLog:
    clock = SimulatedClock(START_US)
    return open_log(disk, segment_bytes=4096, version="1", clock=clock, seed=SEED, lookups=sizes)


def batch(rows: list[tuple[str, str | None, bytes]], body: int = 24) -> pa.RecordBatch:
    """Messages of a topic, key and id each."""
    count = len(rows)
    columns: dict[str, Any] = {
        "topic": [topic for topic, _, _ in rows],
        "key": [key for _, key, _ in rows],
        "tag": [None] * count,
        "properties": [None] * count,
        "body": [b"." * body] * count,
        "message_id": [identity for _, _, identity in rows],
        "transaction": [-1] * count,
    }
    columns |= {name: [0] * count for name in ("queue", "queue_id", "born_us", "visible_us", "due_us", "epoch")}
    return pa.RecordBatch.from_pydict(columns, schema=STORED[Kind.PLAIN])


def by_scan(log: Any, column: str, value: bytes | str, topic: str | None) -> list[int]:
    """Positions, newest first, by looking at every row; those of frames that cannot be read are all in it."""
    found: list[int] = []
    for frame in log.frames(0, [Kind.PLAIN, Kind.HALF], damaged=True):
        lost = frame.damage is not None and not frame.damage.bodies_only
        for number, row in enumerate(frame.batch.to_pylist()):
            if lost or (row[column] == value and topic in (None, row["topic"])):
                found.append(frame.position + number)
    return found[::-1]


def by_index(log: Any, column: Any, value: bytes | str, topic: str | None) -> list[int]:
    return [int(p) for match in log.find(column, value, topic, end=log.next_sequence) for p in match.positions]


def assert_equal(log: Any) -> None:
    for topic in (None, *TOPICS, "a topic that is not there"):
        for column, values in (("key", (*KEYS[:-1], "unknown")), ("message_id", (*IDS, bytes(16)))):
            for value in values:
                assert by_index(log, column, value, topic) == by_scan(log, column, value, topic), (column, value, topic)


def worked(log: SegmentLog) -> None:
    """Let all that is to be done be done."""
    assert log._lookups is not None
    while log._lookups.work():
        pass


def look_up_files(disk: MemoryDisk) -> list[str]:
    return [name for name in disk.list() if name.endswith(".lookup")]


rows = st.lists(st.tuples(st.sampled_from(TOPICS), st.sampled_from(KEYS), st.sampled_from(IDS)), min_size=1, max_size=9)
acts = st.one_of(
    st.tuples(st.sampled_from(["plain", "half"]), rows),
    st.tuples(st.just("others"), st.integers(1, 40)),
    st.tuples(st.just("work"), st.integers(1, 6)),
    st.tuples(st.just("restart"), st.sampled_from(["clean", "killed", "machine"])),
    st.tuples(st.just("retain"), st.floats(0, 1)),
    st.tuples(st.sampled_from(["delete", "flip", "cut", "stale", "compare"]), st.integers(0, 1 << 20)),
)


@settings(max_examples=20)
@given(st.lists(acts, min_size=8, max_size=40), st.integers(0, 1000))
def test_the_index_says_what_a_scan_says(script: list[tuple[str, Any]], seed: int) -> None:
    """Sends, halves, other frames, retention, restarts, kills, and files that are gone, old, cut or damaged."""
    disk = FaultDisk(seed)
    log = opened(disk)
    old: dict[str, bytes] = {}
    for act, detail in script:
        names = look_up_files(disk)
        if act in ("plain", "half"):
            kind = Kind.PLAIN if act == "plain" else Kind.HALF
            log.append(kind, packed(kind, batch(detail)) if len(detail) % 2 else batch(detail), START_US)
            log.sync()
        elif act == "others":
            log.append(Kind.CHECKED, checked(range(detail)), START_US)
            log.sync()
        elif act == "work":
            for _ in range(detail):
                log._lookups.work()
        elif act == "restart":
            log.close(clean=detail == "clean")
            disk = disk.survivors("dropped" if detail == "machine" else "kept", seed)
            log = opened(disk)
        elif act == "retain":
            tables = {"n": pa.table({"n": [1]})}
            log.save_snapshot(tables, log.next_sequence, log.next_position, log.last_time_us)
            log.drop_before(int(log.first_position + detail * (log.next_position - log.first_position)))
        elif act == "compare":
            assert_equal(log)
        elif names:
            name = names[detail % len(names)]
            if act == "delete":
                disk.remove(name)
            elif act == "flip":
                disk.flip(name, detail % (8 * len(disk.files()[name])))
            elif act == "cut":
                disk.open(name).truncate(detail % len(disk.files()[name]))
            elif old:  # one that was, under the name of one that is
                disk.remove(name)
                disk.open(name, create=True).write_at(0, [old[sorted(old)[detail % len(old)]]])
        old |= {name: data for name, data in disk.files().items() if name.endswith(".lookup")}
    assert_equal(log)
    worked(log)
    assert_equal(log)
    assert all(isinstance(part, runs.Run) for part in log._lookups._parts)
    log.close()
    log = opened(disk)
    assert_equal(log)
    log.close()
    offline = open_offline(disk, in_use=False)
    assert_equal(offline)


def filled(disk: Disk, frames: int = 40, sizes: Sizes = SMALL) -> SegmentLog:
    log = opened(disk, sizes)
    for number in range(frames):
        key = KEYS[number % len(KEYS)]
        log.append(Kind.PLAIN, batch([(TOPICS[number % 2], key, IDS[number % len(IDS)])] * 4), START_US + number)
        log.sync()
    return log


def test_damaged_frames_are_given_whole_whenever_they_were_damaged() -> None:
    """Before their run was written, after, and when only a body is lost."""
    disk = MemoryDisk()
    log = filled(disk)
    worked(log)
    log.close()
    before = disk.copy()
    (one,) = (e for e in dump(disk) if e["sequence"] == 5)
    (other,) = (e for e in dump(disk) if e["sequence"] == 12)
    data = disk.files()[other["segment"]]
    body = data.index(b"....", other["offset"])
    for files_are_there in (True, False):
        disk = before.copy()
        if not files_are_there:
            for name in look_up_files(disk):
                disk.remove(name)
        disk.flip(one["segment"], 8 * (one["offset"] + 80))
        disk.flip(other["segment"], 8 * body)
        log = opened(disk)
        frame = next(iter(log.frames(5, None, 6, damaged=True)))
        assert frame.damage is not None
        assert not frame.damage.bodies_only
        assert_equal(log)
        worked(log)
        assert_equal(log)
        lost = list(log.find("key", "unknown", end=log.next_sequence))
        assert [(m.lost, m.positions.tolist()) for m in lost] == [
            (True, list(range(frame.position + 3, frame.position - 1, -1)))
        ]
        log.close()
        disk.flip(one["segment"], 8 * (one["offset"] + 80))  # somebody puts it right
        log = opened(disk)
        assert_equal(log)
        assert by_index(log, "key", "unknown", None) == []
        log.close()


def test_a_disk_that_is_full_or_fails_costs_the_log_nothing() -> None:
    for number in (errno.ENOSPC, errno.EIO, errno.EMFILE):
        disk = FaultDisk(3)
        log = filled(disk, 20)
        for _ in range(12):
            log.append(Kind.PLAIN, batch([("orders", "a", IDS[0])]), START_US + 100)
            log.sync()
            disk.failures = {disk.operations + 1 + step: number for step in range(12)}
            try:
                log._lookups.work()
            except OSError as problem:
                log._lookups._on_failure(problem)
            disk.failures = {}
            assert_equal_for(log, "a")
        assert log.append(Kind.PLAIN, batch([("orders", "b", IDS[1])]), START_US + 200)
        log.sync()
        worked(log)
        assert_equal(log)
        assert not [name for name in disk.list() if name.endswith(".tmp")]
        log.close()


def assert_equal_for(log: Any, key: str) -> None:
    assert by_index(log, "key", key, None) == by_scan(log, "key", key, None)


def test_no_file_is_written_that_would_leave_too_little_to_the_log() -> None:
    disk = FaultDisk(4, budget=1 << 20)
    log = filled(disk, 40, replace(SMALL, spare_bytes=1 << 20))
    with pytest.raises(OSError, match="too little"):
        worked(log)
    assert look_up_files(disk) == []
    assert_equal(log)
    log.close()


def test_runs_of_many_blocks_are_merged_in_pieces(tmp_path: Any) -> None:
    """One key of very many messages in two topics among others: merged without losing one, newest first, its middle
    dropped by retention."""
    disk = RealDisk(tmp_path)
    made = []
    generator = np.random.default_rng(7)
    for number in range(3):
        count = 5 * BLOCK + number
        base = number * 20_000
        places = np.sort(generator.choice(20_000, count, replace=False)).astype(np.uint64)
        low, _ = Query("key", "shared", "orders").bounds
        other, _ = Query("key", "shared", "paid").bounds
        column = np.where(places % 3 == 0, np.uint64(other), np.uint64(low)) | places
        extent = Extent(number * 10, number * 10 + 10, base, base + 20_000, START_US)
        ids = np.sort(generator.integers(0, 1 << 32, count, np.uint64) << np.uint64(32) | places)
        made.append(
            write_run(
                disk, 1, extent, [[ids], [np.sort(column)[:4000], np.sort(column)[4000:]]], [number * 10], durable=False
            )
        )
    floor = Extent(5, 5, 15_000, 15_000, 0)
    steps: list[int] = []
    merged = merge(disk, 1, made, floor, lambda: steps.append(1), 4 * BLOCK)
    assert merged.holes == [10, 20]
    assert len(steps) > 5
    for topic in (None, *TOPICS, "else"):
        wanted = Query("key", "shared", topic)
        before = [p for run in reversed(made) for p in run.positions(wanted) if p >= 15_000]
        assert list(merged.positions(wanted)) == before
        assert before == sorted(before, reverse=True)
    for column in (0, 1):
        whole = np.concatenate([merged.block(column, b) for b in range(len(merged.fences[column]))])
        assert (np.diff(whole.astype(object)) > 0).all()
        expected = np.sort(
            np.concatenate([positions_of(run.entries[column], run.extent.first_position) for run in made])
        )
        assert np.array_equal(np.sort(positions_of(whole, 15_000)), expected[expected >= 15_000])


def test_there_are_as_many_runs_as_the_logarithm_of_the_messages() -> None:
    """By counts alone: what is due is merged until nothing is."""
    sizes = replace(SMALL, run_rows=100, run_frames=100, fanout=4)
    line: list[runs.Run] = []
    written = 0
    for number in range(3000):
        line.append(_of_count(number * 100, (number + 1) * 100, 100))
        while (near := choose_merge(line, 0, sizes)) is not None:
            at = line.index(near[0])
            both = _of_count(
                near[0].extent.first_position, near[-1].extent.next_position, sum(run.count for run in near)
            )
            line[at : at + len(near)] = [both]
            written += both.count
        assert len(line) <= 4 * 7
    assert written <= 300_000 * 7
    assert choose_merge(line, 200_000, sizes) is not None


def _of_count(first: int, end: int, count: int) -> runs.Run:
    nothing = np.empty(0, np.uint64)
    entries_of = np.broadcast_to(np.uint64(0), count)
    return runs.Run(
        "", Extent(first, end, first, end, 0), (entries_of, nothing), (nothing, nothing), (nothing, nothing), [], 0
    )


def test_a_look_up_in_a_large_log_reads_a_few_blocks_and_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, never timed: blocks of runs, and frames, for a key that is in one message, in none, in every second
    one."""
    sizes = Sizes(run_rows=4096, run_frames=64, wake_rows=2048, fanout=4, spare_bytes=0, threaded=False)
    log = open_log(RealDisk(tmp_path), segment_bytes=4 << 20, lookups=sizes)
    frames, each = 60, 4096
    for number in range(frames):
        numbers = range(number * each, (number + 1) * each)
        many = batch([("orders", "often" if n % 2 else f"k{n}", n.to_bytes(16, "big")) for n in numbers], body=4)
        log.append(Kind.PLAIN, many, 1 << 60)
        log.sync()
    worked(log)
    log.close()
    log = open_log(RealDisk(tmp_path), segment_bytes=4 << 20, lookups=sizes)
    lookups = log._lookups
    count = dict.fromkeys(("blocks", "frame", "columns"), 0)

    def counted(what: str, kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(*args: Any, **more: Any) -> Any:
            count[what] += 1
            return real(*args, **more)

        monkeypatch.setattr(kind, name, call)

    counted("blocks", runs.Run, "block")
    for how in ("frame", "columns"):  # whole, or without its bodies: one of them is enough
        counted(how, type(log._reader), how)
    assert len(lookups._parts) <= 4 * 3
    for key, most in ((f"k{each * 7 + 4}", 1), ("nowhere", 0), ("often", 0)):
        count |= dict.fromkeys(count, 0)
        found: Iterator[Any] = log.find("key", key, "orders", end=log.next_sequence)
        if key == "often":
            assert len(next(found).positions) == each // 2
            assert count["blocks"] <= 4
            assert (count["columns"], count["frame"]) == (1, 0)
        else:
            assert sum(len(match.positions) for match in found) == most
            assert count["blocks"] <= 2 * len(lookups._parts)
            assert (count["columns"], count["frame"]) == (most, 0)
    log.close()


def test_a_tail_that_begins_a_log_again_is_bounded() -> None:
    """Files that are gone are made again beside look-ups, not before them: no more than a tail is taken in at once."""
    disk = MemoryDisk()
    filled(disk, 60).close()
    for name in look_up_files(disk):
        disk.remove(name)
    log = opened(disk)
    assert by_index(log, "key", "unknown", None) == []
    assert log._lookups._tail.frames <= SMALL.run_frames
    assert [type(part).__name__ for part in log._lookups._parts] == ["Gap"]
    assert_equal(log)
    worked(log)
    assert_equal(log)
    log.close()


@pytest.mark.invariant("I29")
def test_a_folder_of_look_up_files_is_no_trouble_to_anybody() -> None:
    """check, dump, listing and a copy of the folder; the thread writes them while look-ups go on."""
    disk = MemoryDisk()
    log = filled(disk, 40, replace(SMALL, threaded=True))
    assert log._lookups.settle(60)
    assert look_up_files(disk)
    assert_equal(log)
    log.close()
    assert list(findings(disk)) == []
    assert recovery.list_folder(disk).foreign == []
    assert not recovery.list_folder(disk).is_fresh
    assert len(list(dump(disk))) == 41
    copy = MemoryDisk({name: data for name, data in disk.files().items() if name.endswith(".lookup")})
    copy.open("x.lookup.tmp", create=True)
    assert recovery.list_folder(copy).is_fresh


def test_the_memory_log_finds_the_same() -> None:
    log = MemoryLog()
    for number in range(30):
        log.append(Kind.HALF, batch([(TOPICS[number % 2], KEYS[number % 5], IDS[number % 4])] * 3), 1 << 60)
    log.sync()
    assert_equal(log)


def test_a_run_of_another_log_or_of_a_torn_write_is_not_opened() -> None:
    disk = MemoryDisk()
    log = filled(disk)
    worked(log)
    log.close()
    name = look_up_files(disk)[0]
    shard = log.shard
    assert open_run(disk, name, shard).count
    for wrong in (shard + 1, 0):
        with pytest.raises(EscrowError):
            open_run(disk, name, wrong)
    data = disk.files()[name]
    for size in (0, 7, runs.HEADER_BYTES - 1, runs.HEADER_BYTES, len(data) - 1):
        torn = MemoryDisk({name: data[:size]})
        with pytest.raises(EscrowError):
            open_run(torn, name, shard)


@pytest.mark.invariant("I29")
def test_a_crash_at_any_step_of_writing_and_merging_leaves_right_answers() -> None:
    """At each operation in turn; what it leaves is kept, torn or dropped: the next opening finds everything, and makes
    the rest again."""
    before = FaultDisk(1)
    log = filled(before, 45, replace(SMALL, fanout=2))
    steps = before.operations
    worked(log)
    steps = before.operations - steps
    log.close()
    for number in range(1, steps + 1, 5):
        disk = FaultDisk(number)
        log = filled(disk, 45, replace(SMALL, fanout=2))
        disk.crash_at = disk.operations + number
        with pytest.raises(SimulatedCrash):
            worked(log)
        mode = MODES[number % len(MODES)]
        log = opened(disk.survivors(mode, number))
        for key in ("a", "b", ""):
            assert_equal_for(log, key)
        log.close()


def test_look_ups_beside_the_writer_the_thread_and_retention(tmp_path: Any) -> None:
    """Every message that was answered is found at once, whichever file is being written, merged or removed at that
    moment."""
    log = opened(RealDisk(tmp_path), replace(SMALL, threaded=True))
    told: list[tuple[int, int]] = []
    over = threading.Event()
    wrong: list[Any] = []

    def look() -> None:
        while not over.is_set():
            if not told:
                continue
            number, end = told[-1]
            try:
                (match,) = log.find("key", f"n{number}", "orders", end=end)
                many = [int(p) for m in log.find("key", "often", "orders", end=end) for p in m.positions]
            except (EscrowError, ValueError) as problem:
                wrong.append((number, problem))
                return
            if match.lost or many != sorted(set(many), reverse=True) or len(many) < min(number, 20):
                wrong.append((number, match, many))
                return

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(250):
            log.append(Kind.PLAIN, batch([("orders", f"n{number}", IDS[0]), ("orders", "often", IDS[1])]), START_US)
            log.sync()
            told.append((number, log.next_sequence))
            if number % 50 == 49:
                tables = {"n": pa.table({"n": [1]})}
                log.save_snapshot(tables, log.next_sequence, log.next_position, log.last_time_us)
                log.drop_before(log.next_position - 120)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert log._lookups.settle(60)
    assert_equal(log)
    log.close()
    assert log._lookups._thread is None


def golden_log(disk: MemoryDisk) -> None:
    """Merged runs and one of a tail."""
    log = filled(disk, 25)
    worked(log)
    log.close()


def test_the_bytes_of_a_look_up_file_are_the_same_for_ever() -> None:
    """Golden: today's writer writes them equal, today's reader opens them and finds with them. ``python
    tests/log/test_log_lookups.py`` makes them anew, for a new version of the format."""
    disk = MemoryDisk()
    golden_log(disk)
    golden = {path.name: path.read_bytes() for path in sorted(GOLDEN.iterdir())}
    assert {name: disk.files()[name] for name in look_up_files(disk)} == golden
    found = [open_run(MemoryDisk(golden), name, int.from_bytes(SEED[:4], "little")) for name in sorted(golden)]
    ids = [list(run.positions(Query("message_id", IDS[1]))) for run in found]
    assert sum(map(len, ids)) == 4 * len([n for n in range(found[-1].extent.next_sequence - 1) if n % len(IDS) == 1])
    assert [hex(bound) for bound in Query("key", "order-17", "orders").bounds] == [
        "0x5e3cbcf00000000",
        "0x5e3cbcfffffffff",
    ]


GOLDEN = Path(__file__).parent / "golden" / "v1-lookups"

if __name__ == "__main__":
    made = MemoryDisk()
    golden_log(made)
    GOLDEN.mkdir()
    for name in look_up_files(made):
        (GOLDEN / name).write_bytes(made.files()[name])
