"""What the monkey does, drawn from a seed before the run begins: which nodes each round strikes, how, when and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """A strike as it was carried out, for the report: wall times, microseconds since 1970. ``until_us``: the node was whole again."""

    round: int
    node: str
    blow: Blow
    at_us: int
    until_us: int
