"""The keys that the ledger asks for: read from the log, each for itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from escrowmq.broker.writer.repeats import stored_keys
from escrowmq.errors import Code, error
from escrowmq.ledger.groups.order import UNKNOWN


class Log:
    """Message n has the key "k" and n modulo 3; every tenth has none. Some positions are damaged."""

    def __init__(self, *damaged: int) -> None:
        self.damaged, self.reads = set(damaged), 0

    def read(self, positions, columns):
        self.reads += 1
        if self.damaged & set(positions.tolist()):
            raise error(Code.DAMAGED)
        keys = [None if n % 10 == 0 else f"k{n % 3}" for n in positions.tolist()]
        return pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.utf8())})


def test_equal_keys_have_equal_numbers_and_no_key_is_a_key():
    log = Log()
    found = stored_keys(log, np.arange(1, 31)).tolist()
    assert len(set(found)) == 4
    assert found[9] == found[19] == found[29]
    assert found[0] == found[3] == found[6]
    assert min(found) >= 0
    assert log.reads == 1


def test_a_damaged_record_hides_only_its_own_key():
    healthy = stored_keys(Log(), np.arange(1, 101))
    log = Log(7, 50)
    found = stored_keys(log, np.arange(1, 101))
    assert np.flatnonzero(found != healthy).tolist() == [6, 49]
    assert found[6] == found[49] == UNKNOWN
    assert log.reads < 40
    assert stored_keys(Log(1), np.array([1])).tolist() == [UNKNOWN]
