"""Each promise beside the checker's: bad histories are noticed, by name, and good ones are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Act, Event, Kind

OK, FAIL, INVOKE = Kind.OK, Kind.FAIL, Kind.INVOKE


def sent(value: str, key: str | None = "k", process: str = "p") -> Event:
    return Event(process, Act.SEND, OK, value, topic="orders", key=key)


def stands(value: str, offset: int, topic: str = "orders", queue: int = 0, broker: str = "a") -> Event:
    return Event("audit", Act.STANDS, OK, value, topic=topic, queue=queue, offset=offset, broker=broker)


def received(value: str, offset: int, attempt: int = 1, at_us: int = 0, queue: int = 0) -> Event:
    return Event(
        "c", Act.RECEIVE, OK, value, topic="orders", queue=queue, offset=offset, group="g", attempt=attempt, key="k",
        at_us=at_us,
    )  # fmt: skip


def half(value: str, transaction: str) -> Event:
    return Event("p", Act.PREPARE, OK, value, transaction=transaction)


def ended(act: Act, kind: Kind, note: str | None = None, process: str = "old") -> Event:
    return Event(process, act, kind, transaction="t", note=note)


def ack(value: str, kind: Kind = OK) -> Event:
    return Event("c", Act.ACK, kind, value, group="g", attempt=1)


def fate(value: str, note: str) -> Event:
    return Event("audit", Act.FATE, OK, value, topic="orders", group="g", note=note)


def row(value: str, kind: Kind = OK) -> Event:
    return Event("shop", Act.SEND, kind, value, message_id=f"id of {value}")


def effect(value: str, identity: str | None = None) -> Event:
    return Event("points", Act.EFFECT, OK, value, message_id=identity or f"id of {value}")


ACKED = [received("m1", 0), stands("m1", 0), ack("m1")]
FENCED = ended(Act.COMMIT, FAIL, "Fenced: FENCED: a newer session of the same producer instance took over")

BAD: dict[str, tuple[Callable[[list[Event]], list[Violation]], str, str, list[Event]]] = {
    "sent in order, stands in another": (
        promises.disordered, "disordered", "m2", [sent("m1"), sent("m2"), stands("m2", 0), stands("m1", 1)],
    ),
    "an ordered group is given the later one first": (
        lambda events: promises.disordered(events, {"g"}), "disordered", "m1", [received("m2", 1), received("m1", 0)],
    ),
    "before its time": (
        promises.early, "early", "m1",
        [Event("p", Act.SEND, INVOKE, "m1", due_us=1000), received("m1", 0, at_us=999)],
    ),
    "something foreign stands between": (
        promises.scattered, "scattered", "t",
        [half("a", "t"), half("b", "t"), half("x", "u"), stands("a", 0), stands("x", 1), stands("b", 2)],
    ),
    "one was not copied": (
        lambda events: promises.uncopied(events, "orders", "copies"), "lost", "copy of m1", [stands("m1", 0)],
    ),
    "a copy of nothing": (
        lambda events: promises.uncopied(events, "orders", "copies"), "unexpected", "copy of m1",
        [stands("copy of m1", 0, "copies")],
    ),
    "a commit of the fenced": (promises.undead, "undead", "t", [FENCED, ended(Act.COMMIT, OK)]),
    "done with, and nobody did it": (
        promises.unaccounted, "unaccounted", "m2", [*ACKED, received("m2", 1), stands("m2", 1)],
    ),
    "acknowledged, and a dead letter": (promises.unaccounted, "unacked", "m1", [*ACKED, fate("m1", "dead")]),
    "let go by nobody": (
        promises.unaccounted, "unaccounted", "m2", [*ACKED, stands("m2", 1), fate("m2", "discarded")],
    ),
    "still waiting": (promises.unaccounted, "unaccounted", "m2", [*ACKED, stands("m2", 1), fate("m2", "waiting")]),
    "delivered too often": (
        lambda events: promises.overattempted(events, "g", 2), "overattempted", "m1",
        [received("m1", 0, attempt=2), received("m1", 0, attempt=3)],
    ),
    "a row without effect": (promises.unpaired, "lost", "r1", [row("r1")]),
    "two effects": (promises.unpaired, "repeated", "r1", [row("r1"), effect("r1"), effect("r1")]),
    "an effect of what was rolled back": (promises.unpaired, "resurrected", "r1", [row("r1", FAIL), effect("r1")]),
    "an effect under another id": (promises.unpaired, "moved", "r1", [row("r1"), effect("r1", "id of r2")]),
    "an effect of nothing": (promises.unpaired, "unexpected", "r2", [row("r1"), effect("r1"), effect("r2")]),
    "fenced without a successor": (promises.fenced_alone, "fenced", "t", [FENCED]),
    "a half message of the fenced": (promises.undead, "undead", "t", [FENCED, ended(Act.PREPARE, OK)]),
}  # fmt: skip

GOOD: dict[str, tuple[Callable[[list[Event]], list[Violation]], list[Event]]] = {
    "in order": (promises.disordered, [sent("m1"), sent("m2"), stands("m1", 0), stands("m2", 1)]),
    "other keys": (promises.disordered, [sent("m1", "a"), sent("m2", "b"), stands("m2", 0), stands("m1", 1)]),
    "no key": (promises.disordered, [sent("m1", None), sent("m2", None), stands("m2", 0), stands("m1", 1)]),
    "other processes": (
        promises.disordered, [sent("m1"), sent("m2", process="q"), stands("m2", 0), stands("m1", 1)],
    ),
    "other brokers": (
        promises.disordered, [sent("m1"), sent("m2"), stands("m2", 0), stands("m1", 1, broker="b")],
    ),
    "delivered again": (
        lambda events: promises.disordered(events, {"g"}),
        [received("m1", 0), received("m2", 1), received("m1", 0, 2)],
    ),
    "a group that keeps no order": (promises.disordered, [received("m2", 1), received("m1", 0)]),
    "at its time": (
        promises.early, [Event("p", Act.SEND, INVOKE, "m1", due_us=1000), received("m1", 0, at_us=1000)],
    ),
    "together": (promises.scattered, [half("a", "t"), half("b", "t"), stands("a", 0), stands("b", 1), stands("x", 2)]),
    "in two queues": (
        promises.scattered, [half("a", "t"), half("b", "t"), stands("a", 0), stands("x", 1), stands("b", 0, queue=1)],
    ),
    "copied": (
        lambda events: promises.uncopied(events, "orders", "copies"),
        [stands("m1", 0), stands("copy of m1", 0, "copies")],
    ),
    "refused from then on": (promises.undead, [FENCED, ended(Act.COMMIT, FAIL), ended(Act.PREPARE, FAIL)]),
    "fenced, and it was started again before": (promises.fenced_alone, [Event("old", Act.KILL, OK), FENCED]),
    "fenced, of a name that several have": (lambda events: promises.fenced_alone(events, {"old"}), [FENCED]),
    "acknowledged": (promises.unaccounted, ACKED),
    "its answer was lost": (promises.unaccounted, [received("m1", 0), stands("m1", 0), ack("m1", INVOKE)]),
    "a dead letter": (promises.unaccounted, [*ACKED, stands("m2", 1), fate("m2", "dead")]),
    "let go by an operator": (
        promises.unaccounted,
        [*ACKED, stands("m2", 1), fate("m2", "discarded"),
         Event("o", Act.DISCARD, INVOKE, group="g", topic="orders", queue=0, offset=1)],
    ),
    "a group that notes nothing": (promises.unaccounted, [received("m1", 0), stands("m1", 0)]),
    "failed before the bound was set": (
        lambda events: promises.overattempted(events, "g", 2), [received("m1", 0, attempt=3)],
    ),
    "delivered as often as allowed": (
        lambda events: promises.overattempted(events, "g", 2), [received("m1", 0, attempt=2)],
    ),
    "rows and effects": (
        promises.unpaired, [row("r1"), effect("r1"), row("r2", FAIL), row("r3", INVOKE)],
    ),
    "refused for another cause": (promises.fenced_alone, [ended(Act.COMMIT, FAIL, process="old")]),
    "its successor": (promises.undead, [FENCED, ended(Act.COMMIT, OK, process="new")]),
    "started anew, it is a newer one itself": (
        promises.undead, [FENCED, Event("old", Act.KILL, OK), ended(Act.COMMIT, OK)],
    ),
}  # fmt: skip


@pytest.mark.invariant("I25", "I26")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_noticed(name: str) -> None:
    check, what, subject, events = BAD[name]
    found = check(events)
    assert [(violation.what, violation.subject) for violation in found] == [(what, subject)]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_not(name: str) -> None:
    check, events = GOOD[name]
    assert check(events) == []
