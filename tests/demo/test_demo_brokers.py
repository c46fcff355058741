"""Who may be killed when, of a leader and a standby, and what people are told: by the events of their processes
alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from escrowmq.demo import DemoOptions, run
from escrowmq.demo.brokers import LeaderAndStandby, News
from escrowmq.demo.processes import Child, ChildEvent
from escrowmq.errors import Code, Misuse

A, B = LeaderAndStandby.names


class Played:
    """Brokers, and the events of processes that there are not."""

    def __init__(self) -> None:
        self.brokers = LeaderAndStandby(Path("run"), "kafka://127.0.0.1:9/demo?replication=1")

    def hear(self, who: str, kind: str, at: float = 0.0, **details: Any) -> News | None:
        child = cast(Child, SimpleNamespace(name=who))
        return self.brokers.on_event(ChildEvent(child, int(at * 1e6), kind, details))

    def begin(self) -> None:
        """The first leads, the second follows."""
        self.hear(A, "ready", url="escrow://127.0.0.1:1")
        self.hear(A, "leads", epoch=1)
        self.hear(B, "ready", url="escrow://127.0.0.1:2")

    def kill(self, who: str, at: float) -> None:
        self.brokers.on_killed(who, int(at * 1e6))

    def order(self, begun: float, placed: float) -> News | None:
        return self.hear("shop", "placed", placed, order="1", begun_us=int(begun * 1e6))


@pytest.fixture
def played() -> Played:
    return Played()


def test_everybody_is_told_of_both_brokers(played: Played) -> None:
    brokers = played.brokers
    (one, other) = (brokers.config(name) for name in brokers.names)
    assert brokers.url == f"escrow://127.0.0.1:{one['port']}|127.0.0.1:{other['port']}"
    assert one["replicas"] == other["replicas"] == [f"escrow://127.0.0.1:{c['port']}" for c in (one, other)]
    assert one["log"] == other["log"]
    assert one["folder"] != other["folder"]
    assert one["port"] != other["port"]


def test_the_leader_is_killed_only_beside_a_standby_and_after_the_last_change(played: Played) -> None:
    brokers = played.brokers
    played.hear(A, "ready", url="")
    assert (brokers.is_ready(A), brokers.victim) == (False, None)  # nobody leads
    played.hear(A, "leads", epoch=1)
    assert (brokers.is_ready(A), brokers.is_ready(B), brokers.victim) == (True, False, None)
    played.hear(B, "ready", url="")
    assert brokers.victim == A
    played.kill(A, 1.0)
    assert brokers.victim is None
    played.hear(B, "leads", 3.0, epoch=2)
    assert brokers.victim is None  # the one that was killed is not back
    played.hear(A, "ready", url="")
    assert brokers.victim is None  # no order yet
    played.order(2.0, 3.5)
    assert brokers.victim == B


def test_the_first_order_is_one_that_was_begun_after_the_kill(played: Played) -> None:
    played.begin()
    assert played.order(0.5, 0.6) is None
    played.kill(A, 1.0)
    assert played.order(0.9, 1.1) is None  # its database had committed; the broker's answer did not come
    leads = played.hear(B, "leads", 3.25, epoch=2)
    assert leads is not None
    assert (leads.event, leads.who, leads.facts) == ("leads", B, {"epoch": 2, "seconds": 2.25})
    assert played.order(0.95, 3.3) is None
    first = played.order(1.5, 3.5)
    assert first is not None
    assert (first.event, first.who, first.facts) == ("answered", B, {"seconds": 2.5})
    assert played.order(1.6, 3.6) is None


def test_a_change_is_over_when_no_more_orders_come(played: Played) -> None:
    played.begin()
    played.kill(A, 1.0)
    played.hear("shop", "done")
    assert played.brokers.victim is None
    leads = played.hear(B, "leads", 3.0, epoch=2)
    assert leads is not None
    assert leads.facts["seconds"] == 2.0
    played.hear(A, "ready", url="")
    assert played.brokers.victim == B


def test_who_led_for_a_moment_and_says_so_late_does_not_lead(played: Played) -> None:
    played.begin()
    assert played.hear(B, "leads", epoch=3) is not None
    assert played.hear(A, "leads", epoch=2) is None
    assert played.brokers.victim == B


def test_who_is_back_follows_unless_it_leads_again(played: Played) -> None:
    played.begin()
    played.kill(A, 1.0)
    played.hear(B, "leads", 3.0, epoch=2)
    back = played.hear(A, "ready", url="")
    assert back is not None
    assert (back.event, back.who) == ("follows", A)
    played.order(3.0, 3.1)
    played.kill(B, 4.0)
    played.hear(B, "leads", 6.0, epoch=3)  # the standby was slow
    assert played.hear(B, "ready", url="") is None


def test_another_log_is_refused() -> None:
    with pytest.raises(Misuse, match="takes kafka alone") as refused:
        DemoOptions(log="kafka://127.0.0.1/orders")
    assert "escrowmq serve --log" in refused.value.hint


def test_without_maven_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from escrowmq.pipeline.java import find_java

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(find_java().program)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where Kafka was not fetched to
    with pytest.raises(Misuse, match="apt-get install maven") as missing:
        run(DemoOptions(folder=tmp_path / "run", count=1, log="kafka"))
    assert missing.value.code is Code.MISSING_PACKAGE
    assert not (tmp_path / "run").exists()
