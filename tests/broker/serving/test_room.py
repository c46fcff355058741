"""Bytes and calls that all calls hold together, and which connection is closed when they are too many."""

import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from escrowmq.broker.serving import room
from escrowmq.broker.serving.room import Allowance, Held, Room
from escrowmq.errors import Code, Overloaded


@contextmanager
def holding(hall, peer, shut=pytest.fail):
    """What a connection holds; given back in the end."""
    held = Held(peer, shut)
    hall.enter(held)
    try:
        yield held
    finally:
        hall.leave(held)


def test_room_is_waited_for_and_given_back(monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", 600.0)
    hall = Room(100, 10)
    began, done = threading.Event(), threading.Event()

    def second():
        with holding(hall, "b") as held:
            began.set()
            hall.take(held, 60)
            done.set()

    with holding(hall, "a") as first:
        hall.take(first, 60)
        thread = threading.Thread(target=second)
        thread.start()
        assert began.wait(60)
        assert not done.is_set()
    assert done.wait(60)
    thread.join()
    assert hall.used == 0


def test_nothing_alone_is_too_large():
    hall = Room(100, 10)
    with holding(hall, "a") as held:
        hall.take(held, 1000)
        assert hall.used == 1000


def test_without_room_it_is_refused_when_everybody_reads(monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", 0.05)
    told = []
    hall = Room(100, 10, told.append)
    with holding(hall, "a") as first, holding(hall, "b") as second:
        hall.take(first, 60)
        with pytest.raises(Overloaded) as caught:
            hall.take(second, 60)
        assert caught.value.code is Code.QUEUE_FULL
        assert told == [Code.QUEUE_FULL]


def test_what_waited_for_room_for_too_long_does_not_make_those_behind_it_wait_as_long(monkeypatch):
    """Its client would take the answers for lost."""
    now = [1000.0]
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hall = Room(100, 10)
    monkeypatch.setattr(hall._changed, "wait", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with holding(hall, "a") as first, holding(hall, "b") as second:
        hall.take(first, 60)
        with pytest.raises(Overloaded):
            hall.take(second, 60)
        assert now[0] == pytest.approx(1000.0 + room.PATIENCE)
        assert hall.patience(second) <= 0.0
        with pytest.raises(Overloaded):
            hall.take(second, 60)
        assert now[0] == pytest.approx(1000.0 + room.PATIENCE)
        hall.take(second, 40)
        assert hall.patience(first) > 0.0, "it has not waited"


@pytest.mark.invariant("I35")
def test_messages_leave_room_for_who_holds_little_and_for_what_is_no_message():
    """I35"""
    hall = Room(1 << 20, 20_000)
    with ExitStack() as all_calls:
        greedy = [all_calls.enter_context(holding(hall, f"{number}")) for number in range(6)]
        for _ in range(256):
            for held in greedy:
                hall.offer(held, 4096, messages=True)
        assert hall.used <= room.MESSAGES * hall.most_bytes
        sizes = [held.size for held in greedy]
        assert max(sizes) - min(sizes) <= 4096, "equal parts"
        polite = all_calls.enter_context(holding(hall, "polite"))
        assert hall.offer(polite, min(sizes) - 4096, messages=True)
        assert hall.offer(greedy[0], hall.most_bytes - hall.used), "an acknowledgement"
    assert hall.used == 0


@pytest.mark.invariant("I35")
def test_answers_are_given_room_before_they_are_read():
    """I35"""
    hall, unread = Room(1 << 20, 10), [0]
    with holding(hall, "a") as first, holding(hall, "b") as second:
        for held in (first, second):
            hall.change(held, 1)
        one = Allowance(hall, first, lambda: unread[0], 1000)
        assert one.grant(100_000) == 100_000
        assert 100_000 <= one.grant(1 << 20) < room.READS * hall.most_bytes, "not more than is left to others"
        assert one.size == first.size - 1
        assert one.grant(1 << 20) == 0
        two = Allowance(hall, second, lambda: unread[0], 1000)
        assert two.grant(70_000) == 70_000
        unread[0] = 1000
        assert two.grant(1) == 0, "it has not taken what it was given"


def test_those_who_send_without_bound_keep_no_reader_from_reading():
    """I35: senders may hold seven eighths, and what is left is the readers'."""
    hall = Room(1 << 20, 10)
    with holding(hall, "sender") as sender, holding(hall, "a") as reader, holding(hall, "b") as other:
        hall.change(reader, 1)
        hall.change(sender, int(0.8 * (1 << 20)))
        assert Allowance(hall, reader, lambda: 0, 1).grant(100_000) == 100_000
        hall.take(other, 50_000, reads=True)


def test_an_answer_without_room_has_those_closed_that_do_not_read():
    closed = []
    hall = Room(1 << 20, 10)
    with holding(hall, "stuck", lambda: closed.append("stuck")) as stuck, holding(hall, "b") as held:
        stuck.reads = True
        hall.change(stuck, 1 << 19)
        hall.change(held, 1)
        stuck.stuck_since = time.monotonic() - 10
        assert Allowance(hall, held, lambda: 0, 1).grant(100_000) == 0
    assert closed == ["stuck"]


@pytest.mark.invariant("I35")
def test_who_reads_nothing_for_longest_makes_room(monkeypatch):
    monkeypatch.setattr(room, "STUCK_SECONDS", 0.01)
    closed = []
    hall = Room(100, 10)
    with (
        holding(hall, "slow") as slow,
        holding(hall, "slower", lambda: (closed.append("slower"), hall.change(slower, -40))) as slower,
        holding(hall, "polite") as held,
    ):
        for one in (slower, slow):
            hall.take(one, 40)
        slower.stuck_since = time.monotonic() - 20
        slow.stuck_since = time.monotonic() - 10
        hall.take(held, 60)
    assert closed == ["slower"]


def test_more_than_there_is_room_for_is_relieved():
    closed = []
    hall = Room(100, 10)
    with holding(hall, "stuck", lambda: closed.append("stuck")) as held:
        hall.change(held, 200)
        hall.relieve()
        assert closed == []
        held.stuck_since = time.monotonic() - 10
        hall.relieve()
        hall.relieve()
    assert closed == ["stuck"], "once"


def test_calls_are_bounded_and_a_connection_with_most_of_them_is_closed(monkeypatch):
    monkeypatch.setattr(room, "SHARE", 2)
    closed = []
    hall = Room(100, 4)
    greedy, polite = Held("greedy", lambda: closed.append("greedy")), Held("polite", pytest.fail)
    for held in (greedy, greedy, greedy, polite):
        hall.begin_call(held)
    with pytest.raises(Overloaded):
        hall.begin_call(Held("new", pytest.fail))
    assert closed == ["greedy"]
    for held in (greedy, greedy, greedy, polite):
        hall.end_call(held)
    hall.begin_call(Held("new", pytest.fail))
