"""What is said of a broker that did not answer: a question changed nothing, anything else may have been applied."""

from __future__ import annotations

import time

import pytest

import escrowmq as mq
from escrowmq.client.links.answers import patient_action
from escrowmq.errors import Code
from escrowmq.wire.actions import groups, topics


def test_a_listing_that_nobody_answered_has_surely_changed_nothing() -> None:
    with mq.connect("escrow://127.0.0.1:1") as bus:
        (link,) = bus.router.links
        with pytest.raises(mq.Unknown) as question:
            patient_action(link, topics.LIST({}), time.monotonic())
        with pytest.raises(mq.Unknown) as act:
            patient_action(link, groups.FENCE({"group": "g", "instance": "i"}), time.monotonic())
    assert question.value.code is act.value.code is Code.TIMED_OUT
    assert question.value.message.startswith("escrow://127.0.0.1:1: no broker answers")
    assert "nothing was changed" in question.value.hint
    assert "may have been applied" in (act.value.hint or "")
