"""The dead letters of one group in one queue, as many as there may be.

They stand in blocks of some hundred rows by rising offset, so that one more, or some less, costs a block and not the
whole. A block never changes: a change makes another one in its place. Whoever has the list of blocks may read it on any
thread, while the ledger continues.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Int32s, Int64s, locate

MOST_TEXT = 200  # maximum length of a kind, in characters

_ATTEMPT = re.compile(r",? attempt \d+ of \d+\s*$")
_TRACEBACK = "Traceback (most recent call last)"
_HEX = r"[0-9a-fA-F]"
_IDS = re.compile(
    rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"  # a UUID
    rf"|\b(?={_HEX}*[0-9]){_HEX}{{8,}}\b"
    r"|\b(?=\w*\d)\w{16,}\b"
    r"|\d+"
)
_JOINED = re.compile(r"#(?:[.,:/-]#)+")


@lru_cache(4096)
def cause_and_kind(text: str) -> tuple[str, str]:
    """Return the cause ``text`` and its kind, by which dead letters are grouped. Equal kinds are always one object, so
    that their addresses can be compared."""
    return text, sys.intern(kind_of(text))


def kind_of(cause: str) -> str:
    """Return the kind of a cause: its first line (of a traceback the last one) without the attempt, with ``#`` for
    numbers and ids, at most :data:`MOST_TEXT` characters. The kind of a kind is itself."""
    lines = [line for line in cause.splitlines() if line.strip()] or [""]
    line = lines[-1 if lines[0].startswith(_TRACEBACK) else 0]
    masked = _JOINED.sub("#", _IDS.sub("#", _ATTEMPT.sub("", line)))
    return " ".join(masked.split())[:MOST_TEXT].strip()


NOT_DEAD = -1  # the time of death and number of attempts of an offset without a dead letter

BLOCK = 1024  # rows of a new block; it is split when it has more than twice as many

Texts = npt.NDArray[np.object_]

FEW_KINDS = 32  # kinds of causes up to which a block's counts are cached; more would take as much memory as the block


@dataclass(frozen=True, slots=True)
class Kinds:
    """The number of rows with each kind of cause: arrays of one length."""

    texts: Texts
    counts: Int64s
    oldest_us: Int64s
    newest_us: Int64s

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class Block:
    """Some dead letters of one queue by rising offset: arrays of one length, at least one row."""

    offsets: Int64s
    attempts: Int32s
    dead_us: Int64s
    causes: Texts
    kinds: Texts  # of the causes. Equal kinds are one object, equal causes mostly are.
    _counted: Kinds | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays, in the order of the fields."""
        return self.offsets, self.attempts, self.dead_us, self.causes, self.kinds

    def rows(self, chosen: Any) -> Block:
        """Return a block of some of its rows; ``chosen``: a mask, indexes or a slice."""
        return Block(*(column[chosen] for column in self.columns))

    def counted(self) -> Kinds:
        """Return the number, the oldest and newest death by kind of cause. Cached if there are few kinds."""
        if self._counted is not None:
            return self._counted
        ids, firsts, of_row = np.unique(addresses(self.kinds), return_index=True, return_inverse=True)
        oldest_us, newest_us = self.dead_us[firsts], self.dead_us[firsts]
        np.minimum.at(oldest_us, of_row, self.dead_us)
        np.maximum.at(newest_us, of_row, self.dead_us)
        found = Kinds(self.kinds[firsts], np.bincount(of_row), oldest_us, newest_us)
        if len(ids) <= FEW_KINDS:
            object.__setattr__(self, "_counted", found)  # two threads that do so set the same
        return found

    def part(self, start: int, end: int) -> Block:
        """Return copies of rows ``start`` .. ``end``-1, so that the rest can be freed."""
        return Block(*(column[start:end].copy() for column in self.columns))


def addresses(kinds: Texts) -> Int64s:
    """Return the memory address of each kind: equal for equal kinds, as long as they are held."""
    return np.fromiter(map(id, kinds), np.int64, len(kinds))


def block_of(offsets: Int64s, attempts: int, dead_us: int, cause: str) -> Block:
    """Build the block of messages that died together: at one time, after the same attempts, of one cause."""
    size = len(offsets)
    texts, kinds = np.empty(size, object), np.empty(size, object)
    texts[:], kinds[:] = cause_and_kind(cause)
    return Block(offsets, np.full(size, attempts, np.int32), np.full(size, dead_us, np.int64), texts, kinds)


class DeadLetters:
    """Distinct offsets in rising order, with the facts of their deaths."""

    __slots__ = ("_count", "_last_us", "_lasts", "blocks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []  # copy the list, or read it on the ledger's thread
        self._lasts: Int64s = np.empty(0, np.int64)  # the last offset of each block
        self._count = 0
        self._last_us: int | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def offsets(self) -> Int64s:
        """The offsets of all dead letters, rising."""
        return self["offsets"]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one field of :class:`Block` for all dead letters, as one array by rising offset."""
        return np.concatenate([getattr(block, name) for block in self.blocks] or [np.empty(0, np.int64)])

    def bury(self, parts: Sequence[Block]) -> None:
        """Add dead letters; ``parts`` may be in any order, but no offset may come twice or be here already."""
        if not parts:
            return
        fresh = _join(parts)
        fresh = fresh.rows(np.argsort(fresh.offsets, kind="stable"))
        self._count += len(fresh)
        if not self.blocks:
            self._replace(0, 0, [fresh])
            return
        places = np.minimum(np.searchsorted(self._lasts, fresh.offsets), len(self.blocks) - 1)
        for place, start, end in reversed(_by_block(places)):
            block = self.blocks[place]
            merged = _join([block, fresh.rows(slice(start, end))])
            if fresh.offsets[start] < block.offsets[-1]:
                merged = merged.rows(np.argsort(merged.offsets, kind="stable"))
            self._replace(place, place + 1, [merged])

    def remove(self, offsets: Int64s) -> None:
        """Remove the dead letters at ``offsets``: rising, each of them present."""
        for place, start, end in reversed(_by_block(np.searchsorted(self._lasts, offsets))):
            block = self.blocks[place]
            keep = np.ones(len(block), bool)
            keep[np.searchsorted(block.offsets, offsets[start:end])] = False
            left = [block.rows(keep)] if end - start < len(block) else []
            first = place
            if left and place and len(left[0]) + len(self.blocks[place - 1]) <= BLOCK:
                first, left = place - 1, [_join([self.blocks[place - 1], left[0]])]
            self._replace(first, place + 1, left)
        self._count -= len(offsets)

    def remove_range(self, start: int, end: int) -> None:
        """Remove the dead letters at offsets from ``start`` to before ``end``."""
        first, last = (int(place) for place in np.searchsorted(self._lasts, (start, end)))
        touched = self.blocks[first : last + 1]
        left = [block.rows((block.offsets < start) | (block.offsets >= end)) for block in touched]
        self._count -= sum(map(len, touched)) - sum(map(len, left))
        self._replace(first, last + 1, [block for block in left if len(block)])

    def _replace(self, first: int, last: int, blocks: Sequence[Block]) -> None:
        pieces: list[Block] = []
        for block in blocks:
            large = len(block) > 2 * BLOCK
            pieces += [block.part(at, at + BLOCK) for at in range(0, len(block), BLOCK)] if large else [block]
        self._last_us = None
        self.blocks[first:last] = pieces
        ends = np.array([piece.offsets[-1] for piece in pieces], np.int64)
        if len(pieces) == last - first:
            self._lasts[first:last] = ends
        else:
            self._lasts = np.concatenate([self._lasts[:first], ends, self._lasts[last:]])

    def deaths(self, offsets: Int64s) -> tuple[Int64s, Int64s]:
        """Return the time of death (µs) and the attempts for each offset; both :data:`NOT_DEAD` if not dead."""
        died_us, attempts = np.full((2, len(offsets)), NOT_DEAD, np.int64)
        places = np.searchsorted(self._lasts, offsets)
        for place in np.unique(places[places < len(self.blocks)]).tolist():
            block, rows = self.blocks[place], np.flatnonzero(places == place)
            at = locate(block.offsets, offsets[rows])
            here = at >= 0
            died_us[rows[here]], attempts[rows[here]] = block.dead_us[at[here]], block.attempts[at[here]]
        return died_us, attempts

    def among(self, offsets: Int64s) -> Block | None:
        """Return the dead letters at some of rising ``offsets`` as a block; None if there are none."""
        found = []
        for place, start, end in _by_block(np.searchsorted(self._lasts, offsets)):
            if place < len(self.blocks):
                at = locate(self.blocks[place].offsets, offsets[start:end])
                found.append(self.blocks[place].rows(at[at >= 0]))
        return _join(found) if any(map(len, found)) else None

    def letter(self, offset: int) -> tuple[int, int, str] | None:
        """Return when the message at ``offset`` died, its attempts, and the cause; None: it is no dead letter."""
        found = self.among(np.array([offset], np.int64))
        return None if found is None else (int(found.dead_us[0]), int(found.attempts[0]), found.causes[0])

    @property
    def last_us(self) -> int:
        """The latest time of death (µs) of the dead letters that are still here; :data:`NOT_DEAD` if none are."""
        if self._last_us is None:
            self._last_us = max((int(block.dead_us.max()) for block in self.blocks), default=NOT_DEAD)
        return self._last_us

    def load(self, offsets: Int64s, attempts: Int32s, dead_us: Int64s, causes: pa.Array) -> None:
        """Restore the columns of a snapshot into this new object; ``causes`` as a dictionary or as texts."""
        if not len(offsets):
            return
        column = causes if pa.types.is_dictionary(causes.type) else causes.dictionary_encode()
        used, index = np.unique(column.indices.to_numpy(zero_copy_only=False), return_inverse=True)
        known = [cause_and_kind(text) for text in column.dictionary.take(pa.array(used)).to_pylist()]
        texts, kinds = (np.array([pair[side] for pair in known], object)[index] for side in (0, 1))
        self._count = len(offsets)
        whole = Block(offsets, attempts.astype(np.int32, copy=False), dead_us, texts, kinds)
        self._replace(0, 0, [whole])


def _by_block(places: Int64s) -> list[tuple[int, int, int]]:
    """Return (block number, first row, end row) for each block; ``places`` has the rising block number of each row."""
    touched, starts = np.unique(places, return_index=True)
    return list(zip(touched.tolist(), starts.tolist(), [*starts[1:].tolist(), len(places)], strict=False))


def _join(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return Block(*(np.concatenate(columns) for columns in zip(*(block.columns for block in blocks), strict=True)))


class Edit(NamedTuple):
    """The log position of an edit, and its message id."""

    position: int
    message_id: bytes


class Edited:
    """The offsets of a queue at which one group gets another content, which an operator wrote in place of a dead
    letter's.

    The message in the topic never changes, and other groups get it. The edit stands further behind in the log; it
    leaves with its offset, as the log is dropped from its beginning.
    """

    __slots__ = ("_edits", "_offsets", "_positions")

    def __init__(self) -> None:
        self._edits: dict[int, Edit] = {}
        self._offsets: Int64s = np.empty(0, np.int64)
        self._positions: Int64s = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._edits)

    def put(self, offset: int, edit: Edit) -> None:
        """Set the message that the group gets at ``offset``."""
        self._edits[offset] = edit
        self._arrange()

    def get(self, offset: int) -> Edit | None:
        """Return the edit at ``offset``, or None."""
        return self._edits.get(offset)

    def find(self, message_id: bytes) -> int | None:
        """Return the offset of the edit with this message id; None if there is none."""
        return next((offset for offset, edit in self._edits.items() if edit.message_id == message_id), None)

    def instead(self, offsets: Int64s, positions: Int64s) -> Int64s:
        """Return the log positions of what the group gets at ``offsets``: of the edit where there is one, else of the
        topic's message, which ``positions`` has."""
        if not self._edits:
            return positions
        at = locate(self._offsets, offsets)
        return np.where(at >= 0, self._positions[at], positions)

    def trim(self, head: int) -> None:
        """Remove offsets below ``head``."""
        if self._edits and self._offsets[0] < head:
            self._edits = {offset: edit for offset, edit in self._edits.items() if offset >= head}
            self._arrange()

    def rows(self) -> list[tuple[int, int, bytes]]:
        """Return offset, position and message id of each, by offset."""
        return [(offset, *self._edits[offset]) for offset in self._offsets.tolist()]

    def _arrange(self) -> None:
        self._offsets = np.array(sorted(self._edits), np.int64)
        self._positions = np.array([self._edits[offset].position for offset in self._offsets.tolist()], np.int64)
