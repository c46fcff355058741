"""The contract of every relay target as a test suite: subclass :class:`TargetConformance` with a fixture ``site``. A
:class:`Site` is a separate real server with access to its contents: the suite pauses and kills it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pytest

from escrowmq import schemas
from escrowmq.errors import Code, Misuse, Overloaded, Unknown, error
from escrowmq.outbox.targets.seam import Codes, Target
from escrowmq.testing.ledgers import outgoing

PATIENCE = 180.0
"""Timeout (s) for a condition that must become true, also if a server must start for it."""
PATIENT = 120.0
"""Timeout (s) of a target whose rows must be taken, however slow the machine is."""
_numbers = itertools.count(time.time_ns())
"""Numbers for ids and topics, different in every run."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One message as its consumers receive it."""

    message_id: bytes
    key: str | None
    tag: str | None
    properties: tuple[tuple[str, str], ...]
    body: bytes


class Site(Protocol):
    """A running server, a target that sends to it, and its contents."""

    oversize: int
    """Body size that the targets of :meth:`open` reject."""

    def open(self, timeout: float = PATIENT) -> Target:
        """Open a new target with a timeout of ``timeout`` seconds."""

    def new_topic(self) -> str:
        """Return a new topic that is ready for messages."""

    def drain(self, topic: str) -> list[Stored]:
        """Return all visible messages ever stored under ``topic``, in order per key."""

    def pause(self) -> None:
        """Make it unresponsive, with open connections."""

    def resume(self) -> None:
        """End a pause."""

    def kill(self) -> None:
        """Crash it."""

    def start(self) -> None:
        """Start it again."""


def new_name() -> str:
    """Return a name that no other topic has."""
    return f"topic-{next(_numbers)}"


def batch(topic: str, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Return a batch of schema OUTGOING: ``rows`` override defaults; each has a new message id."""
    return outgoing({"topic": topic, "message_id": next(_numbers).to_bytes(16, "big"), **row} for row in rows)


def keyed(topic: str, keys: Iterable[str | None], start: int = 0) -> pa.RecordBatch:
    """Return one row for each of ``keys``; bodies count up from ``start``."""
    return batch(topic, [{"key": key, "body": b"%08d" % n} for n, key in enumerate(keys, start)])


def ids_of(sent: pa.RecordBatch) -> list[bytes]:
    """Return the message ids of a batch."""
    ids: list[bytes] = sent.column("message_id").to_pylist()
    return ids


def first_sights(stored: Iterable[Stored]) -> dict[str | None, list[bytes]]:
    """Return the bodies of each key in the order of their first occurrence, as for a consumer that skips repeats."""
    seen: dict[str | None, dict[bytes, None]] = {}
    for message in stored:
        seen.setdefault(message.key, {})[message.body] = None
    return {key: list(bodies) for key, bodies in seen.items()}


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait until ``check`` is true."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def assert_held(codes: Codes) -> None:
    """Assert that failed rows are to be retried, and none is rejected."""
    branches = {type(error(Code(code))) for code in np.unique(codes[codes != Code.OK]).tolist()}
    assert branches <= {Unknown, Overloaded}, codes


def send_until_ok(target: Target, rows: pa.RecordBatch, failed: threading.Event | None = None) -> None:
    """Resend rows that were not OK, in order, like a relay; ``failed`` is set if there was any."""
    deadline = time.monotonic() + PATIENCE
    while rows.num_rows:
        assert time.monotonic() < deadline, "the target does not come back"
        codes = target.send(rows)
        assert_held(codes)
        if failed is not None and codes.any():
            failed.set()
        rows = rows.filter(pa.array(codes != Code.OK))


class TargetConformance:
    """The contract of :mod:`escrowmq.outbox.targets.seam`, line by line."""

    @pytest.fixture
    def topic(self, site: Site) -> str:
        """Return a new topic."""
        return site.new_topic()

    @pytest.fixture
    def target(self, site: Site) -> Iterable[Target]:
        """Provide a target, closed afterwards."""
        target = site.open()
        yield target
        target.close()

    def test_the_promise_is_stated(self, target: Target) -> None:
        promise = target.promise
        assert promise.name
        assert promise.durable

    def test_content_arrives_byte_for_byte(self, site: Site, target: Target, topic: str) -> None:
        rows: list[dict[str, Any]] = [
            {"body": bytes(range(256)) * 300, "key": "k", "tag": "t", "properties": [("a", "1"), ("b", "")]},
            {"body": b""},
            {"body": "半消息".encode(), "key": "钥匙 🗝", "tag": "标签", "properties": [("имя", "значение\n\t\"'")]},
            {"body": b"\x00\xff\r\n", "key": "", "tag": "x" * 100, "properties": []},
            {"body": b"x" * 100_000, "key": "k" * 1000, "properties": [(f"name-{n}", "v" * 100) for n in range(100)]},
        ]
        sent = batch(topic, rows)
        assert target.send(sent).tolist() == [Code.OK] * len(rows)
        found = {message.message_id: message for message in site.drain(topic)}
        assert set(found) == set(ids_of(sent))
        for row, identity in zip(rows, ids_of(sent), strict=True):
            message = found[identity]
            assert (message.body, message.key, message.tag) == (row["body"], row.get("key"), row.get("tag"))
            assert sorted(message.properties) == sorted(row.get("properties") or [])

    def test_keys_keep_their_order(self, site: Site, target: Target, topic: str) -> None:
        keys = [None if n % 5 == 4 else f"k{n % 5}" for n in range(400)]
        for start in (0, 400):
            assert not target.send(keyed(topic, keys, start)).any()
        stored = site.drain(topic)
        assert len(stored) == 800
        for key, bodies in first_sights(stored).items():
            assert len(bodies) == 160
            assert key is None or bodies == sorted(bodies)

    def test_several_topics_in_one_batch(self, site: Site, target: Target) -> None:
        topics = [site.new_topic() for _ in range(3)]
        rows = [{"topic": topics[n % 3], "key": f"k{n % 7}", "body": b"%d" % n} for n in range(60)]
        assert not target.send(batch(topics[0], rows)).any()
        assert [len(site.drain(topic)) for topic in topics] == [20, 20, 20]

    def test_no_rows_no_codes(self, target: Target) -> None:
        assert len(target.send(schemas.empty(schemas.OUTGOING))) == 0

    def test_a_row_is_refused_and_its_neighbours_go(self, site: Site, target: Target, topic: str) -> None:
        big = b"x" * site.oversize
        bodies = [b"1", big, b"3", b"4", b"5", big, b"7", big, b"9"]
        sent = batch(topic, [{"key": k, "body": b} for k, b in zip([*"aaab", *[None] * 3, *"ab"], bodies, strict=True)])
        ok, large, behind = Code.OK, Code.BODY_TOO_LARGE, Code.QUEUE_FULL
        assert target.send(sent).tolist() == [ok, large, behind, ok, ok, large, ok, behind, ok]
        assert Counter(m.body for m in site.drain(topic)) == Counter([b"1", b"4", b"5", b"7", b"9"])
        assert target.send(sent.slice(2, 1)).tolist() == [ok]
        assert first_sights(site.drain(topic))["a"] == [b"1", b"3"]

    def test_the_same_id_again(self, site: Site, target: Target, topic: str) -> None:
        sent = keyed(topic, ["a", "b", None])
        assert not target.send(sent).any()
        assert not target.send(sent).any()
        copies = Counter(message.message_id for message in site.drain(topic))
        expected = 1 if target.promise.deduplicates else 2
        assert copies == dict.fromkeys(ids_of(sent), expected)

    def test_the_same_id_for_another_content_and_in_another_topic(self, site: Site, target: Target, topic: str) -> None:
        """A target that knows ids rejects another message with the same id: its row must wait for an operator."""
        sent = batch(topic, [{"key": "a", "body": b"first"}])
        assert not target.send(sent).any()
        same = {"message_id": ids_of(sent)[0], "key": "a"}
        knows = target.promise.deduplicates
        expected = Code.MESSAGE_ID_TAKEN if knows else Code.OK
        assert target.send(batch(topic, [{**same, "body": b"another"}])).tolist() == [expected]
        assert [m.body for m in site.drain(topic)] == ([b"first"] if knows else [b"first", b"another"])
        elsewhere = site.new_topic()
        assert not target.send(batch(elsewhere, [{**same, "body": b"elsewhere"}])).any()
        assert [m.body for m in site.drain(elsewhere)] == [b"elsewhere"]

    def test_delays_are_kept_or_refused(self, site: Site, target: Target, topic: str) -> None:
        first = target.send(batch(topic, [{"key": "a", "body": b"now"}]))
        assert first.tolist() == [Code.OK]
        begun = time.monotonic()
        later = {"key": "b", "body": b"later", "delay_us": 1_000_000}
        codes = target.send(batch(topic, [later, {"key": "b", "body": b"behind"}]))
        if not target.promise.delays:
            assert codes.tolist() == [Code.BAD_DELAY, Code.QUEUE_FULL]
            assert [message.body for message in site.drain(topic)] == [b"now"]
            return
        assert codes.tolist() == [Code.OK, Code.OK]
        bodies = {message.body for message in site.drain(topic)}
        assert b"later" not in bodies or time.monotonic() - begun >= 1.0
        eventually(lambda: b"later" in {m.body for m in site.drain(topic)}, "the delayed message does not come")
        assert time.monotonic() - begun >= 1.0

    def test_what_is_no_batch_of_messages_is_misuse(self, target: Target) -> None:
        with pytest.raises(Misuse):
            target.send(schemas.empty(schemas.ENDED))

    def test_closing_twice_is_closing(self, site: Site) -> None:
        target = site.open()
        target.close()
        target.close()

    def test_a_silent_server_is_unknown_and_nothing_overtakes(self, site: Site, topic: str) -> None:
        with closing(site.open(timeout=2.0)) as target:
            send_until_ok(target, keyed(topic, ["a", "b"]))
            rest = keyed(topic, ["a", "a", "b", "b", "a"], start=2)
            site.pause()
            try:
                codes = target.send(rest)
            finally:
                site.resume()
            assert codes.all(), "OK, and nobody answered"
            assert_held(codes)
            send_until_ok(target, rest)
            orders = first_sights(site.drain(topic))
            assert orders == {"a": [b"%08d" % n for n in (0, 2, 3, 6)], "b": [b"%08d" % n for n in (1, 4, 5)]}

    def test_killed_while_sending_loses_nothing_that_was_ok(self, site: Site, topic: str) -> None:
        """Kill it between or during batches, restart it later: the same target continues."""
        batches: list[pa.RecordBatch] = []
        some_sent, some_failed = threading.Event(), threading.Event()
        target = site.open(timeout=2.0)

        def relay() -> None:
            while len(batches) < 12 or not some_failed.is_set():  # a fast target continues until the kill
                keys = [None if n % 4 == 3 else f"k{n % 4}" for n in range(40)]
                batches.append(keyed(topic, keys, 40 * len(batches)))
                send_until_ok(target, batches[-1], some_failed)
                if len(batches) == 6:
                    some_sent.set()

        with closing(target), ThreadPoolExecutor(1) as worker:
            relayed = worker.submit(relay)
            try:
                assert some_sent.wait(PATIENCE), relayed
                site.kill()
                assert some_failed.wait(PATIENCE), "OK, and nobody was there"
            finally:
                site.start()
            relayed.result()
        stored = site.drain(topic)
        assert {message.message_id for message in stored} == {identity for rows in batches for identity in ids_of(rows)}
        for key, bodies in first_sights(stored).items():
            assert key is None or bodies == sorted(bodies), f"within {key}, something overtook"
