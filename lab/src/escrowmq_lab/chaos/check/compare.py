"""The check at the end of a chaos run: by id and content, over the databases of all nodes together. Counts decide
nothing.

The business row is the truth: it stands if and only if the local transaction of the mode committed. So what was
confirmed is among the business rows, and those are exactly what has an effect; :mod:`escrowmq_lab.chaos.findings` has
every way in which this can fail.
"""

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
"""One for each id."""


def check(producers: Engines, consumers: Engines, modes: Iterable[type[Mode]]) -> Findings:
    """Compare the books of all producers with those of all consumers, by the names of their nodes.

    Modes that stand in the books and not in ``modes`` are checked, too. Memory: the ids of one mode at a time. Errors
    are SQLAlchemy's.
    """
    findings = Findings()
    told = {mode.name: mode for mode in modes}
    for name in [*told, *(name for name in modes_in(producers, consumers) if name not in told)]:
        books = _Books.of(producers, consumers, name)
        may_repeat, shares = (told[name].repeats, told[name].shares) if name in told else (False, False)
        findings.tallies[name] = books.tally(may_repeat)
        for what, ids in books.broken(producers, may_repeat, shares).items():
            if ids:
                findings.numbers[what, name] += len(ids)
                findings.broken += [Finding(what, name, identity, "") for identity in ids[:KEPT]]
    stories = tell(producers, consumers, {one.subject for one in findings.broken})
    findings.broken = [Finding(one.what, one.mode, one.subject, stories[one.subject]) for one in findings.broken]
    return findings


@dataclass(frozen=True, slots=True)
class _Books:
    """The books of one mode: for each id that stands anywhere how often it stands in each."""

    names: pa.Array
    intended: np.ndarray[Any, Any]
    doomed: Flags
    business: np.ndarray[Any, Any]
    business_us: np.ndarray[Any, Any]
    """When, where there is one."""
    confirmed: np.ndarray[Any, Any]
    effects: np.ndarray[Any, Any]
    effect_us: np.ndarray[Any, Any]
    """The first, where there is one."""
    altered: Flags
    """With an effect whose content is wrong."""
    strayed: Flags
    """With an effect in the database of another consumer than the id names."""

    @classmethod
    def of(cls, producers: Engines, consumers: Engines, mode: str) -> _Books:
        """Read the books of all nodes."""
        read = (read_intended(producers, mode), read_business(producers, mode), read_confirmed(producers, mode))
        columns: tuple[Column, ...] = (*read, read_effects(consumers, mode))
        together = pa.chunked_array([chunk for column in columns for chunk in column.ids.chunks], columns[0].ids.type)
        encoded = together.combine_chunks().dictionary_encode()
        numbers, names = encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary
        ends = np.cumsum([len(column.ids) for column in columns])
        wants, rows, told, done = np.split(numbers, ends[:-1])
        size = len(names)
        doomed, altered, strayed = np.zeros((3, size), bool)
        doomed[wants[columns[0].beside[:, 0] != 0]] = True
        altered[done[columns[3].beside[:, 1] == 0]] = True
        strayed[done[columns[3].beside[:, 2] == 0]] = True
        business_us = np.zeros(size, np.int64)
        business_us[rows] = columns[1].beside[:, 0]
        effect_us = np.full(size, np.iinfo(np.int64).max)
        np.minimum.at(effect_us, done, columns[3].beside[:, 0])
        often = [np.bincount(part, minlength=size) for part in (wants, rows, told, done)]
        return cls(names, often[0], doomed, often[1], business_us, often[2], often[3], effect_us, altered, strayed)

    def tally(self, may_repeat: bool) -> Tally:
        """Return the numbers of the mode."""
        done, rows, told = self.effects > 0, self.business > 0, self.confirmed > 0
        waited = (self.effect_us - self.business_us)[done & rows]
        return Tally(
            intended=int((self.intended > 0).sum()),
            doomed=int(self.doomed.sum()),
            business=int(rows.sum()),
            confirmed=int(told.sum()),
            effects=int(done.sum()),
            recovered=int((done & rows & ~told).sum()),
            repeats=int((self.effects - 1)[done].sum()) if may_repeat else 0,
            waited_us=_quantiles(waited) if len(waited) else None,
        )

    def broken(self, producers: Engines, may_repeat: bool, shares: bool) -> dict[str, list[str]]:
        """Return ids by finding."""
        wants, rows, told, done = (each > 0 for each in (self.intended, self.business, self.confirmed, self.effects))
        nobody = self._named(done & ~wants)
        elsewhere = {row.id for _, row in known(producers, intended, nobody, "id")}
        twice = (self.intended > 1) | (self.business > 1) | (self.confirmed > 1)
        return {
            "lost": self._named(rows & ~done),
            "leaked": self._named(done & wants & (~rows | self.doomed)),
            "unexpected": [identity for identity in nobody if identity not in elsewhere],
            "repeated": [] if may_repeat else self._named(self.effects > 1),
            "altered": self._named(self.altered | self._are(elsewhere)),
            "misplaced": [] if shares else self._named(self.strayed),
            "contradiction": self._named(twice | told & ~rows | (rows | told) & ~wants | rows & self.doomed),
        }

    def _named(self, flags: Flags) -> list[str]:
        names: list[str] = self.names.filter(pa.array(flags)).to_pylist()
        return names

    def _are(self, ids: set[str]) -> Flags:
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
    said: dict[str, list[str]] = field(default_factory=dict)

    def add(self, node: str, text: str) -> None:
        self.said.setdefault(node, []).append(text)

    def __str__(self) -> str:
        return "; ".join(f"{node}: {', '.join(texts)}" for node, texts in self.said.items()) or "stands in no database"


def tell(producers: Engines, consumers: Engines, ids: Iterable[str]) -> dict[str, str]:
    """Render what each database holds of each id, one line each, for people. Times are UTC."""
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
