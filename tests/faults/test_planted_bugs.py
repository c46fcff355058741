"""The crash tests are worth something only if they fail: known bugs, planted one at a time, must each be noticed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import shard_script
from shard_images import RecordingDisk, Script, recover, run
from shard_judge import judge
from shard_world import Memory, Violation, World
from test_shard_crashes import rotten

from escrowmq.errors import Corrupt, EscrowError
from escrowmq.ledger.events import Decision
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.transactions import ending
from escrowmq.ledger.transactions.checkback import CheckBack
from escrowmq.ledger.transactions.ending import Ending
from escrowmq.log import active, frames, recovery
from escrowmq.log.recovery import Cut
from escrowmq.schemas import Kind
from escrowmq.testing.disks import FaultDisk, MemoryFile


def sweep(script: Script = shard_script.shortest, disk_type: type[RecordingDisk] = RecordingDisk) -> None:
    """A run and the recovery of all its crashes, as in ``test_shard_crashes.py``."""
    images, _, _ = run(script, disk_type)
    for image in images:
        recover(image)


def test_without_a_planted_bug_nothing_is_noticed() -> None:
    sweep()


def test_reply_before_sync() -> None:
    """Answers go out, and only before the next operation does the sync come true."""

    class Late(RecordingDisk):
        owed: Any = None

        def _begin(self, what: str) -> int | None:
            failure = super()._begin(what)
            if (owed := self.owed) is not None:
                self.owed = None
                owed.durable, owed.changes = bytes(owed.content), []
            return failure

        def _sync(self, node: Any) -> None:
            self._begin("sync")
            self.owed = node

    with pytest.raises(Violation):
        sweep(disk_type=Late)


def test_no_sync_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "sync", lambda self: None)
    with pytest.raises(Violation):
        sweep()


def test_skip_folder_sync() -> None:
    class Forgetful(RecordingDisk):
        def sync_folder(self) -> None:
            pass

    with pytest.raises(Violation, match=r"lost|missing|I1"):
        sweep(disk_type=Forgetful)


def test_skip_the_sync_of_a_new_segments_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: active.PreparedSegment) -> active.ActiveSegment:
        self._file.write_at(0, [self.header.pack()])
        self._disk.rename(self.name + active.TEMPORARY, self.name)
        self._disk.sync_folder()
        self._file.renamed(self.name)
        return active.ActiveSegment(self._file, active.HEADER_BYTES, self._allocated, self._data)

    monkeypatch.setattr(active.PreparedSegment, "begin", begin)
    with pytest.raises(Violation, match="damaged"):
        sweep()


def test_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    def whatever(data: memoryview, offset: int, header: frames.FrameHeader, salt: int) -> bool:
        return True

    monkeypatch.setattr(frames, "is_intact", whatever)
    with pytest.raises((Violation, ValueError, KeyError, OSError)):
        sweep(shard_script.whole)


def test_cut_at_the_first_bad_record_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(name: str, data: Any, header: Any, found: Any) -> Cut | None:
        return Cut(name, found.end, data.size - found.end, found.what) if found.what is not None else None

    monkeypatch.setattr(recovery, "torn_tail", cut)
    monkeypatch.setattr(recovery, "check_durable", lambda name, found, floor: None)

    def judge_all() -> None:
        for image in rotten():
            with contextlib.suppress(Corrupt):  # other parts of the log still notice their damage
                judge(World(image.disk(), image.memory.copy()))

    with pytest.raises(Violation, match=r"I1|I5|I22|I17"):
        judge_all()


@pytest.mark.invariant("I11")
def test_count_checks_in_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CheckBack.decide_ask

    def forgetful(self: CheckBack, command: Any, now_us: int) -> Decision:
        decision = real(self, command, now_us)
        if len(decision.answer.transactions):
            table = self._table
            ordinals = table.find(decision.answer.transactions)
            rows = ordinals - table.rows.first
            table.rows["checks"][rows] += 1
            table.rows["due_us"][rows] = now_us + 2_000_000
            self._schedule(ordinals, table.rows["due_us"][rows])
        return dataclasses.replace(decision, events=())

    monkeypatch.setattr(CheckBack, "decide_ask", forgetful)
    with pytest.raises(Violation, match="I11"):
        sweep()


@pytest.mark.invariant("I8")
def test_apply_a_commit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger._acts[Kind.DECIDED]

    def twice(ledger: Ledger, batch: Any, position: int, time_us: int) -> None:
        real(ledger, batch, position, time_us)
        _, positions, queue_ids, tags, sizes = ledger.transactions.messages_of(
            ledger.transactions.find(batch.column("transaction").to_numpy()[batch.column("state").to_numpy() == 1])
        )
        ledger._place(positions, queue_ids, tags, np.zeros(len(positions), np.int64), sizes, time_us)

    monkeypatch.setitem(Ledger._acts, Kind.DECIDED, twice)
    with pytest.raises(Violation, match=r"I8|I17|I22"):
        sweep()


@pytest.mark.invariant("I5")
def test_accept_the_opposite_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    careless = ending.ANSWER.copy()
    careless[:, :] = 0
    monkeypatch.setattr(ending, "ANSWER", careless)
    real: Callable[..., Decision] = Ending.decide_end

    def overwrite(self: Ending, command: Any, rules: Any) -> Decision:
        states = self._table.rows["state"]
        before = states.copy()
        states[:] = 0
        try:
            return real(self, command, rules)
        finally:
            states[:] = before

    monkeypatch.setattr(Ending, "decide_end", overwrite)
    with pytest.raises((Violation, EscrowError)):
        sweep(shard_script.whole)


@pytest.mark.invariant("I16")
def test_reuse_an_offset_after_a_tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers name offsets: told before the sync, a crash gives the same offset to another message."""
    memory, disk = Memory(), FaultDisk(1)
    world = World(disk, memory)
    _, plain = shard_script.opening(world)
    monkeypatch.setattr(MemoryFile, "sync", lambda self: None)
    world.send("told too early", {"topic": "orders", "queue": 0}, session=plain)
    monkeypatch.undo()
    again = World(disk.survivors("dropped", 1), memory)
    again.send("filler", *({"topic": "orders", "queue": 1} for _ in range(4)), session=plain)
    with pytest.raises(Violation, match="I17"):
        again.send("another", {"topic": "orders", "queue": 0}, session=plain)
