"""Who waits for a link that lost its connection: told at once, once, and asks nobody meanwhile."""

from __future__ import annotations

import logging
import threading

import pytest

import escrowmq as mq
from escrowmq.client.bus import Bus
from escrowmq.client.lanes import coalescer
from escrowmq.client.lanes.returning import call_when_there, rest
from escrowmq.client.links.state import Waiters
from escrowmq.client.producing.checker import LASTING_SECONDS, Absence
from escrowmq.connecting import links
from escrowmq.errors import Code
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange
from escrowmq.wire.link import BrokerState, Phase, ReturningLink
from not_leading import Standby

HOUR = 3600.0


class LostTwin(TwinLink):
    """A twin whose connection a test loses and finds."""

    def __init__(self):
        super().__init__()
        self.state = BrokerState(Phase.UP)
        self.waiters = Waiters()

    def when_there(self, call):
        return self.waiters.add(call)

    def found(self):
        self.state.enter(Phase.UP, 0.0)
        self.waiters.notify()


@pytest.fixture
def lost(monkeypatch):
    """Pauses take an hour here: what goes on before was told to."""
    monkeypatch.setattr(coalescer, "FIRST_BACKOFF", HOUR)
    monkeypatch.setattr(coalescer, "LAST_BACKOFF", HOUR)
    return LostTwin()


def test_a_lane_sends_again_the_moment_there_is_a_connection(lost, eventually):
    with Bus([lost]) as bus:
        producer = bus.producer("p", timeout=HOUR)
        producer.send("t", b"first")
        lost.state.enter(Phase.AWAY, 0.0)
        lost.lose(Exchange.SEND, applied=False)
        receipts = []
        sends = threading.Thread(target=lambda: receipts.append(producer.send("t", b"second")))
        sends.start()
        eventually(lambda: bool(lost.waiters))
        lost.found()
        sends.join(60)
        assert len(receipts) == 1
        assert [row["body"] for row in lost.topics["t"]] == [b"first", b"second"]


def test_a_rest_ends_with_the_connection_and_leaves_nothing_behind(lost):
    lost.state.enter(Phase.AWAY, 0.0)
    rests = threading.Thread(target=rest, args=(lost, HOUR))
    rests.start()
    while not lost.waiters:
        assert rests.is_alive()
    lost.found()
    rests.join(60)
    assert not rests.is_alive()
    lost.state.enter(Phase.AWAY, 0.0)
    rest(lost, 0.0)
    stop = threading.Event()
    stop.set()
    rest(lost, HOUR, stop)
    assert not lost.waiters


def test_nobody_waits_for_a_link_that_has_a_connection_or_cannot_lose_it(lost):
    assert call_when_there(lost, print) is None
    assert call_when_there(TwinLink(), print) is None


def test_a_link_looks_for_whoever_waits_and_for_nobody_else(eventually):
    """With a broker that follows until the test says otherwise."""
    with Standby(7, "escrow://127.0.0.1:1") as standby:
        [link] = links(f"{standby.url}?replicas=listed", {})
        assert isinstance(link, ReturningLink)
        other = Standby(7, standby.url)
        with other:
            [link] = links(
                f"escrow://{standby.url.removeprefix('escrow://')}|{other.url.removeprefix('escrow://')}", {}
            )
            assert standby.asked == 0
            told = []
            back = threading.Event()
            forget = link.when_there(lambda: (told.append(1), back.set()))
            eventually(lambda: standby.asked >= 3)
            assert not told
            forget()
            link.when_there(back.set)
            other.boasts = 9
            assert back.wait(60)
            assert link.state.is_there
            assert told == []
            link.when_there(lambda: told.append(2))  # at once: it is there
            assert told == [2]
            link.close()


def test_a_link_that_is_closed_tells_those_who_wait():
    with Standby(7, "escrow://127.0.0.1:1") as standby:
        at = standby.url.removeprefix("escrow://")
        [link] = links(f"escrow://{at}|127.0.0.1:9", {})
        back = threading.Event()
        link.when_there(back.set)
        link.close()
        assert back.wait(60)
        with pytest.raises(mq.Unknown) as closed:
            link.action("topics.list", {}, 1.0)
        assert closed.value.code is Code.CLOSED


def test_a_change_of_leader_is_a_detail_and_a_lasting_absence_a_warning():
    absence = Absence()
    said = [absence.failed(Code.DISCONNECTED, now * 0.1) for now in range(int(10 * LASTING_SECONDS) * 3)]
    assert [level for level in said if level is not None] == [logging.INFO, logging.WARNING]
    assert said[0] == logging.INFO
    assert said.index(logging.WARNING) == pytest.approx(10 * LASTING_SECONDS, abs=1)
    assert Absence().failed(Code.GROUP_KIND, 0.0) == logging.WARNING
