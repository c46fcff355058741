"""Disks in memory: :class:`MemoryDisk` keeps everything; :class:`FaultDisk` loses, tears, fills up and fails like real
disks. And :class:`SlowDisk`, a slow folder of the file system.

:meth:`FaultDisk.survivors` decides what remains after a crash: everything synced, and of the rest

- ``"dropped"``: nothing;
- ``"kept"``: everything (the process died, the machine did not);
- ``"torn"``: the first of the unsynced changes of each file, the last of these only in part;
- ``"reordered"``: any subset of the unsynced changes, writes sector by sector.

Names (creations, renames, removals) survive in the same way, and are durable only after ``sync_folder``.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.platform.disk import RealDisk, RealFile, check_file_name

_T = TypeVar("_T")

SECTOR = 512
Mode = Literal["dropped", "kept", "torn", "reordered"]
MODES: tuple[Mode, ...] = ("dropped", "kept", "torn", "reordered")


class SimulatedCrash(BaseException):
    """A crash of the machine. Not an Exception, so that no handler of the code under test survives it."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a file: bytes written at an offset, or (``data`` None) a new size."""

    offset: int
    data: bytes | None
    grow_only: bool = False

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            if not self.grow_only:
                del content[self.offset :]
            content.extend(bytes(max(self.offset - len(content), 0)))
        else:
            content.extend(bytes(max(self.offset + len(self.data) - len(content), 0)))
            content[self.offset : self.offset + len(self.data)] = self.data

    def sectors(self) -> list[_Change]:
        """Split the change at the boundaries of sectors, which survive one by one."""
        if self.data is None:
            return [self]
        cuts = [0, *range(SECTOR - self.offset % SECTOR, len(self.data), SECTOR), len(self.data)]
        return [_Change(self.offset + a, self.data[a:b]) for a, b in pairwise(cuts) if b > a]


@dataclass(slots=True, eq=False)
class _Node:
    """A file's content: as read, as durable, and the changes in between."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    changes: list[_Change] = field(default_factory=list)


class MemoryFile:
    """An open file (:class:`escrowmq.platform.disk.File`) in memory. A map sees later writes until the file grows."""

    def __init__(self, disk: MemoryDisk, node: _Node) -> None:
        self._disk = disk
        self._node = node

    def write_at(self, offset: int, chunks: list[bytes | memoryview | pa.Buffer]) -> None:
        change = _Change(offset, b"".join(bytes(memoryview(chunk)) for chunk in chunks))
        self._disk._write(self._node, change)

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self._node.content[offset : offset + size])

    def map(self, size: int) -> pa.Buffer:
        self._disk._take_descriptor()
        return pa.py_buffer(memoryview(self._node.content)[:size])

    def allocate(self, size: int) -> None:
        self._disk._write(self._node, _Change(size, None, grow_only=True))

    def truncate(self, size: int) -> None:
        self._disk._write(self._node, _Change(size, None))

    def renamed(self, name: str) -> None:
        """Do nothing: the mapping does not depend on the name."""

    def size(self) -> int:
        return len(self._node.content)

    def sync(self) -> None:
        self._disk._sync(self._node)

    def close(self) -> None:
        """Do nothing."""


class MemoryDisk:
    """A folder in memory, without faults (see :class:`escrowmq.platform.disk.Disk`)."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self._nodes: dict[str, _Node] = {}
        for name, data in (files or {}).items():
            self._nodes[check_file_name(name)] = _Node(bytearray(data), bytes(data))
        self._locked = False

    def open(self, name: str, *, create: bool = False) -> MemoryFile:
        if create and check_file_name(name) not in self._nodes:
            self._change_names(("create", name, ""))
        self._check_exists(name)
        return MemoryFile(self, self._nodes[name])

    def list(self) -> list[str]:
        return sorted(self._nodes)

    def rename(self, old: str, new: str) -> None:
        self._check_exists(old)
        self._change_names(("rename", old, check_file_name(new)))

    def remove(self, name: str) -> None:
        self._check_exists(name)
        self._change_names(("remove", name, ""))

    def sync_folder(self) -> None:
        """Make names durable."""

    def lock(self) -> None:
        if self._locked:
            raise Misuse(Code.FOLDER_IN_USE, f"the folder is in use by process {os.getpid()}")
        self._locked = True

    def free_bytes(self) -> int:
        return 1 << 40

    def close(self) -> None:
        self._locked = False

    # For tests

    def files(self) -> dict[str, bytes]:
        """Return the current content of every file by name."""
        return {name: bytes(node.content) for name, node in self._nodes.items()}

    def flip(self, name: str, bit: int) -> None:
        """Flip one bit (0 is the lowest of the first byte), also on the medium."""
        node = self._nodes[name]
        node.content = bytearray(node.content)
        node.content[bit // 8] ^= 1 << bit % 8
        node.durable, node.changes = bytes(node.content), []

    def copy(self) -> MemoryDisk:
        """Return another disk with the same files, unlocked."""
        return MemoryDisk(self.files())

    def _check_exists(self, name: str) -> None:
        if check_file_name(name) not in self._nodes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def _change_names(self, change: tuple[str, str, str]) -> None:
        _apply_names(self._nodes, change, self._nodes.get(change[1]) or _Node())

    def _take_descriptor(self) -> None:
        pass

    def _write(self, node: _Node, change: _Change) -> None:
        _change_content(node, change)

    def _sync(self, node: _Node) -> None:
        pass


class FaultDisk(MemoryDisk):
    """A disk that counts its operations and injects faults. Operations that change or sync are counted, from 1.
    ``crash_at``: this operation and all later ones raise SimulatedCrash. ``budget``: maximum bytes of all files;
    beyond, OSError(ENOSPC). ``failures``: errno by operation; a failed write stores half of itself, a failed sync makes
    a random part durable, and the rest still reads as before but never becomes durable. ``starved``: while set, the
    errno of every operation that needs a descriptor or memory (opening, mapping); open files keep working."""

    def __init__(
        self,
        seed: int = 0,
        *,
        files: dict[str, bytes] | None = None,
        crash_at: int | None = None,
        budget: int | None = None,
        failures: dict[int, int] | None = None,
    ) -> None:
        super().__init__(files)
        self.seed = seed
        self.operations = 0
        self.journal: list[str] = []
        self.failed: list[str] = []
        """Names of the files ("" for the folder) whose operations failed by ``failures``."""
        self.crash_at = crash_at
        self.budget = budget
        self.failures = dict(failures or {})
        self.fail_next_sync = False
        self.starved: int | None = None
        self.crashed = False
        self._random = random.Random(seed)
        self._durable_names: dict[str, _Node] = dict(self._nodes)
        self._name_changes: list[tuple[tuple[str, str, str], _Node]] = []

    def survivors(self, mode: Mode, seed: int = 0, **faults: Any) -> FaultDisk:
        """Return the result of a crash now as a new disk (with ``faults`` such as ``crash_at``)."""
        chance = random.Random(f"{self.seed}/{seed}/{mode}")
        names = dict(self._durable_names)
        for change, node in _choose_survivors(self._name_changes, mode, chance):
            _apply_names(names, change, node)
        contents = {node: _survivor_content(node, mode, chance) for node in dict.fromkeys(names.values())}
        return FaultDisk(seed, files={name: contents[node] for name, node in names.items()}, **faults)

    def open(self, name: str, *, create: bool = False) -> MemoryFile:
        self._take_descriptor()
        return super().open(name, create=create)

    def _take_descriptor(self) -> None:
        if self.starved is not None:
            raise OSError(self.starved, os.strerror(self.starved))

    def free_bytes(self) -> int:
        """Return the remaining budget."""
        return super().free_bytes() if self.budget is None else max(self.budget - self._used_bytes(), 0)

    def sync_folder(self) -> None:
        failure = self._begin("sync_folder")
        self._end()
        if failure is not None:
            self._fail(failure, "")
        self._durable_names = dict(self._nodes)
        self._name_changes = []

    def lock(self) -> None:
        if self.crashed:
            raise SimulatedCrash
        super().lock()

    def _name_of(self, node: _Node) -> str:
        return next((name for name, one in self._nodes.items() if one is node), "")

    def _used_bytes(self) -> int:
        return sum(len(node.content) for node in self._nodes.values())

    def _begin(self, what: str) -> int | None:
        """Count an operation. Returns its errno if it must fail. The operation of a crash may still take effect."""
        if self.crashed:
            raise SimulatedCrash
        self.operations += 1
        self.journal.append(what)
        self.crashed = self.operations == self.crash_at
        return None if self.crashed else self.failures.pop(self.operations, None)

    def _fail(self, failure: int, name: str) -> NoReturn:
        self.failed.append(name)
        raise OSError(failure, os.strerror(failure))

    def _end(self) -> None:
        if self.crashed:
            raise SimulatedCrash

    def _change_names(self, change: tuple[str, str, str]) -> None:
        failure = self._begin(" ".join(change).strip())
        if failure is not None:
            self._fail(failure, change[1])
        node = self._nodes.get(change[1]) or _Node()
        _apply_names(self._nodes, change, node)
        self._name_changes.append((change, node))
        self._end()

    def _write(self, node: _Node, change: _Change) -> None:
        failure = self._begin("resize" if change.data is None else "write")
        if failure is not None:
            if change.data is not None:
                self._record(node, _Change(change.offset, change.data[: len(change.data) // 2]))
            self._fail(failure, self._name_of(node))
        growth = change.offset + len(change.data or b"") - len(node.content)
        if self.budget is not None and growth > 0 and self._used_bytes() + growth > self.budget:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._record(node, change)
        self._end()

    def _record(self, node: _Node, change: _Change) -> None:
        _change_content(node, change)
        node.changes.append(change)

    def _sync(self, node: _Node) -> None:
        failure = self._begin("sync")
        self._end()
        if self.fail_next_sync:
            self.fail_next_sync, failure = False, errno.EIO
        if failure is not None:
            node.durable, node.changes = _survivor_content(node, "reordered", self._random), []
            self._fail(failure, self._name_of(node))
        node.durable, node.changes = _apply_all(node.durable, node.changes), []


def _change_content(node: _Node, change: _Change) -> None:
    """Apply a change to the readable content; a buffer that maps the old content is kept when the size changes."""
    end = change.offset + len(change.data or b"")
    shrinks = change.data is None and not change.grow_only and end < len(node.content)
    if end > len(node.content) or shrinks:
        node.content = bytearray(node.content)
    change.apply(node.content)


def _apply_names(names: dict[str, _Node], change: tuple[str, str, str], node: _Node) -> None:
    """Apply a change of the file ``node`` to ``names``; names of other files stay, because changes may be reordered."""
    act, old, new = change
    if act == "create":
        names.setdefault(old, node)
        return
    if act == "rename":
        names[new] = node
    if names.get(old) is node:
        del names[old]


def _survivor_content(node: _Node, mode: Mode, chance: random.Random) -> bytes:
    changes = [part for change in node.changes for part in (change.sectors() if mode == "reordered" else [change])]
    kept = _choose_survivors(changes, mode, chance)
    if mode == "torn" and kept and (data := kept[-1].data) is not None:
        size = chance.randrange(len(data) + 1)
        kept[-1] = _Change(kept[-1].offset, data[: size if chance.random() < 0.5 else size - size % SECTOR])
    return _apply_all(node.durable, kept)


def _apply_all(durable: bytes, changes: list[_Change]) -> bytes:
    content = bytearray(durable)
    for change in changes:
        change.apply(content)
    return bytes(content)


def _choose_survivors(changes: list[_T], mode: Mode, chance: random.Random) -> list[_T]:
    if mode == "kept":
        return changes
    if mode == "torn":
        return changes[: chance.randrange(len(changes) + 1)]
    if mode == "reordered":
        return [change for change in changes if chance.random() < 0.5]
    return []


class SlowDisk(RealDisk):
    """A folder whose syncs take ``sync_seconds`` longer, one at a time, and more after many written bytes:
    ``bytes_per_second`` (None: no extra time). Reading is as fast as on the real disk."""

    def __init__(
        self, folder: str | Path, *, sync_seconds: float = 0.05, bytes_per_second: float | None = None
    ) -> None:
        super().__init__(folder)
        self._sync_seconds = sync_seconds
        self._byte_seconds = 1.0 / bytes_per_second if bytes_per_second else 0.0
        self._busy = threading.Lock()

    def open(self, name: str, *, create: bool = False) -> RealFile:
        return _SlowFile(self, super().open(name, create=create))

    def sync_folder(self) -> None:
        self.wait_for(0)
        super().sync_folder()

    def wait_for(self, written: int) -> None:
        """Wait as long as a sync of ``written`` bytes takes, after those before it."""
        with self._busy:
            time.sleep(self._sync_seconds + written * self._byte_seconds)


class _SlowFile(RealFile):
    def __init__(self, disk: SlowDisk, opened: RealFile) -> None:
        super().__init__(opened._path, opened._descriptor)
        self._disk = disk
        self._unsynced = 0

    def write_at(self, offset: int, chunks: list[bytes | memoryview | pa.Buffer]) -> None:
        super().write_at(offset, chunks)
        self._unsynced += sum(map(len, chunks))

    def sync(self) -> None:
        written, self._unsynced = self._unsynced, 0
        self._disk.wait_for(written)
        super().sync()
