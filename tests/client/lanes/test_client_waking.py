"""How blocked callers are woken: each wakes the next, and nobody depends on one who does not wait, or was
interrupted."""

from __future__ import annotations

import signal
import threading

import pytest

import escrowmq as mq
from escrowmq.client.lanes.blocking import finished
from escrowmq.client.lanes.waiting import ThreadLane, Waiter


def result_of(waiter):
    async def wait():
        return await waiter

    return finished(wait())


def waiting(waiters, results):
    """Threads that wait, one for each, and are blocked when this returns."""

    def wait(at):
        try:
            results[at] = result_of(waiters[at])
        except mq.EscrowError as problem:
            results[at] = problem

    threads = [threading.Thread(target=wait, args=(at,)) for at in results]
    for thread in threads:
        thread.start()
    blocked = threading.Event()
    while not all(waiters[at].blocks for at in results):
        blocked.wait(0.001)
    return threads


def deliver(waiters, values):
    ThreadLane._deliver(None, waiters, values)


def test_each_wakes_the_next_and_all_have_their_own_value():
    waiters, results = [Waiter(60.0) for _ in range(50)], dict.fromkeys(range(50))
    threads = waiting(waiters, results)
    values = [mq.Overloaded(mq.Code.QUEUE_FULL) if at % 7 == 3 else at for at in range(50)]
    deliver(waiters, values)
    for thread in threads:
        thread.join()
    assert list(results.values()) == values
    assert [waiter.next for waiter in waiters] == [*waiters[1:], None]


def test_who_does_not_wait_yet_holds_up_nobody():
    """A caller that waits for several answers, one after the other, has not come to this one."""
    waiters, results = [Waiter(60.0) for _ in range(5)], dict.fromkeys([0, 2, 4])
    threads = waiting(waiters, results)
    deliver([waiters[0], waiters[1], None, *waiters[2:]], [0, 1, None, 2, 3, 4])
    for thread in threads:
        thread.join()
    assert results == {0: 0, 2: 2, 4: 4}
    assert [result_of(waiters[at]) for at in (1, 3)] == [1, 3]


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where this process was started to ignore it, as a shell starts what runs in
    the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_main_thread_holds_up_nobody(interruptible):
    waiters, results = [Waiter(60.0, threading.get_ident()) for _ in range(3)], dict.fromkeys([0, 2])
    threads = waiting(waiters, results)
    interrupted, main = threading.Event(), threading.get_ident()

    def interrupt():
        """Again after a while: a signal that comes just before the wait begins does not end it."""
        while True:
            signal.pthread_kill(main, signal.SIGINT)
            if interrupted.wait(1.0):
                return

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupting.start()
        result_of(waiters[1])
    interrupted.set()
    interrupting.join()
    deliver(waiters, [0, 1, 2])
    for thread in threads:
        thread.join()
    assert results == {0: 0, 2: 2}


def test_a_value_whose_wake_up_never_came_is_found_when_patience_ends():
    patience_of_no_time = -2.0 / 1.2
    waiter = Waiter(patience_of_no_time)
    waiter.value = "there"
    assert result_of(waiter) == "there"
    with pytest.raises(mq.Unknown, match="TIMED_OUT"):
        result_of(Waiter(patience_of_no_time))
