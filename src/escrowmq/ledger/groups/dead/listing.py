"""Dead letters of one group as they are listed, filtered, and summed up by the kind of their causes. All of it is read from blocks, which never
change, so it may be done on any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s
from escrowmq.ledger.groups.dead.causes import kind_of
from escrowmq.ledger.groups.dead.letters import Block, Texts

Parts = Mapping[int, Sequence[Block]]
"""The dead letters of a group by queue id."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters: of this kind of cause (or with a cause of this kind), died before this time."""

    cause: str | None = None
    before_us: int | None = None

    def mask(self, block: Block) -> Bools | None:
        """Which rows of a block; None: all."""
        mask = None if self.before_us is None else block.dead_us < self.before_us
        if self.cause is not None:
            same = np.asarray(block.kinds == kind_of(self.cause), bool)
            mask = same if mask is None else mask & same
        return mask


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
    """The first ``limit`` of those ``wanted``, by queue id and offset, that come after the pair ``after``."""
    found: list[tuple[int, Block]] = []
    size = 0
    for queue_id, block in _from(parts, after):
        if (mask := wanted.mask(block)) is not None:
            block = block.rows(mask)
        if len(block) > limit - size:
            block = block.rows(slice(0, limit - size))
        found.append((queue_id, block))
        size += len(block)
        if size == limit:
            break
    columns = zip(*(block.columns[:4] for _, block in found), strict=True) if found else ((_NONE,),) * 4
    queue_ids = np.repeat(np.array([queue_id for queue_id, _ in found], np.int64), [len(block) for _, block in found])
    return Letters(queue_ids, *(np.concatenate(column) for column in columns))


def _from(parts: Parts, after: Sequence[int] | None) -> Iterator[tuple[int, Block]]:
    last_id, last_offset = after if after is not None else (-1, -1)
    for queue_id in sorted(id for id in parts if id >= last_id):
        for block in parts[queue_id]:
            if queue_id == last_id and block.offsets[0] <= last_offset:
                if block.offsets[-1] > last_offset:
                    yield queue_id, block.rows(block.offsets > last_offset)
                continue
            yield queue_id, block


def died_between(parts: Parts, first_us: int, before_us: int) -> tuple[Int64s, Int64s]:
    """Queue ids and offsets of what died from ``first_us`` to before ``before_us``, in the order in which it died."""
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
    """Of some: queue id, offset, time of death, attempts, and the whole cause."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The causes of a group's dead letters, the most frequent first, and all that are left out of them as one."""

    count: int
    causes: list[Cause]
    others: Cause | None
    kinds: int
    """How many kinds there are, those left out included."""


def summary(parts: Parts, most: int, samples: int) -> Summary:
    """The ``most`` frequent kinds of causes, with some ``samples`` of each."""
    causes: dict[str, Cause] = {}
    for queue_id, blocks in sorted(parts.items()):
        for block in blocks:
            _add(causes, queue_id, block, samples)
    ordered = sorted(causes.values(), key=lambda cause: (-cause.count, cause.kind))
    left = ordered[most:]
    others = None
    if left:
        others = Cause(
            "", sum(one.count for one in left), min(one.oldest_us for one in left), max(one.newest_us for one in left)
        )
    return Summary(sum(one.count for one in ordered), ordered[:most], others, len(ordered))


def _add(causes: dict[str, Cause], queue_id: int, block: Block, samples: int) -> None:
    numbers: dict[str, int] = {}
    of_row = np.fromiter((numbers.setdefault(kind, len(numbers)) for kind in block.kinds), np.int64, len(block))
    order = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[order], np.arange(len(numbers)))
    times = block.dead_us[order]
    counts = np.bincount(of_row).tolist()
    oldest, newest = np.minimum.reduceat(times, starts).tolist(), np.maximum.reduceat(times, starts).tolist()
    for kind, number in numbers.items():
        cause = causes.get(kind)
        if cause is None:
            cause = causes[kind] = Cause(kind, 0, oldest[number], newest[number])
        cause.count += counts[number]
        cause.oldest_us, cause.newest_us = min(cause.oldest_us, oldest[number]), max(cause.newest_us, newest[number])
        start = int(starts[number])
        for row in order[start : start + min(samples - len(cause.samples), counts[number])].tolist():
            cause.samples.append(
                (
                    queue_id,
                    int(block.offsets[row]),
                    int(block.dead_us[row]),
                    int(block.attempts[row]),
                    block.causes[row],
                )
            )


_NONE: Int64s = np.empty(0, np.int64)
