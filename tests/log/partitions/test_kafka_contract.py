"""The log on a partition of a real Kafka keeps the promises of every commit log, with its mirror kept and with its
mirror lost.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from functools import partial

import pytest
from log_makers import PartitionMaker
from test_mirror import acts, content, grow, leading_on, retain
from test_partition_contract import WithoutMirror

from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.testing.disks import MemoryDisk
from escrowmq.testing.log_conformance import LogConformance

TOPICS = itertools.count()


@pytest.fixture
def address(kafka_url: str) -> str:
    """A log of its own, on the one node that there is."""
    url = f"{kafka_url}/log-{uuid.uuid4().hex[:8]}-{next(TOPICS)}?replication=1"
    create_topics(url)
    return url


class TestWithItsMirror(LogConformance):
    @pytest.fixture
    def logs(self, address: str) -> Iterator[PartitionMaker]:
        with PartitionMaker(partial(open_partitions, address), lost=False) as maker:
            yield maker


class TestWithoutItsMirror(WithoutMirror):
    @pytest.fixture
    def logs(self, address: str) -> Iterator[PartitionMaker]:
        with PartitionMaker(partial(open_partitions, address), lost=True) as maker:
            yield maker


def test_lost_followed_retention_lost_again(address: str) -> None:
    log = leading_on(open_partitions(address), MemoryDisk())
    grow(log, 30)
    expected = content(log)
    for n in (30, 60):
        log.close()
        log = leading_on(open_partitions(address), MemoryDisk(), f"n{n}")
        grow(log, 30, n)
        expected += content(log, len(expected))
        assert retain(log, log.position_before(log.last_time_us - 20)) > 0
    first, records = log._reader.stored_from()[0], acts(log)
    log.close()
    log = leading_on(open_partitions(address), MemoryDisk(), "z")
    assert content(log, first)[: len(expected) - first] == expected[first:]
    assert acts(log) == records
    log.close()
