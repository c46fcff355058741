"""A connection, read by a thread and by an event loop: silence, full sockets, closing, forks, what is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from framed_broker import PATIENCE, FramedBroker, eventually
from test_served_link import begin, bodies, outcome, parcel, patient, receive, send, sent_again  # noqa: F401

from escrowmq.client.links import connection as connections
from escrowmq.client.links import exchanges
from escrowmq.client.links import link as links
from escrowmq.errors import Code, Unknown
from escrowmq.testing.link import TwinLink
from escrowmq.wire import frames
from escrowmq.wire.frames import Kind
from escrowmq.wire.link import Phase

MUCH = 60_000
"""Bytes of a body with which a socket that nobody reads is soon full."""


@pytest.fixture
def twin():
    made = TwinLink()
    made.action("groups.subscribe", {"group": "g", "topics": ["news"]}, 1)
    return made


@pytest.fixture
def broker(twin):
    made = FramedBroker(twin)
    yield made
    made.close()


@contextmanager
def running_loop():
    """An event loop on a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


@pytest.fixture(params=["thread", "loop"])
def link(request, broker, monkeypatch):
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.2)
    made = broker.link()
    if request.param == "thread":
        yield made
        made.close()
    else:
        with running_loop() as loop:
            made.attach(loop)
            yield made
            made.close()


OTHERS: set[threading.Thread] = set()
"""Threads that were there before the test: connections of other tests, which end when they end."""


@pytest.fixture(autouse=True)
def others():
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


def threads(name="escrowmq-reader"):
    return [thread for thread in threading.enumerate() if thread.name == name and thread not in OTHERS]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_answers_come_to_the_thread_that_reads_or_to_the_loop(link, broker):
    send(link)
    told: Future = Future()
    link.parcel(parcel(), lambda answer: told.set_result(threading.current_thread().name))
    assert (told.result(PATIENCE) == "escrowmq-reader") is (link._loop is None)
    assert bool(threads()) is (link._loop is None)


def test_a_receive_waits_for_a_message_and_can_be_withdrawn(link, broker, twin):
    waiting = receive(link)
    broker.wait(lambda: "receive" in broker.kinds)
    begin(link, parcel(b"news", topic="news"))
    assert waiting.result(PATIENCE).column("body").to_pylist() == [b"news"]
    waiting = receive(link)
    broker.wait(lambda: broker.kinds.count("receive") == 2)
    assert waiting.cancel() is False
    assert waiting.result(PATIENCE).num_rows == 0
    assert broker.cancels == 1


def test_a_receive_that_is_held_is_withdrawn_without_a_word(twin, broker):
    broker.silent = True
    link = broker.link()
    waiting = receive(link)
    waiting.cancel()
    assert waiting.result(PATIENCE).num_rows == 0
    link.close()


def test_what_a_full_socket_does_not_take_leaves_in_order_when_it_does(link, broker, twin):
    send(link)
    broker.deaf = True
    given = [parcel(b"%05d" % n + bytes(MUCH)) for n in range(150)]
    answers: list[Future] = []
    sending = threading.Thread(target=lambda: answers.extend(begin(link, one) for one in given))
    sending.start()
    eventually(lambda: link._connection._out)
    broker.deaf = False
    broker._tell()
    sending.join(PATIENCE)
    for answer in answers:
        answer.result(PATIENCE)
    assert [body[:5] for body in bodies(twin)[1:]] == [b"%05d" % n for n in range(150)]


def test_a_socket_that_takes_nothing_holds_up_its_sender_for_a_bounded_time(twin, broker, monkeypatch):
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.0)
    link = broker.link()
    send(link)
    broker.deaf = True
    answers = [begin(link, parcel(bytes(MUCH))) for _ in range(150)]
    lost = eventually(lambda: [a for a in answers if a.done() and a.exception() is not None])
    assert {answer.exception().code for answer in lost} == {Code.DISCONNECTED}
    link.close()


def test_on_a_loop_a_full_socket_holds_up_nobody_and_memory_is_bounded(twin, broker, monkeypatch):
    monkeypatch.setattr(connections, "UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.1)
    with running_loop() as loop:
        link = broker.link()
        link.attach(loop)
        send(link)
        broker.deaf = True
        answers = [begin(link, parcel(bytes(MUCH))) for _ in range(300)]
        refused = eventually(lambda: [one for one in answers if one.done() and one.exception() is not None])
        assert not any(answer.exception().left for answer in refused)
        link.close()
        assert {outcome(answer) for answer in answers} <= {None, Code.CLOSED, Code.DISCONNECTED}


def test_silence_is_asked_about_and_given_up(link, broker, monkeypatch):
    monkeypatch.setattr(links, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(connections, "SILENT_TICKS", 1)
    monkeypatch.setattr(connections, "GONE_TICKS", 3000)
    send(link)
    waiting = receive(link)
    broker.wait(lambda: broker.pings >= 2)  # as long as there is an answer, one waits
    assert not waiting.done()
    broker.mute = True
    monkeypatch.setattr(connections, "GONE_TICKS", 20)
    with pytest.raises(Unknown) as caught:
        waiting.result(PATIENCE)
    assert caught.value.code is Code.DISCONNECTED


def test_an_overdue_answer_ends_the_connection_though_the_broker_answers_pings(link, broker, monkeypatch):
    send(link)  # before every answer is overdue at once
    monkeypatch.setattr(links, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(exchanges, "STALL_SECONDS", 0.0)
    waiting = receive(link, wait_ms=0)
    with pytest.raises(Unknown, match="overdue"):
        waiting.result(PATIENCE)


def test_a_lost_connection_fails_what_is_unanswered_oldest_first(link, broker):
    send(link)
    broker.mute = True
    order: list[int] = []
    ended = threading.Event()
    for number in range(5):
        link.parcel(parcel(), lambda answer, number=number: (order.append(number), number == 4 and ended.set()))
    broker.wait(lambda: len(broker.kinds) == 6)
    broker.drop()
    assert ended.wait(PATIENCE)
    assert order == [0, 1, 2, 3, 4]


def test_a_broker_that_says_goodbye_is_sent_nothing_more(link, broker, twin):
    """Though it neither ends that connection nor answers anything over it any more."""
    send(link)
    broker.say(frames.gone())
    eventually(lambda: link.state.phase is Phase.AWAY)
    sent_again(link)
    assert len(broker.connections) == 2
    assert broker.heard[0] == [Kind.HELLO, Kind.SEND]


def test_what_is_asked_while_the_broker_stops_waits_for_what_was_asked_before(link, broker, twin):
    send(link)
    broker.mute = True
    before = begin(link, parcel(b"before"))
    broker.wait(lambda: len(broker.kinds) == 2)
    broker.say(frames.gone())
    eventually(lambda: link.state.phase is Phase.DRAINING)
    behind = begin(link, parcel(b"behind"))
    assert not behind.done()
    broker.mute = False
    broker.say(frames.rows_answer(2, [(0, 1, 0, 1, None)]))
    assert before.result(PATIENCE)[0][0] == Code.OK
    eventually(behind.done)
    assert broker.heard[0] == [Kind.HELLO, Kind.SEND, Kind.SEND]


def test_a_connection_whose_broker_is_gone_and_silent_is_ended(link, broker, monkeypatch):
    monkeypatch.setattr(links, "TICK_SECONDS", 0.02)
    send(link)
    broker.mute = True
    broker.say(frames.gone())
    eventually(lambda: not link._open)


def test_an_action_that_nobody_answers_does_not_hide_that_the_broker_is_gone(link, broker, monkeypatch):
    monkeypatch.setattr(links, "TICK_SECONDS", 0.02)
    send(link)
    broker.mute = True
    with pytest.raises(Unknown) as caught:
        link.action("hello", {}, 0.01)
    assert caught.value.code is Code.TIMED_OUT
    eventually(lambda: not link.state.is_there)


def test_closing_answers_everything_once_and_withdraws_receives(link, broker):
    send(link)
    polls = [receive(link, member) for member in range(3)]
    broker.wait(lambda: broker.kinds.count("receive") == 3)
    broker.mute = True
    unanswered = begin(link, parcel())
    broker.wait(lambda: len(broker.kinds) == 5)
    link.close()
    assert [poll.result(PATIENCE).num_rows for poll in polls] == [0, 0, 0]
    assert unanswered.exception(PATIENCE).code is Code.CLOSED
    broker.wait(lambda: broker.goodbyes == 1)
    assert begin(link, parcel()).exception(PATIENCE).code is Code.CLOSED
    link.close()


def test_nothing_follows_a_goodbye(link, broker, monkeypatch):
    """Not even a ping while an answer is overdue: then the connection ends."""
    monkeypatch.setattr(links, "TICK_SECONDS", 0.02)
    send(link)
    broker.mute = True
    unanswered = begin(link, parcel())
    broker.wait(lambda: len(broker.kinds) == 2)
    link.close()
    assert unanswered.exception(PATIENCE).code is Code.CLOSED
    for thread in broker.threads[1:]:  # until the broker has read to the end
        thread.join(PATIENCE)
    heard = broker.heard[0]
    assert [kind for kind in heard if kind != Kind.PING] == [Kind.HELLO, Kind.SEND, Kind.SEND, Kind.GOODBYE]
    assert heard[-1] == Kind.GOODBYE


def test_it_may_be_closed_by_what_an_answer_calls(link, broker):
    closed = threading.Event()
    link.parcel(parcel(), lambda _: (link.close(), closed.set()))
    assert closed.wait(PATIENCE)
    eventually(lambda: not threads())


def test_a_signal_handler_may_close_it_wherever_it_interrupts(twin, broker):
    link = broker.link()
    send(link)
    with link._lock, link._connection._lock:  # as when the handler runs on the thread that holds them
        link.close()
    assert begin(link, parcel()).exception(PATIENCE).code is Code.CLOSED


def test_it_may_be_closed_in_the_middle_of_a_send(link, broker):
    send(link)
    broker.deaf = True
    answers: list[Future] = []
    sending = threading.Thread(target=lambda: answers.extend(begin(link, parcel(bytes(MUCH))) for _ in range(150)))
    sending.start()
    eventually(lambda: link._connection._out)
    link.close()
    sending.join(PATIENCE)
    assert not sending.is_alive()
    assert Code.CLOSED in {outcome(answer) for answer in answers} <= {None, Code.CLOSED}


def test_a_loop_that_is_closed_before_the_link_leaves_nothing(twin, broker, monkeypatch):
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.1)
    before = descriptors()
    with running_loop() as loop:
        link = broker.link()
        link.attach(loop)
        send(link)
        broker.mute = True
        unanswered = begin(link, parcel())
        broker.wait(lambda: len(broker.kinds) == 2)
    link.close()
    assert unanswered.exception(PATIENCE).code is Code.CLOSED
    broker.close()
    assert descriptors() < before


def test_a_loop_that_stands_still_is_no_silent_broker(twin, broker, monkeypatch):
    monkeypatch.setattr(connections, "GONE_TICKS", 2)
    with running_loop() as loop:
        link = broker.link()
        link.attach(loop)
        send(link)
        go_on = threading.Event()
        loop.call_soon_threadsafe(go_on.wait, PATIENCE)
        waiting = begin(link, parcel())
        broker.wait(lambda: len(broker.kinds) == 2)
        for _ in range(10):
            link._connection.tick()
        go_on.set()
        assert waiting.result(PATIENCE)[0][0] == Code.OK
        link.close()


def test_tasks_of_a_loop_use_it_without_threads(twin, broker):
    async def work():
        link = broker.link()
        link.attach(asyncio.get_running_loop())
        answers = []
        for n in range(100):
            future = asyncio.get_running_loop().create_future()
            link.parcel(parcel(b"%d" % n), lambda a, f=future: f.get_loop().call_soon_threadsafe(f.set_result, a))
            answers.append(await future)
        assert not threads()
        assert len(answers) == 100
        await asyncio.to_thread(link.close)

    asyncio.run(work())
    assert broker.kinds == ["send"] * 100


def test_many_threads_share_a_link(link, broker, twin):
    wrong: list[BaseException] = []

    def work(name):
        try:
            for n in range(40):
                body = b"%s %d" % (name, n) + bytes(70_000 if n % 10 == 9 else 0)
                assert send(link, body)[0][0] == Code.OK
        except BaseException as problem:
            wrong.append(problem)

    workers = [threading.Thread(target=work, args=(b"%d" % number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    for name in range(8):
        mine = [body.rstrip(b"\0") for body in bodies(twin) if body.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, n) for n in range(40)]


def test_a_big_answer_comes_in_pieces(link, broker, twin):
    for _ in range(8):
        send(link, *[os.urandom(1000) for _ in range(50)])
    twin.action("groups.subscribe", {"group": "all", "topics": ["orders"]}, 1)
    answer = receive(link, group="all").result(PATIENCE)
    assert answer.column("body").to_pylist() == bodies(twin)


def test_two_hundred_connects_and_closes_leave_no_descriptor_and_no_thread(twin, broker):
    before = None
    for number in range(200):
        link = broker.link()
        if number % 2:
            send(link)
        else:
            link.parcel(parcel(), lambda answer: None)
        link.close()
        if number == 20:
            before = descriptors()
    eventually(lambda: not threads() and not threads("escrowmq-connect"))
    eventually(lambda: descriptors() <= before)


def test_a_forked_child_connects_anew_and_leaves_the_parents_alone(twin, broker):
    link = broker.link()
    send(link)
    told, say = os.pipe()
    child = os.fork()
    if not child:
        said = b"?"
        try:
            said = b"%d" % send(link, b"of the child")[0][0]
            link.close()
        finally:
            os.write(say, said)
            os._exit(0)
    os.close(say)
    assert os.read(told, 100) == b"%d" % Code.OK
    os.close(told)
    os.waitpid(child, 0)
    parcel()  # whose message id the child has used
    assert send(link)[0][0] == Code.OK
    assert len(broker.connections) == 2
    link.close()


PROGRAM = """
import sys, threading
from contextlib import suppress
sys.path.insert(0, {here!r})
from test_served_link import receive, send
from escrowmq.client.links import link as links
from escrowmq.wire.addresses import Address
links.HOLD_SECONDS = 60.0  # a busy machine
link = links.ServedLink([Address("127.0.0.1", {port})])
send(link)
def work():
    with suppress(Exception):
        while True:
            send(link)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
receive(link)
send(link)
"""


def test_a_process_may_end_in_the_middle(twin, broker):
    program = PROGRAM.format(here=os.path.dirname(__file__), port=broker.address.port)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
