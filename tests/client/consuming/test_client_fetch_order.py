"""I20: answers are handed out in the order of their questions, whichever comes first."""

from concurrent.futures import Future

import pyarrow as pa
import pytest

from escrowmq.client.consuming.fetching import Fetcher
from escrowmq.client.lanes.timer import Timer


class Broker:
    def __init__(self):
        self.asked: list[Future[pa.RecordBatch]] = []

    def exchange(self, kind, batch, options):
        self.asked.append(Future())
        return self.asked[-1]


def rows(*values):
    return pa.RecordBatch.from_pydict({"n": pa.array(values, pa.int64())})


@pytest.mark.invariant("I20")
def test_a_later_answer_waits_for_the_earlier_one():
    broker, timer = Broker(), Timer()
    fetcher = Fetcher([broker], {}, 2, timer, lambda: None)
    fetcher.start(10)
    first, second = broker.asked
    second.set_result(rows(2))
    assert fetcher.take() is None
    assert len(broker.asked) == 2, "an answer that is held back still counts as under way"
    first.set_result(rows(1))
    taken = [fetcher.take(), fetcher.take()]
    assert [batch.column("n").to_pylist() for _, batch in taken] == [[1], [2]]
    assert fetcher.close(1.0) == []
    timer.close()


def test_an_empty_or_lost_one_holds_nobody_up():
    broker, timer = Broker(), Timer()
    fetcher = Fetcher([broker], {}, 2, timer, lambda: None)
    fetcher.start(10)
    first, second = broker.asked
    second.set_result(rows(2))
    first.set_result(rows())
    assert fetcher.take()[1].column("n").to_pylist() == [2]
    assert fetcher.close(1.0) == []
    timer.close()


def test_who_waits_while_what_was_fetched_is_given_back_has_the_broker_asked_again():
    """Between taking and waiting, the rest may have lain here for too long and been given back: waiting must not last
    for ever."""
    broker, timer, given_back, arrived = Broker(), Timer(), [], []
    fetcher = Fetcher(
        [broker], {}, 2, timer, lambda: arrived.append(1), give_back=lambda number, batch: given_back.append(batch)
    )
    fetcher.start(10)
    for number, asked in enumerate(list(broker.asked)):
        asked.set_result(rows(number))
    assert fetcher.take() is not None
    fetcher._ready[0] = fetcher._ready[0]._replace(until=0.0)
    arrived.clear()
    fetcher._return_late()
    assert len(given_back) == 1
    assert arrived, "whoever waits is woken"
    assert fetcher.has_something(), "and looks"
    before = len(broker.asked)
    assert fetcher.take() is None
    assert len(broker.asked) > before
    assert not fetcher.has_something()
    fetcher.close(0.0)
    timer.close()
