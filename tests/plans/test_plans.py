"""Plans over a real broker in this process: what is frozen is what is acted on, whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from plans_world import die, fail

import escrowmq as mq
from escrowmq.errors import Code
from escrowmq.plans import Plans, Ramp

AT_ONCE = Ramp((100.0,), 0.0)
QUICK = Ramp(pause=0.0)
Prepared = Callable[[int], list[str]]


def places(rows: Any) -> set[tuple[str, int, int]]:
    return {(row["topic"], row["queue"], row["offset"]) for row in rows}


def test_what_is_retried_is_the_frozen_set_and_nothing_that_died_later(bus: mq.Bus, plans: Plans) -> None:
    die(bus, 300, ["timeout", "poison", "timeout"])
    shown = places(one for one in bus.admin.dead_letters("cart") if "timeout" in one["cause"])
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart", "cause": "timeout"}, why="the shop is back")
    assert (plan.rows, plan.state, plan.next) == (200, "made", 0)
    assert places(plans.rows(plan.id, 0, 1000)) == shown
    assert plan.counts["cause"] == {"timeout, attempt 1 of 1": 200}
    assert len(plan.samples) == 10
    assert plans.dry_run(plan.id, bus).by_outcome == {"done": 200}
    die(bus, 50)  # the same cause, but not in the plan
    assert plans.dry_run(plan.id, bus).by_outcome == {"done": 200}
    told: list[Any] = []
    report = plans.run(plan.id, bus, ramp=QUICK, progress=told.append)
    assert (report.state, report.outcomes, report.failures) == ("finished", {"done": 200}, 0)
    assert [one.next for one in told] == [2, 4, 10, 20, 50, 100, 200]
    left = bus.admin.dead_letters("cart")
    assert len(left) == 150
    assert not shown & places(left)
    acts = bus.admin.acts()
    assert len(acts) == 7
    assert all(
        act["why"].startswith(f"plan {plan.id} rows ") and act["why"].endswith(": the shop is back") for act in acts
    )
    assert {tuple(item[:3]) for act in acts for item in act["what"]["items"]} == shown
    again = plans.run(plan.id, bus)
    assert (again.state, again.handled) == ("finished", 0)
    assert [row["outcome"] for row in plans.rows(plan.id, 198)] == ["done", "done"]
    assert plans.rows(plan.id, outcome="gone") == []


def test_a_dry_run_tells_what_happened_since_with_samples(bus: mq.Bus, plans: Plans) -> None:
    die(bus, 20)
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart"})
    letters = bus.admin.dead_letters("cart")
    bus.admin.discard_dead_letters("cart", letters[:5])
    bus.admin.retry_dead_letters("cart", letters[5:8])
    assert len(fail(bus, 3)) == 3
    counts = plans.dry_run(plan.id, bus, samples=2)
    assert counts.by_outcome == {"done": 12, "already": 5, "changed": 3}
    assert [(one.row, one.outcome) for one in counts.samples] == [
        (8, "done"), (9, "done"), (0, "already"), (1, "already"), (5, "changed"), (6, "changed"),
    ]  # fmt: skip
    assert plans.last_dry_run(plan.id) == counts.to_json()
    assert len(bus.admin.dead_letters("cart")) == 15
    assert plans.get(plan.id).next == 0


@pytest.mark.parametrize(
    ("act", "results", "seen"),
    [
        ("transactions.commit", {"done": 6, "already": 2, "conflict": 2}, "committed"),
        ("transactions.rollback", {"done": 6, "already": 2, "conflict": 2}, "rolled_back"),
        ("transactions.recheck", {"done": 6, "already": 4}, "open"),
    ],
)
def test_transactions(
    bus: mq.Bus, plans: Plans, prepared: Prepared, act: str, results: dict[str, int], seen: str
) -> None:
    ids = prepared(10)
    plan = plans.make(bus, act, {"group": "payments"})
    assert {row["id"] for row in plans.rows(plan.id)} == set(ids)
    same, other = bus.admin.commit, bus.admin.rollback
    if act == "transactions.rollback":
        same, other = other, same
    for identity in ids[:2]:
        same(identity)
    for identity in ids[2:4]:
        other(identity)
    later = prepared(3)
    assert plans.dry_run(plan.id, bus).by_outcome == results
    assert plans.run(plan.id, bus, ramp=QUICK).outcomes == results
    assert {bus.admin.transaction(identity)["state"] for identity in ids[4:]} == {seen}
    assert {bus.admin.transaction(identity)["state"] for identity in later} == {"open"}


def test_only_what_is_chosen_is_in_it(bus: mq.Bus, plans: Plans, prepared: Prepared) -> None:
    die(bus, 10, ["timeout", "poison"])
    letters = bus.admin.dead_letters("cart")
    first, second = (f"{one['topic']}/{one['queue']}/{one['offset']}" for one in letters[:2])
    chosen = {
        "key": {"key": "k3"},
        "place": {"ids": [first, second, "orders/0/99999"]},
        "message id": {"ids": [letters[4]["message_id"]]},
        "items": {
            "items": [
                letters[5],
                letters[5],
                {**letters[6], "dead_us": 1},
                {"topic": "orders", "queue": 0, "offset": 9999},
            ]
        },
        "containing": {"containing": "mpt 1 of"},
        "cause": {"cause": "poison, attempt 7 of 9"},
        "old": {"older_than": 3600.0},
        "topic": {"topic": "others"},
    }
    made: dict[str, Any] = {}
    for name, selection in chosen.items():
        try:
            made[name] = plans.make(bus, "dead_letters.discard", {"group": "cart", **selection})
        except mq.Rejected as problem:
            made[name] = problem.code
    assert (made["old"], made["topic"]) == (Code.NOT_FOUND, Code.NOT_FOUND)
    assert [made[name].rows for name in ("key", "place", "message id", "items", "containing", "cause")] == [
        1,
        2,
        1,
        1,
        10,
        5,
    ]
    assert [made[name].not_found for name in ("key", "place", "message id", "items")] == [0, 1, 0, 2]
    assert places(plans.rows(made["items"].id)) == places([letters[5]])
    ids = prepared(5)
    assert plans.make(bus, "transactions.commit", {"ids": ids[:2]}).rows == 2
    assert plans.make(bus, "transactions.commit", {"state": "open", "cause": "not_due"}).rows == 5
    assert len(plans.list()) == 8
    for act, selection in [
        ("dead_letters.retry", {}),
        ("dead_letters.retry", {"group": "cart", "couse": "x"}),
        ("dead_letters.retry", {"group": "cart", "older_than": "1h"}),
        ("dead_letters.retry", {"group": "no such/group"}),
        ("transactions.commit", {"state": "committed"}),
        ("transactions.commit", {"cause": "bad luck"}),
        ("transactions.comit", {}),
    ]:
        with pytest.raises((mq.Misuse, mq.Rejected)):
            plans.make(bus, act, selection)
    with pytest.raises(mq.Rejected, match="UNKNOWN_GROUP"):
        plans.make(bus, "dead_letters.retry", {"group": "nobody"})
    assert len(plans.list()) == 8
    assert len(list(plans.folder.iterdir())) == 8


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("edit", ["a byte", "another set", "the act", "cut off"])
def test_a_plan_changed_by_hand_is_refused(bus: mq.Bus, plans: Plans, edit: str) -> None:
    die(bus, 20)
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart", "topic": "orders"})
    other = plans.make(bus, "dead_letters.retry", {"group": "cart", "ids": [plans.rows(plan.id)[0]["message_id"]]})
    folder = plans.folder / plan.id
    frozen = folder / "set.arrow"
    content = frozen.read_bytes()
    if edit == "a byte":
        at = len(content) // 2
        frozen.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif edit == "another set":
        frozen.write_bytes((plans.folder / other.id / "set.arrow").read_bytes())
    elif edit == "the act":
        manifest = folder / "plan.json"
        manifest.write_text(manifest.read_text().replace("dead_letters.retry", "dead_letters.discard"))
    else:
        frozen.write_bytes(content[: len(content) // 2])
    for act in (plans.run, plans.dry_run):
        with pytest.raises(mq.Corrupt, match="DAMAGED"):
            act(plan.id, bus)
    assert len(bus.admin.dead_letters("cart")) == 20
    assert not bus.admin.acts()


def test_of_two_runs_at_once_the_second_is_refused_and_a_stop_is_gone_on_with(bus: mq.Bus, plans: Plans) -> None:
    die(bus, 100)
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart"})
    there, go, reports = threading.Event(), threading.Event(), list[Any]()

    def told(report: Any) -> None:
        there.set()
        assert go.wait(60)

    runner = threading.Thread(target=lambda: reports.append(plans.run(plan.id, bus, ramp=QUICK, progress=told)))
    runner.start()
    assert there.wait(60)
    assert plans.get(plan.id).state == "running"
    with pytest.raises(mq.Rejected, match="already running"):
        plans.run(plan.id, bus)
    with pytest.raises(mq.Rejected, match="already running"):
        plans.delete(plan.id)
    assert plans.stop(plan.id)
    go.set()
    runner.join(60)
    assert [(one.state, one.next) for one in reports] == [("stopped", 1)]
    assert (plans.get(plan.id).state, plans.stop(plan.id)) == ("stopped", False)
    report = plans.run(plan.id, bus, ramp=AT_ONCE)
    assert (report.state, report.handled, report.outcomes) == ("finished", 99, {"done": 100})
    assert len(bus.admin.acts()) == 2
    plans.delete(plan.id)
    assert plans.list() == []
    with pytest.raises(mq.Rejected, match="NOT_FOUND"):
        plans.get(plan.id)


def test_a_run_stops_when_what_it_did_fails_anew(bus: mq.Bus, plans: Plans) -> None:
    die(bus, 200)
    plan = plans.make(bus, "dead_letters.retry", {"group": "cart"})
    seen: list[int] = []

    def told(report: Any) -> None:
        if report.next > len(seen):
            seen.extend(fail(bus, report.next - len(seen)))

    report = plans.run(plan.id, bus, ramp=Ramp((10.0, 50.0, 100.0), 0.0), stop_after="5%", progress=told)
    assert (report.state, report.next, report.again) == ("stopped", 20, 20)
    assert "20 failures of 20 rows" in report.reason
    assert plans.get(plan.id).again == 20
    assert sorted(seen) == sorted(set(seen))
    assert len(bus.admin.dead_letters("cart")) == 200


def test_so_many_failures_stop_it(bus: mq.Bus, plans: Plans, prepared: Prepared) -> None:
    ids = prepared(20)
    plan = plans.make(bus, "transactions.commit", {})
    for identity in ids[4:]:
        bus.admin.rollback(identity)
    report = plans.run(plan.id, bus, ramp=AT_ONCE, batch=2, stop_after="3")
    assert (report.state, report.next, report.failures) == ("stopped", 8, 4)
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        plans.run(plan.id, bus, digest="0" * 64)
    assert plans.run(plan.id, bus, ramp=AT_ONCE, digest=plan.digest[:12]).outcomes == {"done": 4, "conflict": 16}
