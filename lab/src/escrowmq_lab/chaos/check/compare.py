"""The final check of a chaos run: by id and content, over the databases of all nodes. Counts decide nothing. The
business row is the truth: it exists if and only if the local transaction of the mode committed. So every confirmed id
must have a business row, and exactly the business rows must have effects; :mod:`escrowmq_lab.chaos.findings` lists
every way in which this can fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq_lab.chaos.books import body_of, business, confirmed, effects, hash_of, intended
from escrowmq_lab.chaos.check.reading import (
    Column,
    Engines,
    known,
    modes_in,
    read_business,
    read_confirmed,
    read_effects,
    read_intended,
)
from escrowmq_lab.chaos.findings import KEPT, Finding, Findings, Tally
from escrowmq_lab.chaos.modes import Mode

Flags = np.ndarray[Any, np.dtype[np.bool_]]
"""One flag for each id."""


def check(producers: Engines, consumers: Engines, modes: Iterable[type[Mode]]) -> Findings:
    """Compare the books of all producers with those of all consumers, by node name. Modes in the books but not in
    ``modes`` are checked too. Memory: the ids of one mode at a time. Errors are SQLAlchemy's."""
    findings = Findings()
    by_name = {mode.name: mode for mode in modes}
    for name in [*by_name, *(name for name in modes_in(producers, consumers) if name not in by_name)]:
        books = _Books.of(producers, consumers, name)
        may_repeat, shares = (by_name[name].repeats, by_name[name].shares) if name in by_name else (False, False)
        findings.tallies[name] = books.tally(may_repeat)
        for what, ids in books.broken(producers, may_repeat, shares).items():
            if ids:
                findings.numbers[what, name] += len(ids)
                findings.broken += [Finding(what, name, identity, "") for identity in ids[:KEPT]]
    stories = describe_ids(producers, consumers, {one.subject for one in findings.broken})
    findings.broken = [Finding(one.what, one.mode, one.subject, stories[one.subject]) for one in findings.broken]
    return findings


@dataclass(frozen=True, slots=True)
class _Books:
    """The books of one mode: for each id in any book, its number of entries in each."""

    names: pa.Array
    intended: np.ndarray[Any, Any]
    doomed: Flags
    business: np.ndarray[Any, Any]
    business_us: np.ndarray[Any, Any]
    """Time of the business row, if there is one."""
    confirmed: np.ndarray[Any, Any]
    effects: np.ndarray[Any, Any]
    effect_us: np.ndarray[Any, Any]
    """Time of the first effect, if there is one."""
    altered: Flags
    """Whether an effect has wrong content."""
    strayed: Flags
    """Whether an effect is in the database of another consumer than the id names."""

    @classmethod
    def of(cls, producers: Engines, consumers: Engines, mode: str) -> _Books:
        """Read the books of all nodes."""
        read = (read_intended(producers, mode), read_business(producers, mode), read_confirmed(producers, mode))
        columns: tuple[Column, ...] = (*read, read_effects(consumers, mode))
        together = pa.chunked_array([chunk for column in columns for chunk in column.ids.chunks], columns[0].ids.type)
        encoded = together.combine_chunks().dictionary_encode()
        numbers, names = encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary
        ends = np.cumsum([len(column.ids) for column in columns])
        wants, rows, reported, done = np.split(numbers, ends[:-1])
        size = len(names)
        doomed, altered, strayed = np.zeros((3, size), bool)
        doomed[wants[columns[0].beside[:, 0] != 0]] = True
        altered[done[columns[3].beside[:, 1] == 0]] = True
        strayed[done[columns[3].beside[:, 2] == 0]] = True
        business_us = np.zeros(size, np.int64)
        business_us[rows] = columns[1].beside[:, 0]
        effect_us = np.full(size, np.iinfo(np.int64).max)
        np.minimum.at(effect_us, done, columns[3].beside[:, 0])
        counts = [np.bincount(part, minlength=size) for part in (wants, rows, reported, done)]
        return cls(names, counts[0], doomed, counts[1], business_us, counts[2], counts[3], effect_us, altered, strayed)

    def tally(self, may_repeat: bool) -> Tally:
        """Return the numbers of the mode."""
        done, rows, reported = self.effects > 0, self.business > 0, self.confirmed > 0
        waited = (self.effect_us - self.business_us)[done & rows]
        return Tally(
            intended=int((self.intended > 0).sum()),
            doomed=int(self.doomed.sum()),
            business=int(rows.sum()),
            confirmed=int(reported.sum()),
            effects=int(done.sum()),
            recovered=int((done & rows & ~reported).sum()),
            repeats=int((self.effects - 1)[done].sum()) if may_repeat else 0,
            waited_us=_quantiles(waited) if len(waited) else None,
        )

    def broken(self, producers: Engines, may_repeat: bool, shares: bool) -> dict[str, list[str]]:
        """Return ids by finding."""
        wants, rows, reported, done = (
            each > 0 for each in (self.intended, self.business, self.confirmed, self.effects)
        )
        unintended = self._ids_of(done & ~wants)
        elsewhere = {row.id for _, row in known(producers, intended, unintended, "id")}
        twice = (self.intended > 1) | (self.business > 1) | (self.confirmed > 1)
        return {
            "lost": self._ids_of(rows & ~done),
            "leaked": self._ids_of(done & wants & (~rows | self.doomed)),
            "unexpected": [identity for identity in unintended if identity not in elsewhere],
            "repeated": [] if may_repeat else self._ids_of(self.effects > 1),
            "altered": self._ids_of(self.altered | self._is_in(elsewhere)),
            "misplaced": [] if shares else self._ids_of(self.strayed),
            "contradiction": self._ids_of(twice | reported & ~rows | (rows | reported) & ~wants | rows & self.doomed),
        }

    def _ids_of(self, flags: Flags) -> list[str]:
        names: list[str] = self.names.filter(pa.array(flags)).to_pylist()
        return names

    def _is_in(self, ids: set[str]) -> Flags:
        if not ids:
            return np.zeros(len(self.names), bool)
        flags: Flags = pa.compute.is_in(self.names, value_set=pa.array(sorted(ids), self.names.type)).to_numpy(
            zero_copy_only=False
        )
        return flags


def _quantiles(waited: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    half, nearly = np.percentile(waited, [50, 99])
    return int(half), int(nearly), int(waited.max())


@dataclass(slots=True)
class _Story:
    entries: dict[str, list[str]] = field(default_factory=dict)

    def add(self, node: str, text: str) -> None:
        self.entries.setdefault(node, []).append(text)

    def __str__(self) -> str:
        return (
            "; ".join(f"{node}: {', '.join(texts)}" for node, texts in self.entries.items()) or "stands in no database"
        )


def describe_ids(producers: Engines, consumers: Engines, ids: Iterable[str]) -> dict[str, str]:
    """Describe on one line what each database contains about each id. Times are UTC."""
    stories = {identity: _Story() for identity in ids}
    for table, word in ((intended, "intended"), (business, "business"), (confirmed, "confirmed")):
        for node, row in known(producers, table, stories):
            more = " to be rolled back" if table is intended and row.dooms else ""
            stories[row.id].add(node, f"{word}{more} ({row.mode}, {_moment(row.at_us)})")
    for node, row in known(consumers, effects, stories):
        more = "" if bytes(row.hash) == hash_of(body_of(row.id)) else " of another content"
        stories[row.id].add(node, f"effect{more} ({row.mode}, {_moment(row.at_us)})")
    return {identity: str(story) for identity, story in stories.items()}


def _moment(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%H:%M:%S.%f")
