"""A batch over several brokers of which none answered: the error says what is known of the whole."""

import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from escrowmq.client.bus import Bus
from escrowmq.client.lanes.blocking import finished
from escrowmq.client.lanes.waiting import Threads
from escrowmq.client.producing.placing import BatchPlacement
from escrowmq.errors import Code, EscrowError, Unknown, error
from escrowmq.message.limits import Limits
from escrowmq.model import COMMIT, Message
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange

BATCH = pa.RecordBatch.from_pydict({"body": pa.array([b"1", b"2"])})


class Failing(BatchPlacement):
    """Each of two brokers fails as it is told."""

    def __init__(self, *problems: Code) -> None:
        async def opened(*_: object) -> None:
            pass

        session = SimpleNamespace(checker=SimpleNamespace(limits=Limits()))
        production = SimpleNamespace(timeout=1.0, open=opened, waiting=Threads(), sessions=[session, session])
        super().__init__(production, Exchange.SEND, None)
        self._problems = problems

    async def _first(self) -> int:
        return 0

    def _place(self, data, first):
        return BATCH, np.array([0, 1]), np.array([True, True])

    async def _send_parts(self, parts):
        return [error(self._problems[part.number]) for part in parts]


@pytest.mark.parametrize(
    "problems", [(Code.DISK_FULL, Code.DISCONNECTED), (Code.DISCONNECTED, Code.DISK_FULL)], ids=["first", "second"]
)
def test_where_a_part_may_have_been_applied_the_whole_is_not_called_refused(problems):
    with pytest.raises(EscrowError) as raised:
        finished(Failing(*problems).receipts(["a", "b"]))
    assert raised.value.code is Code.DISCONNECTED


def test_where_every_part_was_refused_the_first_refusal_is_raised():
    with pytest.raises(EscrowError) as raised:
        finished(Failing(Code.DISK_FULL, Code.QUEUE_FULL).receipts(["a", "b"]))
    assert raised.value.code is Code.DISK_FULL


# Ends


def two_brokers(bus):
    """A producer, and an undecided transaction at each of its brokers."""
    producer = bus.producer("shop", checker=lambda check: COMMIT)
    ids = pa.concat_arrays([producer.prepare_batch([Message("orders", b"x")], shard=n).transactions for n in (1, 2)])
    return producer, ids


@pytest.mark.parametrize("refuses", [0, 1], ids=["first", "second"])
def test_where_one_broker_refused_and_another_is_silent_each_end_says_its_own(refuses, patient, eventually):
    """No one error is true of both: what one refused is not applied, what was not answered may be."""
    twins = [TwinLink(1, "twin:1"), TwinLink(2, "twin:2")]
    with Bus(twins) as bus:
        producer, ids = two_brokers(bus)
        twins[refuses].refuse(Exchange.END, error(Code.NO_PERMISSION))
        twins[1 - refuses].hold(Exchange.END)
        found = []
        ending = threading.Thread(target=lambda: found.append(producer.end_batch(ids, COMMIT)))
        ending.start()
        eventually(lambda: all(twin.seen(Exchange.END) for twin in twins))
        for request in list(producer._production.lane(Exchange.END, 1 - refuses)._in_flight):
            request.deadline = 0.0  # its time is up
        ending.join()
        (ended,) = found
        assert ended.codes[refuses] == Code.NO_PERMISSION
        assert ended.codes[1 - refuses] in (Code.TIMED_OUT, Code.BROKER_AWAY)
        with pytest.raises(Unknown):
            ended[1 - refuses]
        twins[1 - refuses].release(Exchange.END)


def test_ends_that_every_broker_refused_alike_raise_that(patient):
    twins = [TwinLink(1, "twin:1"), TwinLink(2, "twin:2")]
    with Bus(twins) as bus:
        producer, ids = two_brokers(bus)
        for twin in twins:
            twin.refuse(Exchange.END, error(Code.NO_PERMISSION))
        with pytest.raises(EscrowError) as raised:
            producer.end_batch(ids, COMMIT)
        assert raised.value.code is Code.NO_PERMISSION
