"""A lone request of a carrier runs on the carrier's own thread; everything else, and whatever is due, on the
writer's."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_parcels import Mailer, row

from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, EscrowError
from escrowmq.wire import Exchange, Parcel


class Bell:
    """The engine's bell, which tells when the writer goes to sleep."""

    def __init__(self, bell: Any) -> None:
        self._bell = bell
        self.sleeps = threading.Semaphore(0)

    def acquire(self, timeout: float = -1) -> bool:
        self.sleeps.release()
        return bool(self._bell.acquire(timeout=timeout))

    def release(self) -> None:
        self._bell.release()


class Carrier:
    """This thread as a carrier of a started engine, whose writer sleeps."""

    def __init__(self) -> None:
        self.mailer = Mailer(check_interval=2.0)
        self.engine: Engine = self.mailer.bench.engine
        self.engine.step()
        self.bell = self.engine._bell = Bell(self.engine._bell)  # type: ignore[assignment]
        self.engine.start()
        self.asleep()
        self.engine.run_rounds_here()
        self.answered = threading.Semaphore(0)
        self._sequence = 0

    def asleep(self) -> None:
        """Wait until the writer sleeps (again)."""
        self.bell.sleeps.acquire()

    def post(self, **given: Any) -> list[tuple[Any, threading.Thread]]:
        """The list into which a prepare's answer comes, and the thread that gave it."""
        self._sequence += 1
        answers: list[tuple[Any, threading.Thread]] = []

        def done(answer: Any) -> None:
            answers.append((answer, threading.current_thread()))
            self.answered.release()

        parcel = Parcel(Exchange.PREPARE, [row(**given)], {"session": self.mailer.session}, (7, self._sequence))
        self.mailer.calls.parcel(parcel, done)
        return answers


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    made = Carrier()
    yield made
    made.engine.stop()


def code_of(answer: Any) -> Code:
    return answer.code if isinstance(answer, EscrowError) else Code(answer[0][0])


def test_a_lone_request_runs_here_and_wakes_nobody_twice(carrier: Carrier) -> None:
    first = carrier.post()
    assert not first, "not before the carrier says so"
    carrier.engine.run()
    assert [(code_of(answer), thread) for answer, thread in first] == [(Code.OK, threading.current_thread())]
    carrier.asleep()  # its transaction is due before what the writer slept for: it woke, and knows
    rounds = carrier.engine.rounds
    second = carrier.post()
    carrier.engine.run()
    assert [(code_of(answer), thread) for answer, thread in second] == [(Code.OK, threading.current_thread())]
    assert carrier.engine.rounds == rounds + 1, "due later than the first: the writer sleeps on"


def test_several_are_left_to_the_writer(carrier: Carrier) -> None:
    answers = [carrier.post(), carrier.post()]
    carrier.engine.run()
    for _ in answers:
        carrier.answered.acquire()
    here = threading.current_thread()
    assert all(code_of(answer) is Code.OK and thread is not here for (answer, thread), *_ in answers)


def test_what_is_due_by_the_clock_is_left_to_the_writer(carrier: Carrier) -> None:
    carrier.post()
    carrier.engine.run()
    carrier.asleep()
    carrier.mailer.bench.clock.advance(us=carrier.engine.wake_us - carrier.mailer.bench.clock.now_us())
    late = carrier.post()
    carrier.engine.run()
    carrier.answered.acquire()
    carrier.answered.acquire()
    ((answer, thread),) = late
    assert code_of(answer) is Code.OK
    assert thread is not threading.current_thread()


def test_a_request_of_another_thread_wakes_the_writer(carrier: Carrier) -> None:
    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(carrier.post()))
    other.start()
    other.join()
    carrier.answered.acquire()
    (((answer, thread),),) = answers
    assert code_of(answer) is Code.OK
    assert thread not in (threading.current_thread(), other)


@pytest.mark.parametrize("problem", [RuntimeError("a bug"), MemoryError(), SystemExit()])
def test_a_round_that_dies_here_stops_the_shard_and_answers_everybody(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def dying(requests: Any) -> Callable[..., Any]:
        raise problem

    monkeypatch.setattr(carrier.engine.shard, "run", dying)
    answers = carrier.post()
    carrier.engine.run()
    ((answer, _),) = answers
    assert code_of(answer) is Code.SHARD_STOPPED
    ((late, _),) = carrier.post()
    assert code_of(late) is Code.SHARD_STOPPED
    assert carrier.engine.status == "stopped"


def test_after_the_end_no_round_runs_here(carrier: Carrier) -> None:
    carrier.engine.stop()
    rounds = carrier.engine.rounds
    ((answer, _),) = carrier.post()
    carrier.engine.run()
    assert code_of(answer) is Code.SHARD_STOPPED
    assert carrier.engine.rounds == rounds
