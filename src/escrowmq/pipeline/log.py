"""The broker's log as DataFrames: format "escrow", from a running broker or its data folder, in parallel."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from escrowmq.pipeline.transactions import TransactionRead, read_transactions
from escrowmq.spark import brokers
from escrowmq.spark.options import absolute, read_options
from escrowmq.spark.source import register
from escrowmq.wire import DEAD_LETTER_PREFIX, GROUP_ACT_VIEW_NAME, HALF_VIEW_NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


NO_STARTS: Mapping[str, int] = MappingProxyType({})

JOINED_ROWS = 500_000
"""Transactions are joined in ranges of so many rows of the log: most of them begin and end in one."""


class BrokerLog:
    """A source of messages, half messages and decisions, with the columns of format "escrow". Its URL is
    ``escrow://HOST:PORT[,...]``, or ``file:FOLDER``, which is only read and may be in use. ``whole``: a read raises
    Misuse(FOLDER_IN_USE) if a folder may lack the newest acknowledged messages; otherwise it logs a warning."""

    is_read_in_python = True
    """Format "escrow" reads it, so the processes that read can also sum and select its rows."""

    def __init__(self, spark: SparkSession, url: str, *, whole: bool = False) -> None:
        register(spark)
        self._spark = spark
        self._url = absolute(url)
        self._incomplete = "refuse" if whole else "warn"

    def topics(
        self, names: Sequence[str], columns: Collection[str], starts: Mapping[str, int] = NO_STARTS
    ) -> DataFrame:
        """Return the visible messages of some topics. ``starts``: by topic partition (TOPIC/SHARD/QUEUE, the shard in
        hexadecimal), the first offset to read. Raises, when it is used, Rejected(UNKNOWN_TOPIC) and others."""
        return self._read(",".join(names), columns, **_make_start(starts))

    def half(self, columns: Collection[str], starts: Mapping[str, int] = NO_STARTS) -> DataFrame:
        """Return the half messages of all topics, those of decided transactions too. ``starts``: by shard
        (``%half/SHARD/0``, the shard in hexadecimal), the first position to read."""
        return self._read(HALF_VIEW_NAME, columns, **_make_start(starts))

    def transactions(
        self, topics: Sequence[str] | None = None, hex_ids: Sequence[str] = (), sample: int | None = None
    ) -> DataFrame:
        """Return the transactions with half messages of these topics (None: all), in the columns of
        :func:`escrowmq.pipeline.transactions.read_transactions`, joined with their decisions as far as that is possible
        where they are read. ``hex_ids`` and ``sample`` as of :class:`TransactionRead`."""
        options = self.make_options(HALF_VIEW_NAME) | {"maxRowsPerPartition": str(JOINED_ROWS)}
        read = TransactionRead(options, None if topics is None else tuple(topics), tuple(hex_ids), sample)
        return read_transactions(self._spark, read)

    def group_acts(self, group: str, columns: Collection[str]) -> DataFrame:
        """Return the operator actions on messages of a consumer group (retry, discard, edit, reset), one row each."""
        return self._read(GROUP_ACT_VIEW_NAME, columns, group=group)

    def dead_letters(self, group: str, columns: Collection[str]) -> DataFrame:
        """Return the dead letters of a consumer group. Raises, when it is used, Rejected(UNKNOWN_GROUP)."""
        return self._read(DEAD_LETTER_PREFIX + group, columns)

    def _read(self, source: str, columns: Collection[str], **options: str) -> DataFrame:
        reader = self._spark.read.format("escrow").options(**self.make_options(source), **options)
        return reader.option("columns", ",".join(sorted(columns))).load()

    def make_options(self, source: str, starts: Mapping[str, int] = NO_STARTS) -> dict[str, str]:
        """Return the options of format "escrow" for all columns of topics or of a system view; ``starts`` as of
        :meth:`topics`."""
        return {"url": self._url, "topic": source, "incomplete": self._incomplete, **_make_start(starts)}


def _make_start(starts: Mapping[str, int]) -> dict[str, str]:
    return {"start": json.dumps(dict(starts))} if starts else {}


def log_rows(url: str, topics: Sequence[str]) -> int:
    """Return about how many rows a pass over the log reads: half messages, and the messages of these topics. Raises the
    errors of opening a broker or a folder: Misuse(NOT_A_DATA_FOLDER), Unknown, ..."""
    with brokers.opened(url) as links:
        sources = [HALF_VIEW_NAME, *([",".join(topics)] if topics else [])]
        options = [read_options({"url": url, "topic": source}) for source in sources]
        return sum(one.end - one.head for its in options for one in brokers.topic_partitions(links, its))
