"""The log on a partition keeps the promises of every commit log, with its mirror kept and with its mirror lost."""

from __future__ import annotations

import numpy as np
import pytest
from log_makers import MemoryMaker

from escrowmq.schemas import Kind
from escrowmq.testing.log_conformance import START_US, LogConformance, LogMaker, messages


@pytest.mark.invariant("I1")
class TestWithItsMirror(LogConformance):
    @pytest.fixture(params=["dropped", "kept", "torn", "reordered"])
    def logs(self, request: pytest.FixtureRequest) -> MemoryMaker:
        return MemoryMaker(lost=False, mode=request.param)


class WithoutMirror(LogConformance):
    """The suite, as far as a log keeps it whose folder is lost before every opening."""

    def test_snapshots(self, logs: LogMaker) -> None:
        """Ordinary snapshots are the node's own: they are gone with the mirror, and nothing else is."""
        log = logs.open()
        log.append(Kind.PLAIN, messages(2), START_US)
        log.sync()
        log.save_snapshot({}, log.next_sequence, log.next_position, START_US)
        assert log.load_snapshot() is not None
        log.close()
        log = logs.open()
        assert log.load_snapshot() is None
        assert log.read(np.array([1, 2])).num_rows == 2
        log.close()


@pytest.mark.invariant("I1")
class TestWithoutItsMirror(WithoutMirror):
    @pytest.fixture
    def logs(self) -> MemoryMaker:
        return MemoryMaker(lost=True)
