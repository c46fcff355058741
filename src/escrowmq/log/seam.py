"""The commit log interface that the engine uses: local segment files, or a replicated log (``log/kafka/``).

Contract, held by ``escrowmq.testing.log_conformance``:

- ``append`` numbers frames by ``sequence`` (0, 1, 2 ...) and their rows by ``position`` (0, 1, 2 ... over all kinds); a
  position is never used for two rows of which a caller knew.
- After ``sync`` returns, every frame appended before is there after any crash. Before, any of them may be missing, but
  what remains is a prefix.
- ``read`` sees appended frames at once; what may be *shown* before a sync is the engine's affair.
- A failed write or sync stops the log: everything after raises Corrupt(LOG_FAILED) until it is opened anew. A full disk
  is found by ``reserve``, which raises Overloaded(DISK_FULL) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.acts.journal import Journal
from escrowmq.errors import EscrowError
from escrowmq.log.frames import Content, Packed
from escrowmq.log.report import Damage, FrameDamage, RowDamage
from escrowmq.schemas import Kind


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch of the log. ``position`` is that of the first row, ``time_us`` the broker's time of the append. With
    ``damage`` some rows are without content."""

    kind: Kind
    sequence: int
    position: int
    time_us: int
    epoch: int
    content: Content
    damage: FrameDamage | None = None

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a batch; made when somebody asks, where they were appended packed."""
        return self.content.batch if isinstance(self.content, Packed) else self.content

    @property
    def count(self) -> int:
        """Its rows."""
        return int(self.content.num_rows)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger's state after every frame below ``sequence``; ``tables`` are Arrow tables by name."""

    sequence: int
    position: int
    time_us: int
    tables: dict[str, pa.Table]


class Match(NamedTuple):
    """Rows of one frame that were looked for. With ``lost`` nothing can be read of the frame: these are rows that may
    be it."""

    positions: npt.NDArray[np.int64]
    """Falling."""
    lost: bool


class StoredFile(NamedTuple):
    """A file of a log, and how many bytes of it count."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files of a log as of the frames below ``sequence``, all durable: segments, oldest first, and snapshots. With
    the record of acts: how many bytes of its file count, how many records these are, and the hash of the last one."""

    sequence: int
    segments: tuple[StoredFile, ...]
    snapshots: tuple[StoredFile, ...]
    acts_bytes: int
    acts: int
    acts_hash: str


class StoredLog(Protocol):
    """The reading half of a log, for any thread."""

    @property
    def shard(self) -> int:
        """The shard's id, made when the log was (uint32, never 0)."""

    @property
    def acts(self) -> Journal:
        """The record of what operators did."""

    @property
    def epoch(self) -> int:
        """How often the log was opened, this time included."""

    @property
    def next_sequence(self) -> int: ...

    @property
    def durable_sequence(self) -> int:
        """Every frame below this is durable, and can be read. From any thread; it only grows."""

    @property
    def next_position(self) -> int: ...

    @property
    def last_time_us(self) -> int:
        """Time of the last frame; 0 when there is none. The engine's clock starts no earlier."""

    @property
    def first_position(self) -> int:
        """The lowest position still stored."""

    def frames(
        self, start: int = 0, kinds: Sequence[Kind] | None = None, end: int | None = None, *, damaged: bool = False
    ) -> Iterator[Frame]:
        """Yield stored frames with ``start <= sequence < end``, in order, of the given kinds; bodies are not copied.

        One that does not check raises Corrupt(DAMAGED) with the place, or comes as what is left of it (``damaged``).
        """

    def frames_at(
        self,
        position: int,
        kinds: Sequence[Kind] | None = None,
        end_position: int | None = None,
        *,
        damaged: bool = False,
    ) -> Iterator[Frame]:
        """As :meth:`frames`, from the frame that holds ``position`` to those that begin below ``end_position``."""

    def read(self, positions: npt.NDArray[np.int64], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the PLAIN and HALF rows at ``positions``, in that order (schema STORED, plus ``stored_us`` int64 at
        the end).

        ``columns`` names those of STORED that are wanted (None: all); the others are not touched.

        Rejected(RANGE_PURGED) if one has left the log, Corrupt(DAMAGED) with the place if one of these rows is damaged
        in these columns. Runs of neighbouring positions come without a copy of the bodies where they lie in one
        frame.
        """

    def salvage(
        self, positions: npt.NDArray[np.int64], columns: Sequence[str] | None = None
    ) -> tuple[pa.RecordBatch, dict[int, RowDamage]]:
        """As :meth:`read`; the rows that are damaged come without content, and are named by their row number."""

    @property
    def is_damaged(self) -> bool:
        """Whether there are :meth:`damages`."""

    def damages(self) -> list[Damage]:
        """Damage that was met in what is still stored, oldest frame first: at the opening, or by who read it since."""

    def find(
        self, column: Literal["message_id", "key"], value: bytes | str, topic: str | None = None, *, end: int
    ) -> Iterator[Match]:
        """Yield the PLAIN and HALF rows with this id (16 bytes) or key, in one topic or in any, newest first, of the
        frames below sequence ``end``, which must be durable. Frames of which nothing can be read come whole, as far as
        their damage was met, now or before.

        It reads what it gives, and besides a number of blocks that grows with the logarithm of the messages.
        """

    def time_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the time_us of the frame that holds each position."""

    def position_at(self, time_us: int) -> int:
        """Return the position of the first row stored at ``time_us`` or later; the one that comes next if there is
        none."""

    def holds(self, position: int, kinds: Sequence[Kind]) -> bool:
        """Return whether a frame of these kinds lies at ``position`` or behind it."""

    def kind_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return the kind of the frame that holds each position."""

    def sequence_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sequence of the frame that holds each position: rows of one frame are read without joining
        parts."""

    def files(self) -> LogFiles:
        """Return the files that a copy of the log consists of."""

    def read_file(self, name: str, start: int, size: int) -> bytes:
        """Return a part of one of :meth:`files`. Rejected(RANGE_PURGED) when retention has taken it,
        Rejected(NOT_FOUND) for any other file."""

    def load_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot that checks; a damaged one is passed over when frames can stand in for it,
        else Corrupt."""


class CommitLog(StoredLog, Protocol):
    """An open log; this opener has fenced the one before. One writer thread."""

    @property
    def bytes_written(self) -> int:
        """Bytes of frames appended by this opener, headers included, snapshots not."""

    def stored_bytes(self) -> int:
        """Return bytes of all segments, without reserved space."""

    def free_bytes(self) -> int:
        """Return bytes that are free on the disk."""

    def reserve(self, size: int) -> None:
        """Reserve room for appends of ``size`` bytes; Overloaded(DISK_FULL) if there is none, nothing changed."""

    def append(self, kind: Kind, content: Content, time_us: int) -> int:
        """Add one frame; the position of its first row. Buffered: it reaches the disk with ``sync`` at the latest."""

    def sync(self) -> None:
        """Write what is buffered in one write, sync once. Corrupt(LOG_FAILED) stops the log."""

    def hand_over(self) -> Callable[[], None]:
        """Take out what is buffered, the first half of :meth:`sync`. Returns a function that writes it in one write and
        syncs once. It must be called, once; it may run on another thread while appends continue. The next hand-over,
        sync, roll of a segment or close waits until it has."""

    def settle(self) -> None:
        """Finish deferred work for frames that are already durable: called when a round
        was answered, on any thread. Corrupt(LOG_FAILED) stops the log."""

    def position_before(self, time_us: int) -> int:
        """Return the position that begins the first segment holding anything newer than ``time_us``: what retention
        may drop lies below."""

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot durably (may run on another thread while appends continue); keeps the last two."""

    def bytes_since_snapshot(self) -> int: ...

    def drop_before(self, position: int) -> int:
        """Drop whole segments that lie below ``position``; how many. The newest snapshot must cover them: it is made
        the *base*, part of the log itself, before anything is removed."""

    def release(self) -> None:
        """End appending. Where others share the log, what was appended is synced, and one of them may
        continue with it at once; the folder is still this opener's, and takes snapshots, until :meth:`close`."""

    def close(self, *, clean: bool = True) -> None:
        """Sync, cut the reserved tail, give the folder back."""


class ReplicatedLog(CommitLog, Protocol):
    """An open log that others follow, and that any of them may take over at any moment: then nothing more is answered
    here."""

    @property
    def fenced(self) -> bool:
        """Return whether another node took the log over. What is sent after that raises Corrupt(LOG_FAILED)."""

    @property
    def ended(self) -> EscrowError | None:
        """Why nothing can be appended any more, whether or not somebody has tried; None while that is not known to be
        so."""

    @property
    def proved_at(self) -> float:
        """By :func:`escrowmq.platform.clock.uptime`, when the last record was sent that is known to be in the log:
        until then this node surely led."""

    def caught_up(self) -> list[Frame]:
        """Return frames that the take-over found behind those that were followed before, this opener's OPENED
        included, in order: for a ledger that was kept warm. They are given once."""

    def confirm(self, timeout: float) -> None:
        """Return when a record sent after this call began is in the log: this node led still. Corrupt(LOG_FAILED) when
        it does not lead any more, Unknown(TIMED_OUT) when that cannot be known within ``timeout`` seconds. From any
        thread."""


class Replica(Protocol):
    """A node of a replicated log, while it does not lead. One thread; ``log`` may be read from any."""

    @property
    def leader(self) -> str | None:
        """The URL of who claimed the log, or showed that it leads, last; None when nobody did."""

    @property
    def leaders_silence(self) -> float:
        """Seconds without a sign of it after which the leader expects to be replaced, as it said when it claimed the
        log; 0: it did not say."""

    @property
    def log(self) -> StoredLog:
        """What was followed. Another one after :meth:`restarted`."""

    def follow(self, timeout: float) -> list[Frame]:
        """Return frames that count and are in ``log`` now, in order; waits for ``timeout`` seconds at most, [] when
        nothing came."""

    def silent_for(self) -> float:
        """Return seconds since anything came from the leader; infinite when it gave the log back, or nobody ever
        led."""

    def is_behind(self) -> bool | None:
        """Return whether there is more in the log than was followed; None when its servers do not answer."""

    def is_whole(self) -> bool:
        """Return whether ``log`` reaches the snapshot that stands for what is not in it any more. One that was begun
        anew does
        so when some frames were followed; before, nothing can be computed from it."""

    def restarted(self) -> bool:
        """Return whether ``log`` was begun anew since this was asked last, because what was to be followed is gone:
        a warm ledger must be folded again."""

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot of this node's own, as a log does; any thread, while it follows."""

    def bytes_since_snapshot(self) -> int: ...

    def take_over(self, version: str, silence: float = 0.0) -> ReplicatedLog:
        """Lead from now on, as the next opener, whom no other replaces by the clock before so many seconds of silence.
        Fenced(FENCED) when another one did so meanwhile, Corrupt(LOG_FAILED) when the log's servers fail; this replica
        is closed then, and can be opened anew."""

    def close(self) -> None:
        """Give the folder back."""
