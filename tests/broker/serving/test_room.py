"""Bytes and calls that all calls hold together, and which connection is closed when they are too many."""

import queue
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from escrowmq.broker.serving import connections, room
from escrowmq.broker.serving.connections import Guard, Probe
from escrowmq.broker.serving.room import Allowance, Room
from escrowmq.errors import Code, Overloaded
from escrowmq.platform.descriptors import connection_share


def test_room_is_waited_for_and_given_back():
    hall = Room(100, 10, pytest.fail)
    began, done = threading.Event(), threading.Event()

    def second():
        with hall.call("b") as held:
            began.set()
            hall.take(held, 60)
            done.set()

    with hall.call("a") as first:
        hall.take(first, 60)
        thread = threading.Thread(target=second)
        thread.start()
        assert began.wait(10)
        assert not done.is_set()
    assert done.wait(10)
    thread.join()
    assert hall.used == 0


def test_nothing_alone_is_too_large():
    hall = Room(100, 10, pytest.fail)
    with hall.call("a") as held:
        hall.take(held, 1000)
        assert hall.used == 1000


def test_without_room_it_is_refused_when_everybody_reads(monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", 0.05)
    told = []
    hall = Room(100, 10, pytest.fail, told.append)
    with hall.call("a") as first, hall.call("b") as second:
        hall.take(first, 60)
        with pytest.raises(Overloaded) as caught:
            hall.take(second, 60)
        assert caught.value.code is Code.QUEUE_FULL
        assert told == [Code.QUEUE_FULL]


def test_what_waited_for_room_for_too_long_does_not_make_those_behind_it_wait_as_long(monkeypatch):
    """Its client would take the answers for lost."""
    monkeypatch.setattr(room, "PATIENCE", 0.2)
    hall = Room(100, 10, pytest.fail)
    with hall.call("a") as first, hall.call("b") as second:
        hall.take(first, 60)
        with pytest.raises(Overloaded):
            hall.take(second, 60)
        assert hall.patience(second) <= 0.0
        with pytest.raises(Overloaded):
            hall.take(second, 60)
        hall.take(second, 40)
        assert hall.patience(first) > 0.0, "it has not waited"


def test_messages_leave_room_for_who_holds_little_and_for_what_is_no_message():
    """I35"""
    hall = Room(1 << 20, 20_000, pytest.fail)
    with ExitStack() as all_calls:
        greedy = [all_calls.enter_context(hall.call(f"{number}")) for number in range(6)]
        for _ in range(256):
            for held in greedy:
                hall.offer(held, 4096, messages=True)
        assert hall.used <= room.MESSAGES * hall.most_bytes
        sizes = [held.size for held in greedy]
        assert max(sizes) - min(sizes) <= 4096, "equal parts"
        polite = all_calls.enter_context(hall.call("polite"))
        assert hall.offer(polite, min(sizes) - 4096, messages=True)
        assert hall.offer(greedy[0], hall.most_bytes - hall.used), "an acknowledgement"
    assert hall.used == 0


def test_answers_are_given_room_before_they_are_read():
    """I35"""
    hall, unread = Room(1 << 20, 10, pytest.fail), [0]
    with hall.call("a") as first, hall.call("b") as second:
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
    hall = Room(1 << 20, 10, pytest.fail)
    with hall.call("sender") as sender, hall.call("a") as reader, hall.call("b") as other:
        hall.change(reader, 1)
        hall.change(sender, int(0.8 * (1 << 20)))
        assert Allowance(hall, reader, lambda: 0, 1).grant(100_000) == 100_000
        hall.take(other, 50_000, reads=True)


def test_an_answer_without_room_has_those_closed_that_do_not_read():
    closed = []
    hall = Room(1 << 20, 10, closed.append)
    with hall.call("stuck") as stuck, hall.call("b") as held:
        stuck.reads = True
        hall.change(stuck, 1 << 19)
        hall.change(held, 1)
        stuck.stuck_since = time.monotonic() - 10
        assert Allowance(hall, held, lambda: 0, 1).grant(100_000) == 0
    assert closed == ["stuck"]


def test_who_reads_nothing_for_longest_makes_room(monkeypatch):
    monkeypatch.setattr(room, "STUCK_SECONDS", 0.01)
    closed = []
    hall = Room(100, 10, closed.append)
    with hall.call("slow") as slow, hall.call("slower") as slower, hall.call("polite") as held:
        for one in (slower, slow):
            hall.take(one, 40)
        with slower.writing(), slow.writing():
            slower.stuck_since = time.monotonic() - 20
            slow.stuck_since = time.monotonic() - 10
            hall._shut = lambda peer: (closed.append(peer), hall.change(slower, -40))
            hall.take(held, 60)
    assert closed == ["slower"]


def test_more_than_there_is_room_for_is_relieved():
    closed = []
    hall = Room(100, 10, closed.append)
    with hall.call("stuck") as held:
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
    hall = Room(100, 4, closed.append)
    calls = [hall.call(peer) for peer in ("greedy", "greedy", "greedy", "polite")]
    for call in calls:
        call.__enter__()
    with pytest.raises(Overloaded), hall.call("new"):
        pytest.fail("not reached")
    assert closed == ["greedy"]
    for call in calls:
        call.__exit__(None, None, None)
    assert hall.peers() == set()


class Crowd:
    """A listening socket of this process, and connections to it; the first ``spoken`` have said enough."""

    def __init__(self, spoken, silent):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.clients, self.accepted = [], []
        for number in range(spoken + silent):
            client = socket.create_connection(self.server.getsockname())
            self.clients.append(client)
            self.accepted.append(self.server.accept()[0])
            if number < spoken:
                client.sendall(bytes(200))
                self.accepted[-1].recv(200, socket.MSG_WAITALL)

    def open(self):
        """Which are not closed."""
        found = []
        for number, client in enumerate(self.clients):
            client.setblocking(False)
            try:
                assert client.recv(1) == b""
            except BlockingIOError:
                found.append(number)
        return found

    def peer(self, number):
        host, port = self.clients[number].getsockname()
        return f"ipv4:{host}:{port}"

    def close(self):
        for one in (*self.clients, *self.accepted, self.server):
            one.close()


@pytest.fixture
def crowd():
    made = []

    def make(*numbers):
        made.append(Crowd(*numbers))
        return made[0]

    yield make
    for one in made:
        one.close()


def guard(port, most, room=None, unfinished=1 << 30):
    return Guard(port, most, room or Room(100, 100, pytest.fail), unfinished)


def test_bytes_without_an_end_are_not_gathered(crowd):
    people = crowd(3, 0)
    hall = Room(100, 100, pytest.fail)
    watch = guard(people.port, 100, hall, unfinished=1000)
    hall.arrived(people.peer(0))
    watch.look(1000.0)

    def bring(number, size):
        people.clients[number].sendall(bytes(size))
        people.accepted[number].recv(size, socket.MSG_WAITALL)

    for _ in range(3):
        bring(0, 800)
        hall.arrived(people.peer(0))  # a request was whole
        bring(1, 400)
        watch.look(1000.0)
    assert people.open() == [0, 2]
    bring(2, 900)
    watch.look(1000.0)
    assert people.open() == [0, 2]
    watch.close()


def test_who_never_speaks_is_closed_after_a_while_and_who_spoke_is_not(crowd):
    people = crowd(2, 3)
    watch = guard(people.port, 100)
    assert watch.look(1000.0) == 0
    assert watch.look(1000.0 + connections.SILENT_SECONDS) == 3
    assert people.open() == [0, 1]
    watch.close()


def test_under_pressure_the_wait_is_short(crowd):
    people = crowd(1, 3)
    watch = guard(people.port, 6)
    watch.look(1000.0)
    assert watch.look(1000.0 + connections.PRESSED_SECONDS) == 3
    assert people.open() == [0]
    watch.close()


def test_a_surplus_is_closed_at_once_and_those_with_calls_last(crowd):
    people = crowd(4, 2)
    hall = Room(100, 100, pytest.fail)
    calls = [hall.call(people.peer(number)) for number in (1, 3)]
    for call in calls:
        call.__enter__()
    watch = guard(people.port, 2, hall)
    assert watch.look(1000.0) == 4
    assert people.open() == [1, 3]
    watch.close()


def test_the_bound_leaves_descriptors_to_others():
    watch = guard(1, 1 << 30)
    assert watch.bound == connection_share()
    watch.close()


def test_one_peer_can_be_closed(crowd):
    people = crowd(3, 0)
    watch = guard(people.port, 100)
    watch.shut(people.peer(1))
    assert people.open() == [0, 2]
    watch.close()


def test_who_finds_that_one_must_go_does_not_look_for_it(crowd, monkeypatch):
    """With thousands of connections that takes long, and it may be who gives the answers of a round."""
    people = crowd(3, 0)
    watch = guard(people.port, 100)
    looked, looks = queue.SimpleQueue(), watch._probe.connections
    monkeypatch.setattr(
        watch._probe, "connections", lambda port: (looked.put(threading.current_thread()), looks(port))[1]
    )
    watch.start()
    for number in (0, 2):
        watch.shut_soon(people.peer(number))
    while watch.closed < 2:
        assert looked.get(timeout=60) is watch._thread
    assert people.open() == [1]
    watch.close()


def test_a_probe_works_without_a_descriptor(crowd, monkeypatch):
    import resource

    probe = Probe()
    people = crowd(2, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (people.accepted[-1].fileno() + 1, hard))
    try:
        seen = probe.connections(people.port)
        assert [one.peer for one in seen] == [people.peer(n) for n in range(3)]
        assert [one.received for one in seen] == [200, 200, 0]
        assert probe.shut(seen[0], people.port)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        probe.close()
    assert people.open() == [1, 2]
