"""The record of operators' acts."""

from __future__ import annotations

from escrowmq.broker import recording
from escrowmq.broker.actions.answering import PAGE, answers
from escrowmq.broker.reads.readable import Readable
from escrowmq.wire.actions import acts
from escrowmq.wire.actions.action import Nothing


@answers(acts.LIST)
def _list_acts(engine: Readable, request: acts.List) -> acts.Page:
    return recording.page(engine, request, PAGE)


@answers(acts.VERIFY)
def _verify_acts(engine: Readable, _: Nothing) -> acts.Verified:
    return recording.verified(engine)
