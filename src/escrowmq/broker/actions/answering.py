"""The functions behind actions, found by what an action answers with, the command that it submits, or what it looks at
in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from escrowmq.broker.reads.readable import HoldsLedger, Readable
from escrowmq.broker.recording import ending, recorded
from escrowmq.broker.requests import transaction_id
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code
from escrowmq.ledger.commands import Command
from escrowmq.platform.times import to_us
from escrowmq.schemas import ID
from escrowmq.wire import Action
from escrowmq.wire.actions.action import Answer, Request, Results

AnyEngine = TypeVar("AnyEngine", Engine, Readable)


LONGEST_WAIT_MS = 60_000
"""No call waits longer, whatever it asks for; the client asks again."""
PAGE = 1000
"""Entries of a page that does not say how many."""

HANDLERS: dict[str, Callable[[Any, Any], Any]] = {}
"""The function of each action, by the action's name. It takes an Engine, or a Readable if the action only reads."""


def answers(
    action: Action[Request, Answer],
) -> Callable[[Callable[[AnyEngine, Request], Answer]], Callable[[AnyEngine, Request], Answer]]:
    """Return a decorator that registers a function as the handler of ``action``."""

    def register(function: Callable[[AnyEngine, Request], Answer]) -> Callable[[AnyEngine, Request], Answer]:
        HANDLERS[action.name] = function
        return function

    return register


def submits(
    action: Action[Request, Answer],
    command: Callable[[Request], Command],
    shown: Callable[[Any], Any] = lambda answer: answer,
) -> None:
    """Register a handler of ``action``: the writer executes the command that ``command`` makes of a request, and
    ``shown`` converts its result to the answer."""

    @answers(action)
    def _(engine: Engine, request: Request) -> Answer:
        answer: Answer = shown(engine.submit(command(request)).result())
        return answer


def does(
    action: Action[Request, Answer],
    command: Callable[[Request], Command],
    shown: Callable[[Any], Any] = lambda answer: answer,
) -> None:
    """As :func:`submits`, of an operator's act: it is recorded before it is done."""

    @answers(action)
    def _(engine: Engine, request: Request) -> Answer:
        made = command(request)
        with recorded(engine, action, request) as done:
            answer: Answer = shown(engine.submit(made).result())
            done.ended = ending(answer)
        return answer


def looks(action: Action[Request, Answer], look: Callable[[HoldsLedger, Request], Any]) -> None:
    """Register a handler of ``action`` that only reads: it answers with what ``look`` returns from the ledger."""

    @answers(action)
    def _(engine: Readable, request: Request) -> Answer:
        answer: Answer = engine.look(lambda: look(engine.shard, request)).result()
        return answer


def page_of(what: str, entries: list[Any], limit: int, after: Callable[[Any], object]) -> Any:
    """Return one page of a listing: ``entries`` under the name ``what``. A full page (``limit`` entries) also has
    ``next``: ``after`` of its last entry, from which the next page continues."""
    return {what: entries, "next": after(entries[-1])} if len(entries) == limit else {what: entries}


def microseconds(seconds: float | None) -> int | None:
    """Convert seconds to whole microseconds; None stays None."""
    return None if seconds is None else to_us(seconds)


def results_of(codes: Any) -> Results:
    """Return {"codes": names}: the names of numeric result codes, in their order."""
    return {"codes": [_NAMES[code] for code in codes.tolist()]}


_NAMES = {int(code): code.name for code in Code}


def transaction_ids(printed: list[str]) -> pa.Array:
    """Parse printed transaction ids into an Arrow column. Raises Rejected(BAD_REQUEST) if one is malformed."""
    return pa.array([bytes(transaction_id(text)) for text in printed], ID)
