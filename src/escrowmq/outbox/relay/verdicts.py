"""Decides from a target's answer what happens to each row. Pure: no clock, no database.

1. OK is OK, whatever its neighbours got: the message is durable and must not be sent again and again.
2. A refusal counts. The row is RETRYING until its tries run out, then WAITING. It holds the later rows of its key.
3. Away, overloaded, unknown, denied: nothing is counted. If the target answers nothing else, the rows stay as they are
   and the target is paused. If other rows got through, or would have (one broker of several is away), these step aside
   (RETRYING, uncounted), so that they do not fill every batch.
4. A row behind one of 2 or 3 of its key was not tried: HELD, if that one holds its key; else it stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from escrowmq.errors import Code
from escrowmq.outbox.tables import State
from escrowmq.outbox.targets.seam import REFUSED, Codes

Key = tuple[int, str]
"""Lane and key."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A row that is put aside: its new state, its counted refusals, when it is due, why."""

    seq: int
    lane: int
    state: State
    attempts: int
    due_us: int
    error: str


@dataclass(slots=True)
class Verdict:
    """The changes to write. Rows are named by their place in the batch (``sent``) or their ``seq``."""

    sent: list[int] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)
    behind: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers and lanes of PENDING rows that are now HELD."""
    heads: dict[Key, int] = field(default_factory=dict)
    """The row that holds each newly held key."""
    freed: list[Key] = field(default_factory=list)
    """Keys whose head got through: HELD rows are PENDING again."""
    refused: int = 0
    away: Code | None = None
    """Why the target accepted nothing, in that case."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits and intervals; see :class:`~escrowmq.outbox.relay.options.RelayOptions`."""

    redeliveries: int
    interval_us: int
    aside_us: int
    waiting_holds: bool


def judge(
    rows: Sequence[Any], codes: Codes, held: dict[Key, int], rules: Rules, now_us: int, *, partly_there: bool = False
) -> Verdict:
    """Return what becomes of ``rows`` (of the shape of ``reading.Row``) that a target answered with ``codes``.

    ``held``: the number (``seq``) of the row that holds each held key. New due times are ``now_us`` plus an interval of
    ``rules``. ``partly_there``: part of the target is known to work, though none of these rows was for it.
    """
    if not codes.any():
        freed = [(row.lane, row.key) for row in rows if held.get((row.lane, row.key)) == row.seq] if held else []
        return Verdict(sent=list(range(len(rows))), freed=freed)
    refused = REFUSED[codes]
    if not partly_there and not refused.any() and codes.all():
        return Verdict(away=Code(int(codes[0])))
    return _judge_mixed(rows, codes.tolist(), refused.tolist(), held, rules, now_us)


def _judge_mixed(
    rows: Sequence[Any], codes: list[int], refused: list[bool], held: dict[Key, int], rules: Rules, now_us: int
) -> Verdict:
    verdict = Verdict()
    stuck: dict[Key, bool] = {}  # keys with a failed row in this batch, and whether that one holds them
    for place, (row, code, counts) in enumerate(zip(rows, codes, refused, strict=True)):
        key = None if row.key is None else (row.lane, row.key)
        if code == Code.OK:
            verdict.sent.append(place)
            if key is not None and held.get(key) == row.seq:
                verdict.freed.append(key)
            continue
        if key is not None and key in stuck:
            if stuck[key] and row.state == State.PENDING:
                verdict.behind.append((row.seq, row.lane))
            continue
        aside = _aside(row, Code(code), counts, rules, now_us)
        verdict.aside.append(aside)
        verdict.refused += counts
        if key is not None:
            stuck[key] = holds = aside.state is State.RETRYING or rules.waiting_holds
            if holds:
                verdict.heads[key] = row.seq
            elif held.get(key) == row.seq:
                verdict.freed.append(key)
    return verdict


def _aside(row: Any, code: Code, counts: bool, rules: Rules, now_us: int) -> Aside:
    text = f"{code.name}: {code.sentence}" + (f" ({code.hint})" if code.hint else "")
    attempts = row.attempts + counts
    if attempts > rules.redeliveries and counts:
        return Aside(row.seq, row.lane, State.WAITING, attempts, 0, text)
    due_us = now_us + (rules.interval_us if counts else rules.aside_us)
    return Aside(row.seq, row.lane, State.RETRYING, attempts, due_us, text)
