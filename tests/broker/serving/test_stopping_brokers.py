"""A broker that stops in an orderly way: whoever asks it meanwhile waits for its restart, as when it was killed."""

import threading
import time

import pytest
from served import Served

from escrowmq.client.links.answers import patient_action
from escrowmq.client.links.link import ServedLink
from escrowmq.errors import Code, Unknown
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange
from escrowmq.wire.actions.topics import LIST
from escrowmq.wire.addresses import Address


@pytest.fixture
def served(tmp_path):
    broker = Served(tmp_path / "data")
    broker.calls.exchange(Exchange.SEND, outgoing([{"body": b"x"}] * 3), {}).result(60)
    yield broker
    broker.stop()


@pytest.fixture
def link(served):
    made = ServedLink([Address("127.0.0.1", served.port)])
    yield made
    made.close()


def test_a_call_to_a_broker_that_stops_is_a_connection_that_broke(served, link):
    assert link.action("topics.list", {}, 60)["topics"]
    served.engine.stop()
    for act in (
        lambda: link.action("topics.list", {}, 60),
        lambda: list(link.read({"source": "orders", "columns": ["body"]})),
        lambda: link.exchange(Exchange.SEND, outgoing([{}]), {}).result(60),
    ):
        with pytest.raises(Unknown) as caught:
            act()
        assert caught.value.code is Code.DISCONNECTED


def test_who_repeats_an_action_waits_for_the_restart(served, link, monkeypatch):
    served.engine.stop()
    asked, act = threading.Event(), link.action

    def watched(*words):
        try:
            return act(*words)
        finally:
            asked.set()

    monkeypatch.setattr(link, "action", watched)
    told = []
    asking = threading.Thread(target=lambda: told.append(patient_action(link, LIST({}), time.monotonic() + 60)))
    asking.start()
    assert asked.wait(60)
    served.stop()
    served.start()
    asking.join(60)
    assert [topic["name"] for topic in told[0]["topics"]] == ["orders"]
    served.engine.stop()
    with pytest.raises(Unknown, match=link.address) as caught:
        patient_action(link, LIST({}), time.monotonic() + 0.2)
    assert caught.value.code is Code.TIMED_OUT
