"""Interface of the commit log that the engine uses: local segment files, or a replicated log (``log/kafka/``).

Contract, tested by ``escrowmq.testing.log_conformance``:

- ``append`` numbers frames by ``sequence`` (0, 1, 2 ...) and their rows by ``position`` (0, 1, 2 ... over all kinds); a
  position is never reused for another row if a caller knew the first one.
- After ``sync`` returns, every frame appended before survives any crash. Before that, any of them may be lost, but
  the remaining frames are a prefix.
- ``read`` sees appended frames at once; the engine decides what may be *shown* before a sync.
- A failed write or sync stops the log: every later call raises Corrupt(LOG_FAILED) until it is reopened. A full disk
  is detected by ``reserve``, which raises Overloaded(DISK_FULL) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.acts.journal import Journal
from escrowmq.errors import EscrowError
from escrowmq.log.frames import Content, FrameHeader, Packed
from escrowmq.log.report import Damage, FrameDamage, RowDamage
from escrowmq.schemas import Kind

Int64s = npt.NDArray[np.int64]
Kinds: TypeAlias = Sequence[Kind] | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch of the log: position of its first row, time of the append. With ``damage``, some rows have no
    content."""

    kind: Kind
    sequence: int
    position: int
    time_us: int
    epoch: int
    content: Content
    damage: FrameDamage | None = None

    @classmethod
    def of(cls, header: FrameHeader, batch: pa.RecordBatch) -> Frame:
        """Create a frame from its checked header and its rows."""
        return cls(Kind(header.kind), header.sequence, header.position, header.time_us, header.epoch, batch)

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a batch; rows appended packed are decoded on first use."""
        return self.content.batch if isinstance(self.content, Packed) else self.content

    @property
    def count(self) -> int:
        return int(self.content.num_rows)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger's state after every frame below ``sequence``; ``tables`` are Arrow tables by name."""

    sequence: int
    position: int
    time_us: int
    tables: dict[str, pa.Table]


class Match(NamedTuple):
    """Matching rows of one frame. With ``lost`` the frame cannot be read: any of these rows may match."""

    positions: Int64s  # in descending order
    lost: bool


class StoredFile(NamedTuple):
    """A file of a log and the number of its bytes that are valid."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files of a log as of the frames below ``sequence``, all durable: segments, oldest first, and snapshots.
    For the record of acts: the valid bytes of its file, the number of records, and the hash of the last one."""

    sequence: int
    segments: tuple[StoredFile, ...]
    snapshots: tuple[StoredFile, ...]
    acts_bytes: int
    acts: int
    acts_hash: str


class StoredLog(Protocol):
    """The read interface of a log, for any thread; :class:`escrowmq.log.reading.ReadableLog` describes its methods."""

    @property
    def shard(self) -> int: ...  # chosen when the log was created (uint32, never 0)
    @property
    def acts(self) -> Journal: ...  # the record of operator actions
    @property
    def epoch(self) -> int: ...  # number of times the log was opened, this time included
    @property
    def next_sequence(self) -> int: ...
    @property
    def durable_sequence(self) -> int: ...  # every frame below this is durable and readable; it only grows
    @property
    def next_position(self) -> int: ...
    @property
    def last_time_us(self) -> int: ...  # time of the last frame; the engine's clock starts no earlier
    @property
    def first_position(self) -> int: ...  # the lowest position still stored
    def frames(
        self, start: int = 0, kinds: Kinds = None, end: int | None = None, *, damaged: bool = False
    ) -> Iterator[Frame]: ...
    def frames_at(
        self, position: int, kinds: Kinds = None, end_position: int | None = None, *, damaged: bool = False
    ) -> Iterator[Frame]: ...
    def read(self, positions: Int64s, columns: Sequence[str] | None = None) -> pa.RecordBatch: ...
    def salvage(
        self, positions: Int64s, columns: Sequence[str] | None = None
    ) -> tuple[pa.RecordBatch, dict[int, RowDamage]]: ...
    @property
    def is_damaged(self) -> bool: ...
    def damages(self) -> list[Damage]: ...
    def find(
        self, column: Literal["message_id", "key"], value: bytes | str, topic: str | None = None, *, end: int
    ) -> Iterator[Match]: ...
    def time_at(self, positions: Int64s) -> Int64s: ...
    def position_at(self, time_us: int) -> int: ...
    def holds(self, position: int, kinds: Sequence[Kind]) -> bool: ...
    def kind_at(self, positions: Int64s) -> npt.NDArray[np.uint8]: ...
    def sequence_at(self, positions: Int64s) -> Int64s: ...
    def files(self) -> LogFiles: ...
    def read_file(self, name: str, start: int, size: int) -> bytes: ...
    def load_snapshot(self) -> Snapshot | None:
        """Load the newest valid snapshot, skipping a damaged one if frames can replace it. Returns None if there is
        none and the log still begins at frame 0; otherwise raises Corrupt."""


class CommitLog(StoredLog, Protocol):
    """A log open for appending by one writer thread; opening it fenced the previous opener."""

    @property
    def bytes_written(self) -> int: ...  # of the frames of this opener, headers included
    def stored_bytes(self) -> int: ...  # of all segments, without reserved space
    def free_bytes(self) -> int: ...  # of the disk; 0 if unknown
    def bytes_since_snapshot(self) -> int: ...
    def reserve(self, size: int) -> None:
        """Reserve disk space for the next appends, of ``size`` bytes together (``frames.size_bound``). Raises
        Overloaded, which changes nothing, or Corrupt(LOG_FAILED)."""

    def append(self, kind: Kind, content: Content, time_us: int) -> int:
        """Append one frame of at least one row, no older than the last; return the position of its first row. It is
        buffered at most until the next ``sync``. Raises as :meth:`reserve`, which may be omitted."""

    def sync(self) -> None: ...  # write the buffer in one write and sync once; Corrupt(LOG_FAILED) stops the log
    def hand_over(self) -> Callable[[], None]:
        """Take out the buffered frames: the first half of :meth:`sync`. Returns a function for the second half: one
        write and one sync. Call it once, on any thread, while appends continue. The next hand-over, sync, roll of a
        segment or close waits for it."""

    def settle(self) -> None:
        """Finish deferred work of durable frames after a round was answered. Corrupt(LOG_FAILED) stops the log."""

    def position_before(self, time_us: int) -> int:
        """Return the first position of the first segment that has a frame newer than ``time_us`` (of the last segment
        if none has). Retention by age drops at most what is below."""

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot of durable frames durably and keep the last two; may run on another thread while appends
        continue. A failure keeps the old ones and does not stop the log, as the snapshot can be derived again:
        Overloaded(DISK_FULL, OUT_OF_RESOURCES), or Corrupt(LOG_FAILED) of this snapshot alone."""

    def drop_before(self, position: int) -> int:
        """Drop whole segments below ``position`` that the newest snapshot covers; this one then becomes the *base*.
        Returns the number of segments dropped."""

    def release(self) -> None:
        """Stop appending. In a shared log everything appended is synced, and another node may take over at once. The
        folder stays with this opener, and accepts snapshots, until :meth:`close`."""

    def close(self, *, clean: bool = True) -> None:
        """Sync, cut the reserved tail and release the folder. Not ``clean``: leave everything as after a crash."""


class ReplicatedLog(CommitLog, Protocol):
    """An open log that replicas follow and any of them may take over at any moment; after that, calls here fail."""

    @property
    def fenced(self) -> bool: ...  # whether another node is known to have taken over: later writes fail
    @property
    def ended(self) -> EscrowError | None: ...  # why nothing can be appended any more, even before an append fails
    @property
    def proved_at(self) -> float: ...  # the ``uptime()`` at which the last record known to be in the log was sent
    def caught_up(self) -> list[Frame]:
        """Return the frames found by the take-over that the replica had not returned before, in order, then this
        opener's OPENED: a warm ledger applies them. Later calls return nothing."""

    def confirm(self, timeout: float) -> None:
        """Return once a record sent after this call began is in the log: this node still led. Any thread. Raises
        Corrupt(LOG_FAILED) if it no longer leads, Unknown(TIMED_OUT) if that is unknown after ``timeout`` seconds."""


class Replica(Protocol):
    """A node of a replicated log while it does not lead. One thread; any thread may read ``log``."""

    @property
    def leader(self) -> str | None: ...  # the URL of the node that last claimed the log or proved that it leads
    @property
    def leaders_silence(self) -> float: ...  # seconds after which it expects to be replaced; 0 if not stated
    @property
    def log(self) -> StoredLog: ...  # the frames followed so far; a new object after :meth:`restarted`
    def follow(self, timeout: float) -> list[Frame]:
        """Return valid frames now in ``log``, in order; wait up to ``timeout`` seconds, [] if there are none."""

    def silent_for(self) -> float: ...  # seconds since the leader's last record; infinite if it released the log
    def is_behind(self) -> bool | None: ...  # whether the log has more than was followed; None without a response
    def is_whole(self) -> bool: ...  # whether ``log`` reaches the snapshot of its base; before, it has no state
    def restarted(self) -> bool: ...  # whether ``log`` was started over since the last call: rebuild a warm ledger
    def bytes_since_snapshot(self) -> int: ...
    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot made by this node, as a log does; any thread, while it follows."""

    def take_over(self, version: str, silence: float = 0.0) -> ReplicatedLog:
        """Become the leader; other nodes wait ``silence`` seconds without a sign before they replace it by the clock.
        Raises Fenced(FENCED) if another node took over meanwhile, Corrupt(LOG_FAILED); this replica is closed then."""

    def close(self) -> None:
        """Release the folder."""
