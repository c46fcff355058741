"""The faults of a run, drawn from a seed before it begins: which nodes each round hits, how, when and for how long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

from escrowmq_lab.chaos.options import Options

Card = TypeVar("Card")


class Blow(StrEnum):
    """A kind of fault."""

    KILL = "kill"  # SIGKILL, started again afterwards
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    CUT = "cut"  # its connections are closed, and new ones rejected
    SILENCE = "silence"  # its connections stay, and no data passes
    FILL = "fill"  # its disk is full


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of a round. Seconds: ``after`` the begin of the round, for ``down``."""

    node: str
    blow: Blow
    after: float
    down: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round, numbered from 1. Each node is hit at most once."""

    number: int
    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """A fault as it happened, for the report: wall times, microseconds since 1970. ``until_us``: end of the fault."""

    round: int
    node: str
    blow: Blow
    at_us: int
    until_us: int


DECK = (Blow.KILL,) * 6 + (Blow.PAUSE, Blow.CUT, Blow.SILENCE, Blow.FILL) * 2
"""Faults are dealt from this, shuffled, so that each kind occurs early and kills most often."""
TOGETHER = (True,) * 2 + (False,) * 3
"""Rounds are dealt from this. True: all nodes of the round are killed and restarted together, like a power failure."""
EDGE = 0.4
"""Seconds, about the duration of a start."""
LEAST_DOWN = 0.02
"""Minimum duration (s); a node that is back before others notice is a fault too."""


def draw(options: Options) -> tuple[Round, ...]:
    """Draw the rounds of a run; the same options and seed give the same rounds. The number of nodes hit per round is
    dealt from 1 to all, shuffled, repeatedly: the first that many rounds have each count once, and fewer rounds include
    the largest. All faults of a round end within its period, so a node is healthy for at least a moment before the next
    one, which may come while it starts."""
    chance = Random(f"chaos {options.seed}")
    nodes = options.nodes
    counts = _draw_counts(chance, options.rounds, len(nodes))
    together = _draw_power_failures(chance, counts)
    blows = _deal(chance, DECK)
    rounds = []
    for number, (count, at_once) in enumerate(zip(counts, together, strict=True), 1):
        struck = chance.sample(nodes, count)
        if at_once:
            after, down = _draw_times(chance, options)
            strikes = [Strike(node, Blow.KILL, after, down) for node in struck]
        else:
            strikes = [
                Strike(node, _replace_impossible(next(blows), node, options), *_draw_times(chance, options))
                for node in struck
            ]
        rounds.append(Round(number, tuple(sorted(strikes, key=lambda strike: (strike.after, strike.node)))))
    return tuple(rounds)


def _draw_counts(chance: Random, rounds: int, nodes: int) -> list[int]:
    cards = _deal(chance, range(1, nodes + 1))
    counts = [next(cards) for _ in range(rounds)]
    if nodes not in counts:
        counts[chance.randrange(rounds)] = nodes
    return counts


def _draw_power_failures(chance: Random, counts: list[int]) -> list[bool]:
    """Choose which rounds are a power failure; the first of the largest rounds is one."""
    cards = _deal(chance, TOGETHER)
    at_once = [next(cards) for _ in counts]
    largest = counts.index(max(counts))
    if not at_once[largest]:
        if True in at_once:
            at_once[at_once.index(True)] = False
        at_once[largest] = True
    return at_once


def _draw_times(chance: Random, options: Options) -> tuple[float, float]:
    """Draw begin and duration of a fault, often near a round's begin or end, to hit nodes while they start."""
    down = options.down if options.down is not None else chance.uniform(LEAST_DOWN, options.period / 2)
    room = max(options.period - down, 0)
    early = chance.uniform(0, min(EDGE, room))
    return chance.choice((early, room - early, chance.uniform(0, room), chance.uniform(0, room))), down


def _replace_impossible(blow: Blow, node: str, options: Options) -> Blow:
    """Replace a full disk by a kill for a database server, whose disk is not ours."""
    outside = options.database_url is not None and not node.startswith("broker")
    return Blow.KILL if blow is Blow.FILL and outside else blow


def _deal(chance: Random, cards: Sequence[Card]) -> Iterator[Card]:
    while True:
        yield from chance.sample(cards, len(cards))
