"""Access to brokers or a data folder for the Spark source: cached links, topic partitions, range reads.

Nothing here imports Spark. Links are cached, because Python processes of executors are reused by later tasks.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.client.links.answers import away, patient_action
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.connecting import links
from escrowmq.errors import Code, EscrowError, Misuse, Unknown, error
from escrowmq.spark.options import ReadOptions
from escrowmq.spark.planning import OffsetRange, TopicPartition
from escrowmq.wire import DAMAGED_COLUMN, DEAD_LETTER_PREFIX, VIEWS, Link, ReadRequest, ask
from escrowmq.wire.actions.brokers import HEALTH, HELLO
from escrowmq.wire.actions.topics import LIST, OFFSETS, AskOffsets

_SAME_FOLDER = (
    "on a cluster every worker must see the same folder under this path; else serve it (escrowmq serve) and "
    "read from there"
)
_SAME_ADDRESS = "on a cluster an address must lead every worker to the same broker"
_PAUSE = 0.2
"""Pause between two attempts while a broker is unavailable, in seconds."""

_links: dict[tuple[str, str | None], Link] = {}
"""By address and token file."""
_lock = threading.Lock()


def open_links(url: str, token_file: str | None = None) -> Sequence[Link]:
    """Open links to the brokers that ``url`` names, with the token in a file. Raises Misuse(BAD_URL,
    NOT_A_DATA_FOLDER), Corrupt, ..."""
    return links(url, {"read_only": True} if url.startswith("file:") else {"token_file": token_file})


@contextmanager
def opened(url: str, token_file: str | None = None) -> Iterator[Sequence[Link]]:
    """Context manager: open links, and close them at the end."""
    found = open_links(url, token_file)
    try:
        yield found
    finally:
        for link in found:
            link.close()


def topic_partitions(found: Sequence[Link], options: ReadOptions) -> list[TopicPartition]:
    """Return all topic partitions of the sources, ordered by name. Raises UNKNOWN_TOPIC, Unknown(TIMED_OUT) if a broker
    is unavailable, Misuse(BAD_URL) if two addresses are the same broker, Misuse(BAD_SETTING) for a queue of option
    ``queues`` that no topic has, and Misuse(FOLDER_IN_USE) for a folder that may be incomplete, if the options refuse
    that."""
    deadline = time.monotonic() + options.timeout
    if options.refuse_incomplete and (what := describe_missing(found)):
        raise Misuse(Code.FOLDER_IN_USE, what)
    shards = [patient_action(link, HELLO({}), deadline)["shard"] for link in found]
    listed = [_list_broker(link, shard, options, deadline) for link, shard in zip(found, shards, strict=True)]
    made = _merge(listed, options.sources, ())
    if len({partition.name for partition in made}) < len(made):
        raise error(Code.BAD_URL, "two of the addresses are the same broker")
    absent = sorted(set(options.queues) - {partition.queue for partition in made})
    if absent and not options.pattern:
        raise Misuse(Code.BAD_SETTING, f"{', '.join(options.sources)} has no queue {absent[0]}", "option 'queues'")
    return sorted(made)


def describe_missing(found: Sequence[Link]) -> str:
    """Describe what the folders among these may lack, and why. Returns "" if nothing is missing."""
    folders = [ask(link, HEALTH({}), 1.0) for link in found if link.address.startswith("file:")]
    return "; ".join(one["missing"] for one in folders if "missing" in one)


def partitions_there(router: Router, options: ReadOptions) -> tuple[list[TopicPartition], list[Missing]]:
    """Return the topic partitions at the available brokers, ordered by name, and the missing brokers. Raises
    UNKNOWN_TOPIC, Overloaded(BROKER_AWAY) if a source has no available partition while a broker is missing, Unknown if
    no broker answers within the timeout, and Misuse(BAD_URL) if two addresses are the same broker."""
    deadline = time.monotonic() + options.timeout

    def list_broker(number: int) -> _Listed:
        shard = router.ask(number, HELLO({}), deadline)["shard"]
        router.learn_shard(number, shard)
        return _list_broker(router.links[number], shard, options, deadline)

    answers = router.every(list_broker, options.timeout)
    return sorted(_merge(answers.values, options.sources, answers.missing)), answers.missing


_Listed = dict[str, list[TopicPartition] | EscrowError]
"""By source: its partitions at one broker, or UNKNOWN_TOPIC."""


def _list_broker(link: Link, shard: int, options: ReadOptions, deadline: float) -> _Listed:
    made: _Listed = {}
    for source in options.sources or _list_matching(link, options, deadline):
        try:
            made[source] = list(_list_partitions(link, shard, source, options, deadline))
        except EscrowError as problem:
            if problem.code is not Code.UNKNOWN_TOPIC:
                raise
            made[source] = problem
    return made


def _list_matching(link: Link, options: ReadOptions, deadline: float) -> list[str]:
    """Return the topics of a broker that the pattern of the options matches."""
    names = [topic["name"] for topic in patient_action(link, LIST({}), deadline)["topics"]]
    return [name for name in names if re.fullmatch(options.pattern or "", name)]


def _merge(listed: Sequence[_Listed], sources: Sequence[str], missing: Sequence[Missing]) -> list[TopicPartition]:
    """Return the partitions of all brokers; without ``sources``, those of all that are listed. Raises the error of a
    source without partitions."""
    there: list[TopicPartition] = []
    for source in sources or sorted(set().union(*listed)):
        found = [at_broker[source] for at_broker in listed if source in at_broker]
        mine = [partition for one in found if not isinstance(one, EscrowError) for partition in one]
        if not mine and missing:
            raise away(missing, f"no partition of {source} is there")
        if not mine and sources and (problems := [one for one in found if isinstance(one, EscrowError)]):
            raise problems[-1]
        there += mine
    return there


def _list_partitions(
    link: Link, shard: int, source: str, options: ReadOptions, deadline: float
) -> Iterator[TopicPartition]:
    if source.startswith(DEAD_LETTER_PREFIX):  # no order that lasts: read as a whole
        yield TopicPartition(source, shard, 0, link.address, 0, 1, 0, 1)
        return
    times = [{"time_us": at} if isinstance(at, int) else {} for at in (options.start, options.end)]
    requests = [cast(AskOffsets, {"topic": source, **time}) for time in times]
    starts, ends = (patient_action(link, OFFSETS(request), deadline)["queues"] for request in requests)
    for one, other in zip(starts, ends, strict=False):  # a queue that came between the two is read next time
        if options.queues and one["queue"] not in options.queues:
            continue
        # a view has no offsets by time: all of it is read, and filtered
        start_at, end_at = one.get("offset_at", one["head"]), other.get("offset_at", other["end"])
        yield TopicPartition(source, shard, one["queue"], link.address, other["head"], other["end"], start_at, end_at)


def read(
    wanted: OffsetRange,
    columns: list[str],
    filters: Mapping[str, Any],
    timeout: float,
    token_file: str | None = None,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of a range that pass ``filters`` (other fields of the read request), in order. If the
    broker becomes unavailable, the read waits up to ``timeout`` seconds without a row, then continues where it stopped.
    Raises Unknown(DISCONNECTED) after that, and the errors of a rejected read."""
    counter = _find_counter(wanted.partition.source)
    asked = columns if counter is None or counter in columns else [*columns, counter]
    start, deadline = wanted.start, time.monotonic() + timeout
    while True:
        try:
            for batch in _get_link(wanted, timeout, token_file).read(_make_request(wanted, start, asked, filters)):
                if counter is not None and batch.num_rows:
                    start = batch.column(counter)[-1].as_py() + 1
                yield batch if asked is columns else batch.select(columns)
                deadline = time.monotonic() + timeout
            return
        except EscrowError as problem:
            if problem.code is not Code.DISCONNECTED or counter is None or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def count_fitting(wanted: OffsetRange, most: float, options: ReadOptions) -> tuple[int, int]:
    """Return the offset up to which the bodies of a range have at most ``most`` bytes together, and those bytes. It
    reads these bodies. Raises as :func:`read`."""
    counter, fits = _find_counter(wanted.partition.source) or "offset", 0
    columns = [counter, "body", DAMAGED_COLUMN]
    with closing(read(wanted, columns, options.filters, options.timeout, options.token_file)) as batches:
        for batch in batches:
            sums = fits + np.cumsum(pc.fill_null(pc.binary_length(batch.column("body")), 0).to_numpy(), dtype=np.int64)
            rows = int(np.searchsorted(sums, most, side="right"))
            if rows < len(sums):
                return batch.column(counter)[rows].as_py(), int(sums[rows - 1]) if rows else fits
            fits = int(sums[-1]) if rows else fits
    return wanted.end, fits


def _find_counter(source: str) -> str | None:
    """Return the column that increases from row to row, which shows the progress of a read. None if there is none."""
    if source in VIEWS:
        return "position"
    return None if source.startswith("%") else "offset"


def _make_request(wanted: OffsetRange, start: int, columns: list[str], filters: Mapping[str, Any]) -> ReadRequest:
    request = cast(ReadRequest, {"source": wanted.partition.source, "columns": columns, **filters})
    if _reads_whole_source(wanted):
        return request
    return {**request, "queue": wanted.partition.queue, "start": start, "end": wanted.end}


def _get_link(wanted: OffsetRange, timeout: float, token_file: str | None) -> Link:
    """Return this process's link to the broker of the range. A folder shows one moment: it is opened again if it ends
    before the range. Raises Unknown(TIMED_OUT) if it still does after ``timeout`` seconds, because the read would
    return fewer rows than planned."""
    address, deadline = wanted.partition.broker, time.monotonic() + timeout
    in_folder = address.startswith("file:")
    with _lock:
        link = _links.get((address, token_file))
        if link is None or (in_folder and not _has_range(link, wanted)):
            link = _open_link(wanted, timeout, token_file)
            while in_folder and not (_reads_whole_source(wanted) or _has_range(link, wanted)):
                if time.monotonic() > deadline:
                    raise Unknown(Code.TIMED_OUT, f"the folder ends before that. {describe_missing([link])}".strip())
                time.sleep(_PAUSE)
                link = _open_link(wanted, timeout, token_file)
            _links[address, token_file] = link
        return link


def _open_link(wanted: OffsetRange, timeout: float, token_file: str | None) -> Link:
    """Return a new link to the broker or folder of the range, after checking that its shard is the one that the driver
    planned with. ``file:FOLDER`` and ``127.0.0.1`` mean something else on another machine. Raises Misuse(BAD_URL) for
    another shard, the error of opening a path that is no data folder, and Unknown(TIMED_OUT)."""
    address, host = wanted.partition.broker, socket.gethostname()
    try:
        [link] = open_links(address, token_file)
    except Misuse as problem:
        if not address.startswith("file:"):
            raise
        what = f"{host} has no data folder {address.removeprefix('file:')}: {problem.message}"
        raise Misuse(problem.code, f"{what}; {_SAME_FOLDER}") from problem
    try:
        shard = patient_action(link, HELLO({}), time.monotonic() + timeout)["shard"]
        if shard != wanted.partition.shard:
            rest = _SAME_FOLDER if address.startswith("file:") else _SAME_ADDRESS
            what = f"{address} as {host} knows it is shard {shard:08x}"
            raise Misuse(Code.BAD_URL, f"{what}, for the driver it is {wanted.partition.shard:08x}; {rest}")
    except BaseException:
        link.close()
        raise
    return link


def _reads_whole_source(wanted: OffsetRange) -> bool:
    """Return whether all current rows are read, regardless of the range. This holds for dead letters, which have no
    lasting order."""
    return wanted.partition.source.startswith(DEAD_LETTER_PREFIX)


def _has_range(link: Link, wanted: OffsetRange) -> bool:
    """Return whether the source, as this link shows it, reaches the end of the range."""
    if _reads_whole_source(wanted):
        return False  # nothing in the range tells of which moment it is
    try:
        queues = ask(link, OFFSETS({"topic": wanted.partition.source}), 1.0)["queues"]
    except EscrowError:
        return False
    return any(queue["queue"] == wanted.partition.queue and queue["end"] >= wanted.end for queue in queues)
