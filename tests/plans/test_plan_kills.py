"""Real processes, really killed: the run in the middle, the broker in the middle of an act, one of two brokers away."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plans_world import die, fail

import escrowmq as mq
from escrowmq.plans import Plans, Ramp
from zygote import Zygote

QUICK = Ramp(pause=0.0)
MANY = 20_000


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(Path(__file__).with_name("plan_roles.py"))
    yield made
    made.close()


class Served:
    """A broker in a process of its own, on a port that stays its own."""

    def __init__(self, zygote: Zygote, folder: Path, eventually: Callable[..., Any]) -> None:
        self._zygote, self.folder, self._eventually = zygote, folder, eventually
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"escrow://{self.address}"
        self.pid = 0

    def start(self, failpoint: str | None = None) -> None:
        log = self.folder.with_suffix(".log")
        log.write_text("")
        words = ["serve", "-d", str(self.folder), "-l", self.address, "--json"]
        self.pid = self._zygote.start("command", failpoint, log=log, words=words)
        self._eventually(lambda: '"url"' in log.read_text(), 60.0)

    def gone(self) -> None:
        """Wait until it has died."""
        self._zygote.wait(self.pid)
        self.pid = 0

    def kill(self) -> None:
        if self.pid:
            self._zygote.kill(self.pid)
            self.pid = 0


@pytest.fixture
def served(zygote: Zygote, tmp_path: Path, eventually: Callable[..., Any]) -> Iterator[Callable[[], Served]]:
    made: list[Served] = []

    def make() -> Served:
        made.append(Served(zygote, tmp_path / f"broker-{len(made)}", eventually))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.kill()


def done(bus: mq.Bus, plan: str) -> Counter[tuple[str, Any]]:
    """From the brokers' records of acts: how often each dead letter was settled under a plan, with the broker."""
    found: Counter[tuple[str, Any]] = Counter()
    for act in bus.admin.acts():
        if (act["why"] or "").startswith(f"plan {plan} "):
            ended: Any = act["ended"].get("found", act["ended"])
            each = ended.get("each") or list(ended["results"]) * len(act["what"]["items"])
            for item, result in zip(act["what"]["items"], each, strict=True):
                if result in ("OK", "settled"):
                    found[act["broker"], tuple(item)] += 1
    return found


def frozen(bus: mq.Bus, plans: Plans, plan: str) -> set[tuple[str, Any]]:
    """The same of the frozen set."""
    at = {hello["shard"]: hello["broker"] for hello in bus.admin.hello()}
    rows = plans.rows(plan, 0, 1_000_000)
    return {(at[row["place"]], (row["topic"], row["queue"], row["offset"], row["dead_us"])) for row in rows}


@pytest.mark.invariant("I44")
def test_a_run_of_twenty_thousand_killed_at_every_step_does_each_once(
    zygote: Zygote, served: Callable[[], Served], plans: Plans, tmp_path: Path
) -> None:
    broker = served()
    with mq.connect(broker.url) as bus:
        die(bus, MANY)
        plan = plans.make(bus, "dead_letters.retry", {"group": "cart"}, why="mended")
        assert plan.rows == MANY
        words = ["plan", "run", plan.id, "--yes", "--pause", "0s", "--plans", str(plans.folder), "-u", broker.url]
        seen = []
        for point in ("begun:2", "answered:2", "results-written:2", "done:2"):
            assert zygote.run("command", f"plans.{point}", words=words) == -9
            found = plans.get(plan.id)
            seen.append(found.next)
            assert found.state == "interrupted"
        assert seen == sorted(seen)
        assert 0 < seen[0] < seen[-1] < MANY
        log = tmp_path / "run.log"
        assert zygote.wait(zygote.start("command", log=log, words=[*words, "--json"])) == 0
        report = json.loads(log.read_text().splitlines()[-1])
        assert (report["state"], report["outcomes"]) == ("finished", {"done": MANY})
        counts = done(bus, plan.id)
        assert set(counts) == frozen(bus, plans, plan.id)
        assert set(counts.values()) == {1}
        assert not bus.admin.dead_letters("cart")
        with bus.consumer("cart", "orders", lease=600.0) as consumer:
            numbers: list[int] = []
            while len(numbers) < MANY:
                for message in consumer.receive(5000, wait=60.0):
                    numbers.append(int(message.body))
                    message.ack()
            assert consumer.receive(10, wait=0.1) == []
        assert sorted(numbers) == list(range(MANY))
        assert not any(one["broken"] for one in bus.admin.verify_acts())


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("point", ["acts.recorded:3", "acts.done:3"])
def test_a_broker_killed_in_the_middle_of_an_act(served: Callable[[], Served], plans: Plans, point: str) -> None:
    """The run waits for it, and goes on by what the broker found out at its start."""
    broker = served()
    with mq.connect(broker.url) as bus:
        die(bus, 500)
        plan = plans.make(bus, "dead_letters.retry", {"group": "cart"})
        first = bus.admin.dead_letters("cart")[0]
        broker.kill()
        broker.start(point)
        bus.admin.discard_dead_letters("cart", [first])
        tried: list[int] = []

        def told(report: Any) -> None:
            tried.append(report.next)

        stopped = plans.run(plan.id, bus, ramp=QUICK, progress=told, patience=0.5)
        broker.gone()
        assert (stopped.state, stopped.in_doubt) == ("failed", 5)
        assert plans.get(plan.id).state == "failed"
        broker.start()
        report = plans.run(plan.id, bus, ramp=QUICK)
        assert (report.state, report.outcomes) == ("finished", {"done": 499, "already": 1})
        counts = done(bus, plan.id)
        assert len(counts) == 499
        assert set(counts.values()) == {1}
        assert plans.rows(plan.id, outcome="already")[0]["offset"] == first["offset"]


@pytest.mark.invariant("I44")
def test_one_of_two_brokers_away(served: Callable[[], Served], plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a plan is refused, or says so; a run stops, says so, and goes on when the broker is back."""
    monkeypatch.setattr("escrowmq.plans.frozen.BATCH_ROWS", 500)
    at_once = Ramp((100.0,), 0.0)
    one, other = served(), served()
    with mq.connect(f"{one.url},{other.address}") as bus:
        die(bus, 1200)
        letters = bus.admin.dead_letters("cart")
        plan = plans.make(bus, "dead_letters.retry", {"group": "cart"})
        assert plan.rows == len(letters) == 1200
        at = {hello["shard"]: hello["broker"] for hello in bus.admin.hello()}
        if at[plan.samples[0]["place"]] == other.url:  # the rows of which broker come first is chance
            one, other = other, one
        at_other = [letter for letter in letters if letter["broker"] == other.url]
        other.kill()
        with pytest.raises(mq.Overloaded, match="incomplete"):
            plans.make(bus, "dead_letters.discard", {"group": "cart"})
        less = plans.make(bus, "dead_letters.discard", {"group": "cart"}, without_missing=True)
        assert [away["broker"] for away in less.missing] == [other.url]
        assert less.rows == 1200 - len(at_other)
        report = plans.run(plan.id, bus, ramp=at_once, batch=500, patience=0.5)
        assert (report.state, report.in_doubt, 0 < report.next < 1200) == ("failed", 0, True)
        assert other.address in report.reason
        other.start()
        died_again = fail(bus, report.next)  # what was done meanwhile dies anew: another death, not to be retried
        assert len(died_again) == report.next
        finished = plans.run(plan.id, bus, ramp=at_once, batch=500)
        assert (finished.state, finished.outcomes) == ("finished", {"done": 1200})
        assert plans.run(less.id, bus, ramp=at_once, batch=500).outcomes["changed"] == report.next
        assert set(done(bus, plan.id).values()) == {1}
        assert len(done(bus, plan.id)) == 1200
