"""What the broker's tests share."""

import pytest

from escrowmq.broker import actions, calls
from escrowmq.wire.actions.table import ACTIONS
from wire_conformance import check


@pytest.fixture(autouse=True)
def answers_have_their_types(monkeypatch):
    """Every answer to an action, in whatever test, has the type that the wire says."""

    def act(engine, name, request):
        answer = actions.act(engine, name, request)
        check(answer, ACTIONS[name].answer, f"answer of {name}")
        return answer

    monkeypatch.setattr(calls, "act", act)
