"""The brokers (or the folder) behind a source: one link an address and process, what is there, and reading a range of it.

Nothing here knows Spark. Executors' Python processes live on from task to task, so links are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import cast

import pyarrow as pa

from escrowmq.client.producing.session import patient_action
from escrowmq.connecting import links
from escrowmq.errors import Code, EscrowError, error
from escrowmq.spark.filters import Pushed
from escrowmq.spark.options import ReadOptions
from escrowmq.spark.planning import Place, Range
from escrowmq.wire import DEAD_LETTER_PREFIX, VIEWS, Link, ReadRequest, ask
from escrowmq.wire.actions.brokers import HELLO
from escrowmq.wire.actions.topics import OFFSETS, AskOffsets

_PAUSE = 0.2
"""Seconds between tries while a broker is away."""

_links: dict[str, Link] = {}
_lock = threading.Lock()


def open_links(url: str) -> Sequence[Link]:
    """New links of the brokers that ``url`` names. Raises Misuse(BAD_URL, NOT_A_DATA_FOLDER), Corrupt, ..."""
    return links(url, {"read_only": True} if url.startswith("file:") else {})


def places(found: Sequence[Link], options: ReadOptions) -> list[Place]:
    """All places of the sources, in order of name. Raises UNKNOWN_TOPIC, Unknown(TIMED_OUT) when a broker is away."""
    deadline = time.monotonic() + options.timeout
    shards = [patient_action(link, HELLO({}), deadline)["shard"] for link in found]
    made: list[Place] = []
    for source in options.sources:
        there: list[Place] = []
        missing: EscrowError | None = None
        for link, shard in zip(found, shards, strict=True):
            try:
                there += _places(link, shard, source, options, deadline)
            except EscrowError as problem:
                if problem.code is not Code.UNKNOWN_TOPIC:
                    raise
                missing = problem
        if not there and missing is not None:
            raise missing
        made += there
    return sorted(made)


def _places(link: Link, shard: int, source: str, options: ReadOptions, deadline: float) -> Iterator[Place]:
    if source.startswith(DEAD_LETTER_PREFIX):  # no order that lasts: read as a whole
        yield Place(source, shard, 0, link.address, 0, 1, 0, 1)
        return
    asked: list[AskOffsets] = [
        {"topic": source, "time_us": at} if isinstance(at, int) else {"topic": source}
        for at in (options.start, options.end)
    ]
    starts, ends = (patient_action(link, OFFSETS(request), deadline)["queues"] for request in asked)
    for one, other in zip(starts, ends, strict=False):  # a queue that came between the two is for the next look
        # a view has no offsets by time: all of it is read, and filtered
        start_at, end_at = one.get("offset_at", one["head"]), other.get("offset_at", other["end"])
        yield Place(source, shard, one["queue"], link.address, other["head"], other["end"], start_at, end_at)


def read(piece: Range, columns: list[str], pushed: Pushed, timeout: float) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in order. A broker that goes away meanwhile is waited for, up to ``timeout`` seconds without a row;
    reading then goes on where it stopped."""
    counter = _counter(piece.place.source)
    wanted = columns if counter is None or counter in columns else [*columns, counter]
    start, deadline = piece.start, time.monotonic() + timeout
    while True:
        try:
            for batch in _link(piece).read(_request(piece, start, wanted, pushed)):
                if counter is not None and batch.num_rows:
                    start = batch.column(counter)[-1].as_py() + 1
                yield batch if wanted is columns else batch.select(columns)
                deadline = time.monotonic() + timeout
            return
        except EscrowError as problem:
            if problem.code is not Code.DISCONNECTED or counter is None or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def _counter(source: str) -> str | None:
    """The column that says how far reading has come."""
    if source in VIEWS:
        return "position"
    return None if source.startswith("%") else "offset"


def _request(piece: Range, start: int, columns: list[str], pushed: Pushed) -> ReadRequest:
    request = cast(ReadRequest, {"source": piece.place.source, "columns": columns, **pushed.request})
    if piece.place.source.startswith(DEAD_LETTER_PREFIX):
        return request
    return {**request, "queue": piece.place.queue, "start": start, "end": piece.end}


def _link(piece: Range) -> Link:
    """The link of this process to the range's broker. One of a folder is opened anew when it does not reach far enough."""
    address = piece.place.broker
    with _lock:
        link = _links.get(address)
        if link is None or (address.startswith("file:") and not _reaches(link, piece)):
            [link] = open_links(address)
            _links[address] = link
        return link


def _reaches(link: Link, piece: Range) -> bool:
    if piece.place.source.startswith(DEAD_LETTER_PREFIX):
        return True
    try:
        queues = ask(link, OFFSETS({"topic": piece.place.source}), 1.0)["queues"]
    except EscrowError:
        return False
    return any(queue["queue"] == piece.place.queue and queue["end"] >= piece.end for queue in queues)


def one_shard(found: Sequence[Place]) -> None:
    """Raise Misuse-like errors for places that cannot be told apart: two URLs of one broker."""
    names = [place.name for place in found]
    if len(set(names)) < len(names):
        raise error(Code.BAD_URL, "two of the addresses are the same broker")
