"""What a crash at each disk operation would leave, taken in one run: the disk's survivors and the world's memory just
before every operation, and once more at the end. (What an interrupted write leaves is among the torn and reordered ones
before the next operation.)"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from shard_judge import judge
from shard_world import Memory, Violation, World

from escrowmq.errors import EscrowError
from escrowmq.testing.disks import MODES, FaultDisk, Mode
from escrowmq.testing.ledgers import tables_equal

Script = Callable[[World], Any]


@dataclass(frozen=True, slots=True)
class Image:
    """A disk after a crash, and what the world knew then."""

    operation: int
    mode: Mode
    next: str  # the operation that the crash came before
    files: dict[str, bytes]
    memory: Memory

    def __str__(self) -> str:
        return f"crash before operation {self.operation} ({self.next}), {self.mode}"

    def disk(self, **faults: Any) -> FaultDisk:
        """The disk, as the next broker finds it."""
        return FaultDisk(self.operation, files=self.files, **faults)


class RecordingDisk(FaultDisk):
    """Takes images before each of its operations; equal ones once."""

    def __init__(self, memory: Memory, modes: tuple[Mode, ...] = MODES, **options: Any) -> None:
        super().__init__(**options)
        self.images: list[Image] = []
        self._memory = memory
        self._modes = modes
        self._seen: set[bytes] = set()

    def _begin(self, what: str) -> int | None:
        self.take(what)
        return super()._begin(what)

    def take(self, what: str) -> None:
        """The images of a crash at this moment."""
        for mode in self._modes:
            files = self.survivors(mode, self.operations).files()
            digest = hashlib.blake2b(f"{len(self._memory.answers)} {self._memory.now_us}".encode())
            for name, content in files.items():
                digest.update(name.encode() + len(content).to_bytes(8, "big") + content)
            if digest.digest() not in self._seen:
                self._seen.add(digest.digest())
                self.images.append(Image(self.operations + 1, mode, what, files, self._memory.copy()))


def run(script: Script, disk_type: type[RecordingDisk] = RecordingDisk) -> tuple[list[Image], Any, int]:
    """A whole run: its images, its effects, how many operations it took."""
    memory = Memory()
    disk = disk_type(memory, seed=1)
    effects = script(World(disk, memory))
    disk.take("the end")
    return disk.images, effects, disk.operations


def recover(image: Image) -> World:
    """Open what the crash left, and judge it."""
    try:
        world = World(image.disk(), image.memory.copy())
        judge(world)
    except (Violation, EscrowError) as problem:
        raise Violation(f"{image}: {problem}") from problem
    return world


def resume(image: Image, script: Script, effects: Any) -> None:
    """Recover, and let the world go on to the script's end: it must come to the same effects."""
    world = recover(image)
    try:
        found = script(world)
        judge(world)
    except Violation as problem:
        raise Violation(f"{image}, then going on: {problem}") from problem
    if found != effects:
        raise Violation(f"{image}, then going on: the effects are {found}, not {effects}")


def recovery_images(image: Image) -> Iterator[Image]:
    """What crashes during the recovery of ``image`` leave."""
    memory = image.memory.copy()
    disk = RecordingDisk(memory, seed=image.operation, files=image.files)
    World(disk, memory)
    disk.take("the end")
    yield from disk.images


def state(world: World) -> dict[str, pa.Table]:
    """The ledger as tables, without what tells how often the log was opened."""
    tables = dict(world.ledger.snapshot())
    scalars = json.loads(tables["ledger"]["state"][0].as_py())
    for name in ("next_position", "last_time_us"):
        del scalars[name]
    tables["ledger"] = pa.table({"state": [json.dumps(scalars)]})
    return tables


def same_state(one: World, other: World) -> bool:
    """Whether two recoveries came to the same."""
    return tables_equal(state(one), state(other))
