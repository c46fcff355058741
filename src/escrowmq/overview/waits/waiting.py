"""Pending work, over all brokers and databases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import Listing
from escrowmq.overview.asking import Asking
from escrowmq.overview.values import Cause, DatabaseStands
from escrowmq.overview.waits.brokers import LAG_SECONDS, find_broker_causes

if TYPE_CHECKING:
    import sqlalchemy as sa


def waiting(bus: Bus, engines: Sequence[sa.Engine] = (), *, lag_seconds: float = LAG_SECONDS) -> Listing[Cause]:
    """Return pending work, grouped by its cause.

    Causes that need an operator come first, among them problems of brokers and databases, then the largest. A consumer
    group lags if its oldest message waits longer than ``lag_seconds``. ``missing`` names the brokers and databases that
    did not answer; their pending work is not included.
    """
    asking = Asking(bus, engines)
    causes = find_causes(asking, asking.now_us(), lag_seconds)
    return Listing(causes, asking.missing)


def find_causes(
    asking: Asking, now_us: int, lag_seconds: float, stands: list[DatabaseStands] | None = None
) -> list[Cause]:
    """Return all causes in order. If ``stands`` is given, append the state of each outbox to it."""
    causes = [*find_broker_causes(asking, now_us, lag_seconds)]
    if asking.engines:  # without databases, SQLAlchemy may be missing
        from escrowmq.overview.waits.databases import find_database_causes

        causes += find_database_causes(asking, stands)
    for one in asking.missing:
        if one["broker"] not in asking.addresses:
            text = f"Database {one['broker']} cannot be read: {one['reason']}."
            causes.append(
                Cause("database", one["broker"], one["reason"], 1, "database", None, True, text, one["broker"])
            )
    return sorted(causes, key=lambda cause: (not cause.needs_person, _FIRST.get(cause.kind, len(_FIRST)), -cause.count))


_FIRST = {"broker": 0, "database": 1, "disk": 2, "damaged": 3}
"""Kinds that may be the cause of all others."""
