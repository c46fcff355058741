"""What must hold at the end of a run: every order that is in the shop's database has its effect exactly once, and no
other one any.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from compensated_tables import cleared, orders


@dataclass(frozen=True)
class Effect:
    """One row of the cart's effects."""

    order: str
    customer: str
    made_by: str


def wrong(placed: Mapping[str, str], effects: Iterable[Effect]) -> list[str]:
    """What is wrong, by id, a sentence each. ``placed``: the customer of each order."""
    seen = list(effects)
    times = Counter(effect.order for effect in seen)
    problems = [f"order {order} is placed and has no effect" for order in placed if order not in times]
    problems += [f"order {order} has its effect {count} times" for order, count in times.items() if count > 1]
    problems += [f"order {order} was never placed and has an effect" for order in times if order not in placed]
    problems += [
        f"order {effect.order} of {placed[effect.order]} has the effect of {effect.customer}"
        for effect in seen
        if placed.get(effect.order, effect.customer) != effect.customer
    ]
    return sorted(problems)


def read(shop: sa.Engine, cart: sa.Engine) -> tuple[dict[str, str], list[Effect]]:
    """The orders that are placed, and the effects."""
    with shop.connect() as connection:
        placed = {row.id: row.customer for row in connection.execute(sa.select(orders))}
    with cart.connect() as connection:
        effects = [Effect(row.order_id, row.customer, row.made_by) for row in connection.execute(sa.select(cleared))]
    return placed, effects
