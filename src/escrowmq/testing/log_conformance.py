"""The contract of every commit log as a test suite: subclass :class:`LogConformance` with a fixture ``logs``. ``logs``
is a :class:`LogMaker`: it opens the same log repeatedly, and can crash it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, EscrowError
from escrowmq.log.frames import Content, pack
from escrowmq.log.seam import CommitLog, Frame
from escrowmq.schemas import STORED, Kind

START_US = 2_000_000_000_000_000
"""First frame time of the suite: later than any clock that an opener may read."""


class LogMaker(Protocol):
    """One log, which can be opened many times."""

    def open(self) -> CommitLog:
        """Open it, with segments of about 4 KiB."""

    def crash(self, log: CommitLog) -> None:
        """Stop ``log`` like a machine crash that loses everything not synced."""

    def fail_next_sync(self, log: CommitLog) -> None:
        """Make the next sync fail."""

    def fill(self, log: CommitLog) -> Callable[[], None]:
        """Use up all space. Returns a function that frees it."""


def messages(count: int, start: int = 0, body: int = 64, transaction: int = -1) -> pa.RecordBatch:
    """Return ``count`` different rows of a PLAIN or HALF frame, with ``body`` bytes of content."""
    numbers = range(start, start + count)
    rows: dict[str, Any] = {
        "topic": ["orders"] * count,
        "key": [f"k-{n}" if n % 3 else None for n in numbers],
        "tag": [None if n % 2 else "paid" for n in numbers],
        "properties": [[("n", str(n))] if n % 4 else None for n in numbers],
        "body": [n.to_bytes(8, "big").ljust(body, b".") for n in numbers],
        "message_id": [n.to_bytes(16, "big") for n in numbers],
        "queue": [n % 4 for n in numbers],
        "queue_id": [n % 4 for n in numbers],
        "born_us": [START_US + n for n in numbers],
        "visible_us": [0] * count,
        "due_us": [0] * count,
        "transaction": [transaction] * count,
        "epoch": [1] * count,
    }
    return pa.RecordBatch.from_pydict(rows, schema=STORED[Kind.PLAIN])


def packed(kind: Kind, batch: pa.RecordBatch) -> Content:
    """Return the same rows packed, as few rows are appended."""
    columns = [column.to_pylist() for column in batch.columns]
    if kind is not Kind.CHECKED:
        columns[5] = b"".join(columns[5])
        columns[3] = [None if pairs is None else list(pairs) for pairs in columns[3]]
    return pack(kind, columns)


def checked(transactions: Sequence[int]) -> pa.RecordBatch:
    """Return rows of a CHECKED frame."""
    return pa.RecordBatch.from_pydict({"transaction": list(transactions)}, schema=STORED[Kind.CHECKED])


def _code(act: Callable[[], object]) -> Code:
    """Return the code of the error that ``act`` raises; OK if it raises none."""
    try:
        act()
    except EscrowError as refusal:
        return refusal.code
    return Code.OK


def _content(frames: Sequence[Frame]) -> list[tuple[Any, ...]]:
    return [(f.kind, f.sequence, f.position, f.time_us, f.epoch, f.batch.to_pylist()) for f in frames]


class LogConformance:
    """The suite. Every method tests one promise of log/seam.py."""

    def test_a_new_log_begins_with_opened(self, logs: LogMaker) -> None:
        log = logs.open()
        (frame,) = log.frames()
        assert (frame.kind, frame.sequence, frame.position, frame.epoch) == (Kind.OPENED, 0, 0, 1)
        assert frame.batch.column("shard").to_pylist() == [log.shard]
        assert 0 < log.shard < 1 << 32
        assert (log.epoch, log.next_sequence, log.next_position, log.first_position) == (1, 1, 1, 0)
        assert log.last_time_us == frame.time_us > 0
        log.close()

    def test_numbers_count_up(self, logs: LogMaker) -> None:
        log = logs.open()
        assert log.append(Kind.PLAIN, messages(5), START_US) == 1
        assert log.append(Kind.CHECKED, checked([3]), START_US) == 6
        assert (log.next_sequence, log.next_position, log.last_time_us) == (3, 7, START_US)
        log.sync()
        frames = list(log.frames())
        assert [(f.sequence, f.position) for f in frames] == [(0, 0), (1, 1), (2, 6)]
        assert frames[1].batch.equals(messages(5))
        assert log.bytes_written > 5 * 64
        log.close()

    def test_rows_that_come_packed_are_the_same_frames(self, logs: LogMaker) -> None:
        log = logs.open()
        wanted = [(Kind.HALF, messages(1)), (Kind.PLAIN, messages(9, 1)), (Kind.CHECKED, checked([1, 2, 3]))]
        for kind, batch in wanted:
            log.append(kind, packed(kind, batch), START_US)
        for _ in range(2):
            frames = list(log.frames(1))
            assert [(frame.kind, frame.batch, frame.count) for frame in frames] == [(k, b, len(b)) for k, b in wanted]
            assert [frame.position for frame in frames] == [1, 2, 11]
            assert log.read(np.array([1, 7])).column("body").to_pylist() == [
                messages(1, n).column("body")[0].as_py() for n in (0, 6)
            ]
            log.sync()
        log.close()
        log = logs.open()
        assert [(frame.kind, frame.batch) for frame in log.frames(1, [k for k, _ in wanted])] == wanted
        log.close()

    def test_frames_appended_during_a_hand_over_belong_to_the_next(self, logs: LogMaker) -> None:
        log = logs.open()
        log.append(Kind.CHECKED, checked([1]), START_US)
        write = log.hand_over()
        log.append(Kind.CHECKED, checked([2]), START_US)  # decided while the other one is being written
        assert [f.batch for f in log.frames(1)] == [checked([1]), checked([2])]
        write()
        assert [f.batch for f in log.frames(1)] == [checked([1]), checked([2])]
        logs.crash(log)
        log = logs.open()
        kept = [f.batch for f in log.frames(1, [Kind.CHECKED])]
        assert kept in ([checked([1])], [checked([1]), checked([2])])
        log.close()

    def test_read_before_and_after_sync_and_reopening(self, logs: LogMaker) -> None:
        log = logs.open()
        for start in range(0, 60, 6):
            log.append(Kind.PLAIN if start % 4 else Kind.HALF, messages(6, start), START_US + start)
        positions = np.arange(1, 61)
        before = log.read(positions)
        log.sync()
        assert log.read(positions).equals(before)
        log.close()
        log = logs.open()
        after = log.read(positions)
        assert after.equals(before)
        assert after.column("body").to_pylist() == messages(60).column("body").to_pylist()
        assert after.column("stored_us").to_pylist() == [START_US + n // 6 * 6 for n in range(60)]
        log.close()

    def test_read_any_order_and_repeats(self, logs: LogMaker) -> None:
        log = logs.open()
        for start in range(0, 100, 10):
            log.append(Kind.PLAIN, messages(10, start), START_US)
        log.sync()
        chance = np.random.default_rng(7)
        for positions in (chance.permutation(np.arange(1, 101)), chance.integers(1, 101, 300), np.arange(1, 101, 3)):
            expected = [int(p) - 1 for p in positions]
            answer = log.read(positions)
            assert [int.from_bytes(i, "big") for i in answer.column("message_id").to_pylist()] == expected
        assert log.read(np.empty(0, np.int64)).num_rows == 0
        log.close()

    def test_read_refuses_what_is_not_there(self, logs: LogMaker) -> None:
        log = logs.open()
        log.append(Kind.CHECKED, checked([1]), START_US)
        assert _code(lambda: log.read(np.array([0]))) == Code.BAD_ARGUMENT  # OPENED is not a message
        assert _code(lambda: log.read(np.array([1]))) == Code.BAD_ARGUMENT
        assert _code(lambda: log.read(np.array([2]))) == Code.BAD_ARGUMENT  # does not exist yet
        assert _code(lambda: log.read(np.array([-1]))) == Code.RANGE_PURGED
        log.close()

    def test_append_refuses_what_it_could_not_read(self, logs: LogMaker) -> None:
        log = logs.open()
        assert _code(lambda: log.append(Kind.CHECKED, messages(1), START_US)) == Code.BAD_ARGUMENT
        assert _code(lambda: log.append(Kind.CHECKED, checked([]), START_US)) == Code.BAD_ARGUMENT
        log.append(Kind.CHECKED, checked([1]), START_US)
        assert _code(lambda: log.append(Kind.CHECKED, checked([1]), START_US - 1)) == Code.BAD_ARGUMENT
        assert log.next_sequence == 2
        log.close()

    def test_frames_by_kind_and_range(self, logs: LogMaker) -> None:
        log = logs.open()
        for n in range(20):
            kind, batch = (Kind.CHECKED, checked([n, n])) if n % 2 else (Kind.PLAIN, messages(2, n))
            log.append(kind, batch, START_US + n)
        chosen = list(log.frames(kinds=[Kind.CHECKED]))
        assert [f.sequence for f in chosen] == list(range(2, 21, 2))
        assert [f.sequence for f in log.frames(5, end=9)] == [5, 6, 7, 8]
        assert [f.sequence for f in log.frames_at(4)] == list(range(2, 21))
        assert [f.sequence for f in log.frames_at(4, [Kind.PLAIN], 8)] == [3]
        assert list(log.frames_at(log.next_position)) == []
        assert list(log.time_at(np.array([1, 2, 3, 40]))) == [START_US, START_US, START_US + 1, START_US + 19]
        log.close()

    def test_synced_survives_a_crash_and_what_remains_is_a_prefix(self, logs: LogMaker) -> None:
        log = logs.open()
        log.append(Kind.PLAIN, messages(10), START_US)
        log.sync()
        durable = _content(list(log.frames()))
        log.append(Kind.PLAIN, messages(10, 10), START_US)
        everything = _content(list(log.frames()))
        logs.crash(log)
        log = logs.open()
        found = _content(list(log.frames()))
        assert found[: len(durable)] == durable
        assert found[:-1] == everything[: len(found) - 1]
        assert (found[-1][0], log.epoch) == (Kind.OPENED, 2)
        assert log.append(Kind.PLAIN, messages(1), START_US) == found[-1][2] + 1
        log.close()

    def test_shard_stays_and_epoch_rises(self, logs: LogMaker) -> None:
        log = logs.open()
        shard = log.shard
        for epoch in (2, 3):
            log.close()
            log = logs.open()
            assert (log.shard, log.epoch) == (shard, epoch)
            assert [f.epoch for f in log.frames(kinds=[Kind.OPENED])] == list(range(1, epoch + 1))
        log.close()

    def test_one_opener_at_a_time(self, logs: LogMaker) -> None:
        log = logs.open()
        assert _code(logs.open) == Code.FOLDER_IN_USE
        log.close()
        logs.open().close()

    def test_closed_refuses(self, logs: LogMaker) -> None:
        log = logs.open()
        log.close()
        log.close()
        assert _code(lambda: log.append(Kind.CHECKED, checked([1]), START_US)) == Code.CLOSED
        assert _code(lambda: log.read(np.array([0]))) == Code.CLOSED

    def test_failed_sync_stops_the_log(self, logs: LogMaker) -> None:
        log = logs.open()
        log.append(Kind.PLAIN, messages(3), START_US)
        logs.fail_next_sync(log)
        assert _code(log.sync) == Code.LOG_FAILED
        acts: list[Callable[[], object]] = [
            log.sync,
            lambda: log.reserve(1),
            lambda: log.append(Kind.CHECKED, checked([1]), START_US),
            lambda: list(log.frames()),
            lambda: log.save_snapshot({}, 1, 1, START_US),
        ]
        assert [_code(act) for act in acts] == [Code.LOG_FAILED] * len(acts)
        log.close()
        log = logs.open()
        log.append(Kind.PLAIN, messages(3), START_US)
        log.sync()
        log.close()

    def test_a_full_disk_refuses_and_goes_on_with_space(self, logs: LogMaker) -> None:
        log = logs.open()
        log.append(Kind.PLAIN, messages(3), START_US)
        log.sync()
        numbers = (log.next_sequence, log.next_position)
        free = logs.fill(log)
        assert _code(lambda: log.reserve(1 << 20)) == Code.DISK_FULL
        assert _code(lambda: log.append(Kind.PLAIN, messages(1, body=1 << 20), START_US)) == Code.DISK_FULL
        assert (log.next_sequence, log.next_position) == numbers
        assert log.read(np.array([1, 2, 3])).num_rows == 3
        free()
        log.reserve(1 << 20)
        log.append(Kind.PLAIN, messages(1, body=1 << 19), START_US)
        log.sync()
        log.close()
        log = logs.open()
        assert log.next_sequence == numbers[0] + 2
        log.close()

    def test_snapshots(self, logs: LogMaker) -> None:
        log = logs.open()
        assert log.load_snapshot() is None
        assert log.bytes_since_snapshot() > 0
        for n in range(4):
            log.append(Kind.PLAIN, messages(2, n), START_US + n)
            log.sync()
            tables = {"a": pa.table({"n": [n]}), "empty": pa.table({"x": pa.array([], pa.utf8())})}
            log.save_snapshot(tables, log.next_sequence, log.next_position, START_US + n)
            assert log.bytes_since_snapshot() == 0
        log.close()
        log = logs.open()
        snapshot = log.load_snapshot()
        assert snapshot is not None
        assert (snapshot.sequence, snapshot.position, snapshot.time_us) == (5, 9, START_US + 3)
        assert snapshot.tables["a"].to_pylist() == [{"n": 3}]
        assert list(snapshot.tables) == ["a", "empty"]
        assert 0 < log.bytes_since_snapshot() < 500
        log.append(Kind.PLAIN, messages(2), START_US + 9)
        ahead = (log.next_sequence, log.next_position)
        assert _code(lambda: log.save_snapshot({}, *ahead, START_US)) == Code.BAD_ARGUMENT  # not yet durable
        log.close()

    def test_retention_drops_whole_segments_that_a_snapshot_covers(self, logs: LogMaker) -> None:
        log = logs.open()
        for n in range(40):
            log.append(Kind.PLAIN, messages(5, 5 * n), START_US + n)
            log.sync()
        limit = log.position_before(START_US + 20)
        assert 0 < limit <= 1 + 5 * 21
        assert log.drop_before(limit) == 0  # no snapshot yet
        assert log.position_before(0) == 0
        log.save_snapshot({"t": pa.table({"n": [1]})}, log.next_sequence, log.next_position, START_US + 40)
        assert log.drop_before(limit) > 0
        assert log.first_position == limit
        assert log.drop_before(limit) == 0
        for _ in range(2):
            assert _code(partial(log.read, np.array([limit - 1]))) == Code.RANGE_PURGED
            assert _code(partial(log.frames_at, limit - 1)) == Code.RANGE_PURGED
            assert log.read(np.arange(limit, 201)).num_rows == 201 - limit
            assert next(iter(log.frames())).position == limit
            snapshot = log.load_snapshot()
            assert snapshot is not None
            assert snapshot.sequence == 41
            log.close()
            log = logs.open()
            assert log.first_position == limit
        log.close()

    def test_retention_again_and_again(self, logs: LogMaker) -> None:
        """The kept frames are the same after each opening, whatever earlier openings found or dropped."""
        log = logs.open()
        seen: dict[int, tuple[Any, ...]] = {}
        for start in range(0, 120, 30):
            for n in range(start, start + 30):
                log.append(Kind.PLAIN, messages(5, 5 * n), START_US + n)
                log.sync()
            log.save_snapshot({"t": pa.table({"n": [start]})}, log.next_sequence, log.next_position, START_US + start)
            limit = log.position_before(START_US + start + 10)
            seen |= {frame[1]: frame for frame in _content(list(log.frames()))}
            assert log.drop_before(limit) > 0
            assert log.first_position == limit
            kept = [frame for frame in seen.values() if frame[2] >= limit]
            assert _content(list(log.frames())) == kept
            snapshot = log.load_snapshot()
            log.close()
            log = logs.open()
            found = log.load_snapshot()
            assert snapshot is not None
            assert found is not None
            assert (found.sequence, found.tables) == (snapshot.sequence, snapshot.tables)
            assert log.first_position == limit
            assert _content(list(log.frames()))[:-1] == kept
        log.close()
