"""What the monkey does, drawn from a seed before the run begins: which nodes each round strikes, how, when and for how
long.
"""

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
    CUT = "cut"  # its connections are closed, and new ones refused
    SILENCE = "silence"  # its connections stay, and nothing passes
    FILL = "fill"  # its disk is full


@dataclass(frozen=True, slots=True)
class Strike:
    """One node of one round. Seconds: ``after`` the begin of the round, for ``down``."""

    node: str
    blow: Blow
    after: float
    down: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round; its number counts from 1. Each node is struck at most once."""

    number: int
    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """A strike as it was carried out, for the report: wall times, microseconds since 1970. ``until_us``: the node was
    whole again."""

    round: int
    node: str
    blow: Blow
    at_us: int
    until_us: int


DECK = (Blow.KILL,) * 6 + (Blow.PAUSE, Blow.CUT, Blow.SILENCE, Blow.FILL) * 2
"""Blows are dealt from this, shuffled, so that each kind comes early and kills most often."""
TOGETHER = (True,) * 2 + (False,) * 3
"""Rounds are dealt from this: those in which all that are struck are killed at one moment, and come back at one: a
power failure.
"""
EDGE = 0.4
"""Seconds, about as long as a start takes."""
LEAST_DOWN = 0.02
"""Seconds; a node that is back before anybody noticed is a blow, too."""


def draw(options: Options) -> tuple[Round, ...]:
    """Return the rounds of a run; the same options and seed give the same.

    How many nodes a round strikes is dealt from 1 to all of them, shuffled, again and again: within the first that
    many rounds each count is
    there once, and among fewer rounds the largest is. All strikes of a round end within its period, so a node is whole
    for a moment, at least,
    before the next one, which may come while it starts.
    """
    chance = Random(f"chaos {options.seed}")
    nodes = options.nodes
    counts = _counts(chance, options.rounds, len(nodes))
    together = _together(chance, counts)
    blows = _dealt(chance, DECK)
    rounds = []
    for number, (count, at_once) in enumerate(zip(counts, together, strict=True), 1):
        struck = chance.sample(nodes, count)
        if at_once:
            after, down = _times(chance, options)
            strikes = [Strike(node, Blow.KILL, after, down) for node in struck]
        else:
            strikes = [Strike(node, _possible(next(blows), node, options), *_times(chance, options)) for node in struck]
        rounds.append(Round(number, tuple(sorted(strikes, key=lambda strike: (strike.after, strike.node)))))
    return tuple(rounds)


def _counts(chance: Random, rounds: int, nodes: int) -> list[int]:
    dealt = _dealt(chance, range(1, nodes + 1))
    counts = [next(dealt) for _ in range(rounds)]
    if nodes not in counts:
        counts[chance.randrange(rounds)] = nodes
    return counts


def _together(chance: Random, counts: list[int]) -> list[bool]:
    """Return which rounds are a power failure; of those that strike most, the first is."""
    dealt = _dealt(chance, TOGETHER)
    at_once = [next(dealt) for _ in counts]
    largest = counts.index(max(counts))
    if not at_once[largest]:
        if True in at_once:
            at_once[at_once.index(True)] = False
        at_once[largest] = True
    return at_once


def _times(chance: Random, options: Options) -> tuple[float, float]:
    """Return when in the round, and for how long. Often close to its begin, or so that it is over close to its end:
    then a
    node is struck while it starts."""
    down = options.down if options.down is not None else chance.uniform(LEAST_DOWN, options.period / 2)
    room = max(options.period - down, 0)
    early = chance.uniform(0, min(EDGE, room))
    return chance.choice((early, room - early, chance.uniform(0, room), chance.uniform(0, room))), down


def _possible(blow: Blow, node: str, options: Options) -> Blow:
    """Return the disk of a database server is not ours to fill."""
    outside = options.database_url is not None and not node.startswith("broker")
    return Blow.KILL if blow is Blow.FILL and outside else blow


def _dealt(chance: Random, cards: Sequence[Card]) -> Iterator[Card]:
    while True:
        yield from chance.sample(cards, len(cards))
