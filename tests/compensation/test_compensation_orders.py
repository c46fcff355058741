"""Prepared, confirmed, key consumed, message consumed, scheduler: every order that can exist, each forced, each with
one effect by id.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from compensation_world import World

EVENTS = ("confirmed", "key consumed", "message consumed", "scheduler")
"""After *prepared*, without which none of them has anything to do. A lost confirm is the order without it."""


def orders() -> list[tuple[str, ...]]:
    """All of them, and all without the confirm. A consumer that looks before the message is visible finds nothing: that
    is an order, too, because it looks again."""
    return [*permutations(EVENTS), *permutations(EVENTS[1:])]


def play(world: World, order: tuple[str, ...], remedy: str) -> None:
    identity = world.prepare()
    world.announce(identity)
    acts = {
        "confirmed": lambda: world.confirm(identity),
        "key consumed": world.consume_keys,
        "message consumed": world.consume_messages,
        "scheduler": lambda: world.schedule(remedy=remedy),
    }
    for event in order:
        acts[event]()
        assert world.effects()[identity] <= 1
    world.drain(remedy=remedy)
    assert (world.faults([identity]), world.open(), world.cases()) == ([], [], {})


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("order", orders(), ids="-".join)
def test_every_order_of_the_five_events_ends_in_one_effect(world: Callable[..., World], order: tuple[str, ...]) -> None:
    play(world(), order, "handle")


@pytest.mark.parametrize("order", [*permutations(EVENTS[1:])], ids="-".join)
def test_every_order_without_the_confirm_where_the_scheduler_only_commits(
    world: Callable[..., World], order: tuple[str, ...]
) -> None:
    play(world(), order, "commit")
