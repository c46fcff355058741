"""Dead letters of one group: pages, filters, and summaries by the kind of their causes. All of it is read from blocks,
which never change, so it may be done on any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s
from escrowmq.ledger.groups.dead.letters import Block, Texts, addresses, cause_and_kind

Parts = Mapping[int, Sequence[Block]]  # the dead letters of a group by queue id


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter of dead letters: by the kind of their cause (or a cause of this kind), and died before a time."""

    cause: str | None = None
    before_us: int | None = None

    def none_of(self, block: Block) -> bool:
        """Return True if the filter surely selects no row of a block: a cheap check. False: it may select some."""
        return self.cause is not None and not (block.counted().texts == self._kind).any()

    def mask(self, block: Block) -> Bools | None:
        """Return which rows of a block the filter selects; None: all."""
        mask = None if self.before_us is None else block.dead_us < self.before_us
        if self.cause is not None:
            same = np.asarray(block.kinds == self._kind, bool)
            mask = same if mask is None else mask & same
        return mask

    @property
    def _kind(self) -> str:
        return cause_and_kind(self.cause or "")[1]


EVERY = Wanted()


@dataclass(frozen=True, slots=True)
class Letters:
    """Some dead letters, by queue id and offset: arrays of one length."""

    queue_ids: Int64s
    offsets: Int64s
    attempts: Int32s
    dead_us: Int64s
    causes: Texts

    def __len__(self) -> int:
        return len(self.offsets)


def page(parts: Parts, limit: int, after: Sequence[int] | None = None, wanted: Wanted = EVERY) -> Letters:
    """Return the first ``limit`` dead letters that the filter ``wanted`` selects, in order of queue id and offset, from
    behind the pair ``after``."""
    found: list[tuple[int, Block]] = []
    size = 0
    for queue_id, block in _from(parts, after):
        if wanted.none_of(block):
            continue
        mask = wanted.mask(block)
        block = (block if mask is None else block.rows(mask)).rows(slice(0, limit - size))
        found.append((queue_id, block))
        size += len(block)
        if size == limit:
            break
    return joined(found)


def joined(found: Sequence[tuple[int, Block]]) -> Letters:
    """Return all rows of these blocks, each with the queue id of its block, in this order."""
    columns = zip(*(block.columns[:4] for _, block in found), strict=True) if found else ((_NONE,),) * 4
    queue_ids = np.repeat(np.array([queue_id for queue_id, _ in found], np.int64), [len(block) for _, block in found])
    return Letters(queue_ids, *(np.concatenate(column) for column in columns))


def _from(parts: Parts, after: Sequence[int] | None) -> Iterator[tuple[int, Block]]:
    last_id, last_offset = after if after is not None else (-1, -1)
    for queue_id in sorted(id for id in parts if id >= last_id):
        for block in parts[queue_id]:
            if queue_id > last_id or block.offsets[0] > last_offset:
                yield queue_id, block
            elif block.offsets[-1] > last_offset:
                yield queue_id, block.rows(block.offsets > last_offset)


def died_between(parts: Parts, first_us: int, before_us: int) -> tuple[Int64s, Int64s]:
    """Return queue ids and offsets of what died from ``first_us`` to before ``before_us``, in the order of death."""
    found: list[tuple[Int64s, Int64s, Int64s]] = [(_NONE, _NONE, _NONE)]
    for queue_id, blocks in parts.items():
        for block in blocks:
            mask = (block.dead_us >= first_us) & (block.dead_us < before_us)
            if mask.any():
                offsets = block.offsets[mask]
                found.append((block.dead_us[mask], np.full(len(offsets), queue_id), offsets))
    times, queue_ids, offsets = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((offsets, queue_ids, times))
    return queue_ids[order], offsets[order]


@dataclass(slots=True)
class Cause:
    """Dead letters whose causes are of one kind."""

    kind: str
    count: int = 0
    oldest_us: int = 0
    newest_us: int = 0
    samples: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    """Queue id, offset, time of death, attempts, and the whole cause."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The most frequent causes of a group's dead letters, and all others as one."""

    count: int
    causes: list[Cause]
    others: Cause | None
    kinds: int  # the number of kinds, others included


def summary(parts: Parts, most: int, samples: int) -> Summary:
    """Return the ``most`` frequent kinds of causes with up to ``samples`` dead letters each, and the others as one."""
    blocks = [(queue_id, block) for queue_id, blocks in sorted(parts.items()) for block in blocks]
    if not blocks:
        return Summary(0, [], None, 0)
    found = [block.counted() for _, block in blocks]
    of_block = np.repeat(np.arange(len(blocks)), [len(kinds) for kinds in found])
    texts = np.concatenate([kinds.texts for kinds in found])
    _, firsts, kind_of_row = np.unique(addresses(texts), return_index=True, return_inverse=True)
    texts, size = texts[firsts], len(firsts)
    counts, oldest_us, newest_us = np.zeros(size, np.int64), np.full(size, _LATEST), np.zeros(size, np.int64)
    np.add.at(counts, kind_of_row, np.concatenate([kinds.counts for kinds in found]))
    np.minimum.at(oldest_us, kind_of_row, np.concatenate([kinds.oldest_us for kinds in found]))
    np.maximum.at(newest_us, kind_of_row, np.concatenate([kinds.newest_us for kinds in found]))
    chosen = _most_frequent(counts, texts, most)
    causes = []
    for number in chosen:
        cause = Cause(texts[number], int(counts[number]), int(oldest_us[number]), int(newest_us[number]))
        for at in of_block[kind_of_row == number].tolist():
            if len(cause.samples) < samples:
                queue_id, block = blocks[at]
                cause.samples += _samples(queue_id, block, cause.kind, samples - len(cause.samples))
        causes.append(cause)
    left = np.delete(np.arange(size), chosen)
    others = None
    if len(left):
        others = Cause("", int(counts[left].sum()), int(oldest_us[left].min()), int(newest_us[left].max()))
    return Summary(int(counts.sum()), causes, others, size)


def _most_frequent(counts: Int64s, texts: Texts, most: int) -> list[int]:
    """Return the indexes of the kinds with the highest counts, highest first; equal counts by their text."""
    rows = np.arange(len(counts))
    if 0 < most < len(counts):
        rows = np.flatnonzero(counts >= np.partition(counts, -most)[-most])
    return heapq.nsmallest(most, rows.tolist(), key=lambda row: (-counts[row], texts[row]))


def _samples(queue_id: int, block: Block, kind: str, most: int) -> list[tuple[int, int, int, int, str]]:
    rows = np.flatnonzero(block.kinds == kind)[:most]
    columns = (block.offsets[rows], block.dead_us[rows], block.attempts[rows], block.causes[rows])
    return [(queue_id, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]


_LATEST = np.iinfo(np.int64).max
_NONE: Int64s = np.empty(0, np.int64)
