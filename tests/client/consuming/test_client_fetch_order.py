"""I20: answers are handed out in the order of their questions, whichever comes first."""

from concurrent.futures import Future

import pyarrow as pa

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
