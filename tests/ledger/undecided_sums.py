"""The complete summary of undecided transactions, made in one go."""

from __future__ import annotations

from typing import Any

from escrowmq.ledger import listings
from escrowmq.ledger.ledger import Ledger


def undecided(
    ledger: Ledger, group: str | None, after: int, limit: int, samples: int, now_us: int
) -> list[dict[str, Any]]:
    found = listings.Waiting(ledger, group, after, limit, samples, now_us)
    while found.look(ledger):
        pass
    return found.to_json()
