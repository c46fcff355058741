"""Two brokers, one of them down: a stream goes on with the other, what must be whole fails and names it, and nothing is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_runs import numbers, read_batch, read_stream, refused, rows, send, visible, write_batch
from killing import Broker
from pyspark.sql import SparkSession

from escrowmq.client.links.router import broker_of

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Broker]]:
    one, other = (Broker(tmp_path_factory.mktemp("pair") / name) for name in "ab")
    try:
        yield one, other
    finally:
        one.kill()
        other.kill()


def both(pair: tuple[Broker, Broker]) -> str:
    return f"{pair[0].url},{pair[1].url.removeprefix('escrow://')}"


def keys_of(number: int, first: int, last: int) -> list[str]:
    return [key for key in numbers(first, last) if broker_of(key, 2) == number]


def test_a_stream_goes_on_and_a_batch_names_who_is_missing(
    spark: SparkSession, pair: tuple[Broker, Broker], tmp_path: Path
) -> None:
    url = both(pair)
    send(url, 0, 20)
    run = lambda: sorted(sum(read_stream(spark, url, tmp_path / "check", timeout=60), []))  # noqa: E731, RUF017
    assert run() == numbers(0, 20)
    send(url, 20, 40)
    pair[1].kill()
    assert run() == keys_of(0, 20, 40)
    assert run() == []
    refused(lambda: read_batch(spark, url, timeout=1), pair[1].url)
    write = lambda wait: write_batch(rows(spark, 0, 20), url, "out", {"write_id": "w", "timeout": wait})  # noqa: E731
    refused(lambda: write(1), pair[1].url)
    pair[1].start()
    assert run() == keys_of(1, 20, 40)
    assert read_batch(spark, url) == 40
    write(60)
    assert visible(url, "out") == numbers(0, 20)
