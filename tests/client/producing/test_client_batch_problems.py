"""A batch over several brokers of which none answered: the error says what is known of the whole."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from escrowmq.client.lanes.blocking import finished
from escrowmq.client.lanes.waiting import Threads
from escrowmq.client.producing.placing import BatchPlacement
from escrowmq.errors import Code, EscrowError, error
from escrowmq.message.limits import Limits
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

    def _placed(self, data, first):
        return BATCH, np.array([0, 1]), np.array([True, True])

    async def _sent(self, parts):
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
