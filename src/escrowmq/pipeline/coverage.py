"""The limits of a comparison: where topics begin and end.

Messages that left a topic, by retention or with a deleted topic, cannot be compared any more; nor can messages that a
data folder in use does not show yet. The offsets of a queue begin at 0. A queue whose first stored offset is higher has
lost its earlier messages: retention removed them, or the topic was deleted and created again. A comparison reports this
instead of counting those messages as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

from escrowmq.errors import EscrowError
from escrowmq.spark import brokers
from escrowmq.spark.options import read_options
from escrowmq.wire import HALF_VIEW_NAME, Link, ReadRequest

MOST_SHOWN = 20
"""Maximum number of queues in a sentence."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A queue (of a view: the log, queue 0) whose first messages were removed. ``first`` is the first stored offset (of
    a view: log position). ``since_us`` is the time when that message was stored; None if the queue is empty, or it
    cannot be read."""

    source: str
    shard: int
    queue: int
    first: int
    since_us: int | None

    def __str__(self) -> str:
        return f"{self.source}/{self.queue} begins at {self.first:,}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The limits of a comparison: where the log begins, and what may be missing at its end (empty: nothing)."""

    beginnings: tuple[Beginning, ...] = ()
    incomplete: str = ""


def read_coverage(url: str, sources: Collection[str]) -> Coverage:
    """Find the queues of these topics (and of ``%half``, if it is one of ``sources``) whose first messages were
    removed, and what a data folder may lack at its end. Raises the errors of opening a broker or a folder."""
    with brokers.opened(url) as links:
        at = {link.address: link for link in links}
        found = []
        for source in sources:
            for one in brokers.topic_partitions(links, read_options({"url": url, "topic": source})):
                if one.head > 0:
                    since_us = _read_stored_us(at[one.broker], source, one.queue, one.head, one.end)
                    found.append(Beginning(source, one.shard, one.queue, one.head, since_us))
        return Coverage(tuple(found), brokers.describe_missing(links))


def _read_stored_us(link: Link, source: str, queue: int, first: int, end: int) -> int | None:
    if first >= end:
        return None
    request = {"source": source, "start": first, "columns": ["stored_us"], "max_rows": 1}
    if source != HALF_VIEW_NAME:
        request |= {"queue": queue, "end": first + 1}
    try:
        times = link.read(cast(ReadRequest, request)).read_all().column("stored_us").to_pylist()
    except EscrowError:
        return None  # it left meanwhile, or is damaged
    return times[0] if times else None


def describe_beginnings(found: Iterable[Beginning]) -> str:
    """Format the queues as a text with the offsets at which they begin; at most MOST_SHOWN of them."""
    every = list(found)
    more = f" and {len(every) - MOST_SHOWN:,} more" if len(every) > MOST_SHOWN else ""
    return ", ".join(map(str, every[:MOST_SHOWN])) + more
