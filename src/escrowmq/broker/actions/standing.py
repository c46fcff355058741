"""Actions about the state of topics, groups and single messages."""

from __future__ import annotations

from typing import Any, cast

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.reads.places import message_standing
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.standing import standing
from escrowmq.wire.actions import standing as actions
from escrowmq.wire.actions.action import Nothing

_WHOLE = frozenset({"lag_seconds", "oldest_seconds"})
_FLAGS = frozenset({"paused", "limited"})


@answers(actions.ALL)
def _all(engine: Readable, _: Nothing) -> actions.Standings:
    found = standing(engine)
    consumers = [{**_row(one), "receiving": engine.receiving(one.labels["group"])} for one in found["consumer"]]
    rows = {
        "topics": [*map(_row, found["topic"])],
        "consumers": consumers,
        "producers": [*map(_row, found["producer"])],
    }
    return cast(actions.Standings, rows)


def _row(one: Any) -> dict[str, Any]:
    """Convert the state of a topic or group to JSON: its labels and numbers. Counts become integers, flags booleans;
    ages stay seconds."""
    numbers = {n: v if n in _WHOLE else bool(v) if n in _FLAGS else int(v) for n, v in one.numbers.items()}
    return {**one.labels, **numbers}


@answers(actions.OF_MESSAGE)
def _of_message(engine: Readable, request: actions.AskOfMessage) -> actions.OfMessage:
    return message_standing(engine, request)
