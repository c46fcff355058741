"""All actions by name."""

from __future__ import annotations

from typing import Any

from escrowmq.wire.actions import (
    acts,
    backups,
    brokers,
    dead_letters,
    groups,
    messages,
    producers,
    rights,
    standing,
    topics,
    transactions,
    writers,
)
from escrowmq.wire.actions.action import Action

ACTIONS: dict[str, Action[Any, Any]] = {
    value.name: value
    for module in (
        brokers,
        topics,
        producers,
        groups,
        transactions,
        writers,
        dead_letters,
        messages,
        standing,
        acts,
        backups,
        rights,
    )
    for value in vars(module).values()
    if isinstance(value, Action)
}
"""Every action of the protocol, in the order of the generated page ``docs/reference/protocol.md``."""
