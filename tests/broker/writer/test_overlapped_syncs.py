"""While one round is synced the next is decided: nothing may be answered out of turn, and one failure stops all."""

import threading
from collections.abc import Callable

import pytest
from broker_bench import send

from escrowmq.broker.writer.committer import Committer
from escrowmq.broker.writer.engine import LATE_BYTES, Engine
from escrowmq.broker.writer.rounds import Request, WaitingReceive, least_first
from escrowmq.errors import Code
from escrowmq.ledger.commands import Tick
from escrowmq.schemas import Kind
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.memory_log import MemoryLog


class SlowLog(MemoryLog):
    """A log whose syncs wait for the test."""

    def __init__(self) -> None:
        self.slow = False
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        super().__init__(clock=SimulatedClock())

    def hand_over(self) -> Callable[[], None]:
        write = super().hand_over()

        def finish() -> None:
            if self.slow:
                self.begun.release()
                assert self.may_go.acquire(timeout=60)
            write()

        return finish

    def settle(self) -> None:
        self.settles()

    settles: Callable[[], None] = staticmethod(lambda: None)


@pytest.fixture
def log():
    return SlowLog()


@pytest.fixture
def engine(log):
    engine = Engine(log, SimulatedClock(), BrokerSettings())
    engine.start()
    yield engine
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    engine.stop()


def crowd(engine, log, rounds):
    """Sends in as many rounds: each is under way when the next arrives."""
    log.slow = True
    futures = [engine.submit(send(0, {"topic": "t", "body": b"0"})), engine.submit(send(0, {"topic": "t"}))]
    assert log.begun.acquire(timeout=60)
    futures += [engine.submit(send(0, {"topic": "t", "body": b"%d" % n})) for n in range(rounds)]
    return futures


@pytest.mark.invariant("I1")
def test_no_answer_before_its_own_sync_and_all_in_order(engine, log):
    futures = crowd(engine, log, 3)
    assert not any(future.done() for future in futures)
    done: list[int] = []
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: done.append(number))
    for _ in range(16):
        log.may_go.release()
    answers = [future.result(timeout=60) for future in futures]
    assert done == sorted(done)
    positions = [answer.column("position")[0].as_py() for answer in answers]
    assert positions == sorted(positions)
    assert log.next_position == positions[-1] + 1


def test_a_look_waits_for_what_it_saw(engine, log):
    first, second, *_ = crowd(engine, log, 1)
    look = engine.look(lambda: log.next_position)
    engine.poke()
    assert not look.done()
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    seen = look.result(timeout=60)
    assert first.done()
    assert second.done()
    assert seen > first.result().column("position")[0].as_py()


@pytest.mark.invariant("I34")
def test_a_failed_sync_refuses_its_round_and_the_one_decided_meanwhile(engine, log):
    futures = crowd(engine, log, 3)
    log.fail_next_sync = True
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    for future in futures:
        assert future.exception(timeout=60).code == Code.SHARD_STOPPED
    assert engine.submit(send(0, {"topic": "t"})).exception(timeout=60).code == Code.SHARD_STOPPED
    assert engine.status == "stopped"


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("rounds", [0, 3])
def test_what_a_log_owes_is_done_after_the_answers(engine, log, rounds):
    answered: list[int] = []
    seen: list[int] = []
    log.settles = lambda: seen.append(len(answered))
    futures = crowd(engine, log, rounds)
    for future in futures:
        future.add_done_callback(lambda _: answered.append(1))
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    for future in futures:
        future.result(timeout=60)
    engine.look(lambda: None).result(timeout=60)  # a round later
    assert seen == sorted(seen)
    assert seen[0] > 0  # the first round was answered before what it owed was done
    assert len(seen) > 1 or not rounds


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_log_that_cannot_do_what_it_owes_stops_the_shard_after_the_answers(engine, log, rounds):
    futures = crowd(engine, log, rounds)
    waits = engine.wait_for(lambda: None, 3600 * 1_000_000)

    def settles() -> None:
        raise OSError("no disk")

    log.settles = settles
    log.slow = False
    for _ in range(16):
        log.may_go.release()
    assert futures[0].result(timeout=60) is not None  # it is durable, so it is answered
    for future in futures[1:]:
        assert future.exception(timeout=60) is None or future.exception().code == Code.SHARD_STOPPED
    assert waits.exception(timeout=60).code == Code.SHARD_STOPPED  # nobody has to come for that
    assert engine.submit(send(0, {"topic": "t"})).exception(timeout=60).code == Code.SHARD_STOPPED
    assert engine.status == "stopped"


def busy_log(engine, log):
    """The first of three rounds of one message is in the air, and each brings the next. Their futures, and what tells
    that the third is decided."""
    log.slow = True
    decided, waiting = threading.Event(), []

    def seen(event):
        """On the writer, as it decides: something always waits, so that rounds are synced beside it."""
        if event.kind is not Kind.PLAIN:
            return
        if len(waiting) < 2:
            # Too large to enter the round that is decided now, while that waits for the disk.
            waiting.append(engine.submit(send(0, {"topic": "t", "body": bytes(LATE_BYTES)})))
        else:
            decided.set()

    engine.shard.observers.append(seen)
    first = engine.submit(send(0, {"topic": "t"}))
    assert log.begun.acquire(timeout=60)  # the first round is synced beside the writer, for the second waits
    assert not decided.is_set()
    return first, waiting, decided


@pytest.mark.invariant("I35")
def test_who_asks_for_little_while_a_round_waits_for_the_disk_enters_that_round(engine, log):
    """I35: two syncs, the one in the air and the next; not three."""
    first, waiting, decided = busy_log(engine, log)
    log.may_go.release()
    first.result(timeout=60)
    assert log.begun.acquire(timeout=60)  # the second round
    assert decided.wait(60)  # and the third is decided
    polite = engine.submit(send(0, {"topic": "t", "body": b"polite"}), source="polite")
    large = engine.submit(send(0, {"topic": "t", "body": bytes(LATE_BYTES)}), source="large")
    log.may_go.release()
    waiting[0].result(timeout=60)
    assert log.begun.acquire(timeout=60)
    assert not polite.done()
    log.may_go.release()
    waiting[1].result(timeout=60)
    assert polite.result(timeout=60).column("code")[0].as_py() == 0
    assert log.begun.acquire(timeout=60)
    assert not large.done(), "what takes long to decide does not keep the disk waiting"
    log.may_go.release()
    assert large.result(timeout=60).column("code")[0].as_py() == 0


class Steps:
    """What a committer was given, as it happens; a test lets it go on."""

    def __init__(self):
        self.happened = []
        self.begun = threading.Semaphore(0)
        self.may_go = {}

    def act(self, name):
        self.may_go[name] = threading.Event()

        def run():
            self.happened.append(name)
            self.begun.release()
            assert self.may_go[name].wait(60)

        return run

    def goes_on(self, name):
        self.may_go[name].set()

    def begins(self, count=1):
        for _ in range(count):
            assert self.begun.acquire(timeout=60)


def test_the_disk_does_not_wait_until_answers_are_given():
    committer, steps = Committer(), Steps()
    assert not committer.wait()
    committer.put(steps.act("sync 1"), steps.act("tell 1"))
    steps.begins()
    steps.goes_on("sync 1")
    steps.begins()
    committer.put(steps.act("sync 2"), steps.act("tell 2"))
    steps.begins()
    assert steps.happened == ["sync 1", "tell 1", "sync 2"], "beside the answers"
    steps.goes_on("sync 2")
    assert committer._syncing.locked(), "no third sync before the first is answered"
    steps.goes_on("tell 1")
    committer.wait()
    steps.begins()
    assert steps.happened[-1] == "tell 2", "in order"
    steps.goes_on("tell 2")
    committer.close()


def test_one_thread_is_enough_while_answers_do_not_last():
    committer = Committer()
    for _ in range(20):
        committer.put(lambda: None, lambda: None)
        committer.drain()
    assert len(committer._threads) == 1
    committer.close()


def test_what_raises_keeps_no_other_round_from_its_sync(caplog):
    committer, told = Committer(), []

    def broken():
        raise ZeroDivisionError

    committer.put(broken, broken)
    committer.put(lambda: None, lambda: told.append(True))
    committer.drain()
    assert told == [True]
    assert caplog.text.count("a round could not be committed") == 2
    committer.close()


def test_answers_to_who_asks_little_come_first_and_receives_last():
    class Asked(Request):
        def __repr__(self):
            return f"{self.source}"

    much = [Asked(Tick(1), source="much") for _ in range(3)]
    receive, polite, look = WaitingReceive(Tick(1)), Asked(Tick(1), source="polite"), Asked(Tick(1))
    pairs = [(request, number) for number, request in enumerate([*much, receive, polite, look])]
    assert [number for _, number in least_first(pairs)] == [5, 4, 0, 1, 2, 3]
