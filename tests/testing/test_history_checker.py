"""The checker itself: each kind of bad history is noticed, by name, and a good one is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import Code, Overloaded, Rejected, Unknown
from escrowmq_lab.checker import check
from escrowmq_lab.history import Act, Event, History, Kind, payload, read, unpack

OK, FAIL, UNKNOWN, INVOKE = Kind.OK, Kind.FAIL, Kind.UNKNOWN, Kind.INVOKE


def done(act: Act, kind: Kind = OK, process: str = "p", **details: object) -> list[Event]:
    """A call with its invocation."""
    return [Event(process, act, INVOKE, **details), Event(process, act, kind, **details)]


def stands(value: str, offset: int, topic: str = "orders", broker: str = "a") -> Event:
    return Event("audit", Act.STANDS, OK, value, topic=topic, queue=0, offset=offset, broker=broker, intact=True)


def received(value: str, offset: int, attempt: int = 1, topic: str = "orders") -> Event:
    place = {"topic": topic, "queue": 0, "offset": offset, "broker": "a"}
    return Event("c", Act.RECEIVE, OK, value, group="cart", attempt=attempt, intact=True, **place)


def good() -> list[Event]:
    """Two plain messages, a transaction committed, one rolled back, one parked, one that nobody knows about."""
    return [
        *done(Act.SEND, value="m1", topic="orders"),
        *done(Act.SEND, UNKNOWN, value="m2", topic="orders"),
        *done(Act.PREPARE, value="t1-a", transaction="t1", topic="orders"),
        *done(Act.PREPARE, value="t1-b", transaction="t1", topic="points"),
        *done(Act.COMMIT, UNKNOWN, transaction="t1"),
        *done(Act.PREPARE, value="t2-a", transaction="t2", topic="orders"),
        *done(Act.ROLLBACK, transaction="t2"),
        *done(Act.PREPARE, value="t3-a", transaction="t3", topic="orders"),
        Event("p", Act.ASKED, OK, transaction="t3", attempt=1),
        Event("p", Act.ASKED, OK, transaction="t3", attempt=2),
        *done(Act.SEND, FAIL, value="m3", topic="orders"),
        received("m1", 0),
        received("t1-a", 2),
        *done(Act.ACK, value="m1", group="cart", attempt=1),
        *done(Act.ACK, UNKNOWN, value="t1-a", group="cart", attempt=1),
        received("t1-a", 2, attempt=2),
        received("m2", 1),
        stands("m1", 0),
        stands("m2", 1),
        stands("t1-a", 2),
        stands("t1-b", 0, "points"),
        Event("audit", Act.STATE, OK, "committed", transaction="t1", attempt=0),
        Event("audit", Act.STATE, OK, "rolled_back", transaction="t2", attempt=0),
        Event("audit", Act.STATE, OK, "parked", transaction="t3", attempt=2),
    ]


def test_a_good_history_is_good() -> None:
    report = check(good(), check_max=2)
    assert report.ok, report
    assert report.counts["recovered"] == 1
    assert report.counts["committed"] == 3
    assert "parked" in str(report)


def without(events: list[Event], value: str, act: Act) -> list[Event]:
    return [e for e in events if not (e.value == value and e.act is act)]


BAD: dict[str, tuple[str, str, object]] = {
    "a sent message is gone": ("lost", "m1", lambda g: without(g, "m1", Act.STANDS)),
    "a group never got one": ("lost", "m1", lambda g: without(g, "m1", Act.RECEIVE)),
    "half of a transaction": ("torn", "t1", lambda g: without(g, "t1-b", Act.STANDS)),
    "a rolled back one": ("resurrected", "t2-a", lambda g: [*g, stands("t2-a", 3)]),
    "a failed send": ("resurrected", "m3", lambda g: [*g, stands("m3", 3)]),
    "nobody sent it": ("unexpected", "m9", lambda g: [*g, stands("m9", 3)]),
    "twice in a queue": ("repeated", "m1", lambda g: [*g, stands("m1", 3)]),
    "once at each broker": ("repeated", "m1", lambda g: [*g, stands("m1", 0, broker="b")]),
    "an undecided one": ("leaked", "t3-a", lambda g: [*g, stands("t3-a", 3)]),
    "read before its commit": (
        "leaked",
        "t1-a",
        lambda g: [*g[:4], *done(Act.PREPARE, value="t1-a", transaction="t1"), received("t1-a", 2), *g[4:]],
    ),
    "another payload": (
        "altered",
        "m1",
        lambda g: [replace(e, intact=False) if e == stands("m1", 0) else e for e in g],
    ),
    "both outcomes": ("contradiction", "t2", lambda g: [*g, *done(Act.COMMIT, transaction="t2")]),
    "another end than was told": (
        "contradiction",
        "t2",
        lambda g: [replace(e, value="committed") if e.act is Act.STATE and e.transaction == "t2" else e for e in g],
    ),
    "one place for two": ("moved", "m9", lambda g: [*g, *done(Act.SEND, value="m9", topic="orders"), stands("m9", 0)]),
    "it was elsewhere": ("moved", "m1", lambda g: [*g, received("m1", 7)]),
    "acknowledged and again": ("unacked", "m1", lambda g: [*g, received("m1", 0, attempt=2)]),
    "asked too often": ("overasked", "t3", lambda g: [*g, Event("p", Act.ASKED, OK, transaction="t3", attempt=3)]),
    "the count was reset": ("overasked", "t3", lambda g: [*g, Event("p", Act.ASKED, OK, transaction="t3", attempt=1)]),
    "still open": ("unsettled", "t4", lambda g: [*g, Event("audit", Act.STATE, OK, "open", transaction="t4")]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_noticed(name: str) -> None:
    what, subject, spoil = BAD[name]
    report = check(spoil(good()), check_max=2)  # type: ignore[operator]
    assert subject in report.named(what), report


def test_a_hole_in_a_queue_is_noticed() -> None:
    report = check([*good(), *done(Act.SEND, value="m9", topic="orders"), received("m9", 9), stands("m9", 9)])
    assert [v.what for v in report.violations] == ["gap"]


def test_one_lost_and_one_repeated_do_not_cancel_out() -> None:
    report = check([*without(good(), "m1", Act.STANDS), stands("t1-a", 0)])
    assert report.named("lost") == ["m1"]
    assert report.named("repeated") == ["t1-a"]
    assert len([e for e in good() if e.act is Act.STANDS]) == 4


def test_a_late_note_of_an_earlier_delivery_is_no_redelivery() -> None:
    """Another consumer of the group had it in its hands before; it only writes it down later."""
    events = [*good(), received("m1", 0, attempt=1)]
    assert check(events).ok


def test_a_report_shows_the_events_around_a_violation() -> None:
    text = str(check(without(good(), "m1", Act.STANDS)))
    assert "lost: m1" in text
    assert '"act": "send"' in text


def test_histories_survive_their_process(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    with history.call("p1", Act.SEND, value="p1-1", topic="orders") as call:
        call.details["message_id"] = "ab"
    with history.call("p1", Act.SEND, value="p1-2") as call:
        raise Rejected(Code.CONFLICT)
    assert call.result is FAIL
    with history.call("p1", Act.SEND, value="p1-3") as call:
        raise Unknown(Code.TIMED_OUT)
    assert call.result is UNKNOWN
    with history.call("p1", Act.SEND, value="p1-4") as call:
        raise Overloaded(Code.DISK_FULL)
    assert call.result is FAIL
    history.close()
    with path.open("a") as file:
        file.write('{"process": "p1", "act": "se')  # killed while writing
    events = list(read(path))
    assert events == history.events
    assert [e.kind for e in events] == [INVOKE, OK, INVOKE, FAIL, INVOKE, UNKNOWN, INVOKE, FAIL]
    assert events[1].message_id == "ab"
    assert "CONFLICT" in (events[3].note or "")


def test_other_exceptions_are_not_swallowed() -> None:
    history = History()
    with pytest.raises(ZeroDivisionError), history.call("p", Act.SEND, value="v"):
        raise ZeroDivisionError
    assert history.events[-1].kind is UNKNOWN


def test_payloads_tell_whether_they_are_intact() -> None:
    body = payload("p1-1", transaction="t")
    content, intact = unpack(body)
    assert intact
    assert (content["value"], content["transaction"]) == ("p1-1", "t")
    assert unpack(body.replace(b"xx", b"xy", 1)) == (
        {**content, "filler": "xy" + "x" * (len(content["filler"]) - 2)},
        False,
    )
    assert unpack(b"\xff") == ({}, False)
    assert unpack(b"[]") == ({}, False)


def test_a_message_that_died_for_a_group_is_not_lost_for_it() -> None:
    """What a consumer of whole batches was given may die before it came to it (GUARANTEES.md, I25)."""
    events = [
        *done(Act.SEND, value="m1", topic="orders"),
        *done(Act.SEND, value="m2", topic="orders"),
        received("m1", 0),
        stands("m1", 0),
        stands("m2", 1),
    ]
    assert check(events).named("lost") == ["m2"]
    for fate in ("dead", "discarded"):
        assert check([*events, Event("audit", Act.FATE, OK, "m2", topic="orders", group="cart", note=fate)]).ok
    assert not check([*events, Event("audit", Act.FATE, OK, "m2", topic="orders", group="cart", note="waiting")]).ok


def test_what_an_operator_has_asked_anew_is_asked_with_the_same_numbers_again() -> None:
    asked = [Event("p", Act.ASKED, OK, transaction="t", attempt=attempt) for attempt in (1, 2, 1)]
    assert check(asked, check_max=2).named("overasked") == ["t"]
    recheck = done(Act.RECHECK, transaction="t")
    assert check([*asked[:2], *recheck, asked[2]], check_max=2).ok
    assert check([*recheck, Event("p", Act.ASKED, OK, transaction="t", attempt=3)], check_max=2).named("overasked")
