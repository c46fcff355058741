"""The actions of :mod:`escrowmq.wire.actions`, one function each, over one engine; a file a subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from escrowmq.broker.actions import (  # noqa: F401 (each registers its functions)
    acts,
    backups,
    brokers,
    dead_letters,
    editing,
    groups,
    messages,
    producers,
    rights,
    standing,
    topics,
    transactions,
    writers,
)
from escrowmq.broker.actions.answering import HANDLERS, LONGEST_WAIT_MS
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.requests import checked
from escrowmq.errors import Code, error
from escrowmq.settings import nearest
from escrowmq.wire import Json
from escrowmq.wire.actions.table import ACTIONS

__all__ = ["HANDLERS", "LONGEST_WAIT_MS", "act"]


def act(engine: Readable, name: str, request: Mapping[str, Any]) -> Json:
    """Run the action ``name`` on an engine: validate its request, and return its answer. Raises Rejected(BAD_REQUEST)
    for an unknown action, or a request not of its type."""
    handler = HANDLERS.get(name)
    if handler is None:
        raise error(Code.BAD_REQUEST, f"no action {name!r:.100}", nearest(name[:100], list(HANDLERS)))
    answer: Json = handler(engine, checked(ACTIONS[name].request, request))
    return answer
