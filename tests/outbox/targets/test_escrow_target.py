"""EscrowMQ as a relay's target: order per key past refusals, several brokers, brokers that are away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq import schemas
from escrowmq.broker.serving.serve import serve
from escrowmq.client.links.router import broker_of
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.outbox.targets.opening import open_target, read_options
from escrowmq.settings import BrokerSettings
from escrowmq.testing.target_conformance import PATIENT
from escrowmq_lab.servers.process import free_port

Row = tuple[str, str | None, bytes]
Start = Callable[..., str]


def batch(*rows: Row, start: int = 1, **columns: Any) -> pa.RecordBatch:
    """An OUTGOING batch of (topic, key, body); ids count up from ``start``."""
    content: dict[str, Any] = {
        "topic": [row[0] for row in rows],
        "key": [row[1] for row in rows],
        "tag": [None] * len(rows),
        "properties": [None] * len(rows),
        "body": [row[2] for row in rows],
        "message_id": [number.to_bytes(16, "big") for number in range(start, start + len(rows))],
        "queue": [-1] * len(rows),
        "born_us": [1] * len(rows),
        "delay_us": [0] * len(rows),
        "immunity_us": [0] * len(rows),
        "transaction": [None] * len(rows),
    }
    arrays = [pa.array({**content, **columns}[f.name], f.type) for f in schemas.OUTGOING]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)


def names(codes: Any) -> list[str]:
    return [Code(int(code)).name for code in codes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Serve brokers inside this process, on threads; the URL of each."""
    import threading

    with ExitStack() as stack:

        def one(folder: str, listen: str = "127.0.0.1:0", **settings: Any) -> str:
            ready: list[dict[str, Any]] = []
            up, stop = threading.Event(), threading.Event()

            def announce(told: dict[str, Any]) -> None:
                ready.append(told)
                up.set()

            thread = threading.Thread(
                target=serve,
                args=(tmp_path / folder,),
                kwargs={"listen": listen, "settings": BrokerSettings(**settings), "announce": announce, "stop": stop},
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(stop.set)
            assert up.wait(60)
            one.stop = lambda: (stop.set(), thread.join())  # type: ignore[attr-defined]
            return str(ready[0]["url"])

        yield one


def stored(url: str, topic: str) -> list[tuple[str | None, bytes]]:
    with mq.connect(url) as bus:
        table = bus.admin.read(topic).read_all()
    return list(zip(table["key"].to_pylist(), table["body"].to_pylist(), strict=True))


def test_everything_that_is_right_is_taken_once(start: Start) -> None:
    url = start("a")
    target = EscrowTarget(url, timeout=PATIENT)
    rows: list[Row] = [("orders", f"k{n % 3}", str(n).encode()) for n in range(30)] + [("points", None, b"x")]
    pairs = [[("a", "b")]] * 31
    for _ in range(2):  # the second time is a repeat: same ids, no second copy
        assert not target.send(batch(*rows, properties=pairs)).any()
    assert sorted(stored(url, "orders")) == sorted((key, body) for _, key, body in rows[:30])
    assert len(stored(url, "points")) == 1
    for key in ("k0", "k1", "k2"):
        numbers = [int(body) for k, body in stored(url, "orders") if k == key]
        assert numbers == sorted(numbers)
    assert target.promise.deduplicates
    target.close()
    target.close()


@pytest.mark.invariant("I39")
def test_nothing_passes_a_refused_message_of_its_key(start: Start) -> None:
    url = start("a", max_body_bytes=100, auto_create_topics=False)
    with mq.connect(url) as bus:
        bus.admin.create_topic("orders")
    target = EscrowTarget(url, timeout=PATIENT)
    first = batch(
        ("orders", "k", b"0"),
        ("orders", "k", b"x" * 101),
        ("orders", "k", b"2"),
        ("nowhere", "m", b"0"),
        ("orders", "m", b"1"),
        ("orders", None, b"free"),
        ("orders", "n", b"0"),
        ("bad name", "n", b"1"),
        ("orders", "n", b"2"),
        ("nowhere", None, b"free"),
    )
    assert names(target.send(first)) == [
        "OK",
        "BODY_TOO_LARGE",
        "QUEUE_FULL",
        "UNKNOWN_TOPIC",
        "QUEUE_FULL",
        "OK",
        "OK",
        "BAD_TOPIC_NAME",
        "QUEUE_FULL",
        "UNKNOWN_TOPIC",
    ]
    assert sorted(stored(url, "orders"), key=str) == sorted([("k", b"0"), (None, b"free"), ("n", b"0")], key=str)
    wide = batch(("orders", "k" * 2000, b""), ("orders", "a", b""), start=50, properties=[None, [("a" * 40_000, "b")]])
    assert names(target.send(wide)) == ["KEY_TOO_LARGE", "PROPERTIES_TOO_LARGE"]
    late = batch(("orders", "a", b""), start=60, delay_us=[1 << 50])
    assert names(target.send(late)) == ["BAD_DELAY"]
    target.close()


def test_a_batch_over_the_brokers_limits_goes_in_several_requests(start: Start) -> None:
    url = start("a", max_batch_rows=10)
    target = EscrowTarget(url, timeout=PATIENT)
    assert not target.send(batch(*[("orders", "k", str(n).encode()) for n in range(95)])).any()
    assert [body for _, body in stored(url, "orders")] == [str(n).encode() for n in range(95)]
    target.close()


def test_a_broker_that_is_away_is_unknown_and_comes_back(start: Start) -> None:
    url = start("a", f"127.0.0.1:{free_port()}")  # which nobody else gets while it is stopped
    target = EscrowTarget(url, timeout=0.5)
    while target.send(batch(("orders", "k", b"0"))).any():
        pass
    start.stop()  # type: ignore[attr-defined]
    away = target.send(batch(("orders", "k", b"1"), start=2))
    assert names(away)[0] in ("TIMED_OUT", "DISCONNECTED")
    assert start("a", url.removeprefix("escrow://")) == url
    while target.send(batch(("orders", "k", b"1"), start=2)).any():
        pass
    assert [body for _, body in stored(url, "orders")] == [b"0", b"1"]
    target.close()


@pytest.mark.invariant("I38")
def test_with_several_brokers_a_message_stays_where_it_belongs(start: Start) -> None:
    one = start("one")
    two = start("two", f"127.0.0.1:{free_port()}")
    target = EscrowTarget(f"{one},{two.removeprefix('escrow://')}", timeout=PATIENT)
    rows: list[Row] = [("orders", f"k{n % 20}", str(n).encode()) for n in range(60)]
    rows += [("orders", None, f"free {n}".encode()) for n in range(60)]
    whole = batch(*rows)
    assert not target.send(whole).any()
    hasty = EscrowTarget(f"{one},{two.removeprefix('escrow://')}", timeout=2.0)
    while hasty.send(whole).any():  # it has met both brokers
        pass
    start.stop()  # type: ignore[attr-defined]
    its_own = [broker_of(key or "", 2) == 1 for _, key, _ in rows[:60]]
    away = hasty.send(batch(*rows, start=1000)) != Code.OK
    while away[:60].tolist() != its_own:  # the broker that is left is slow
        away = hasty.send(batch(*rows, start=1000)) != Code.OK
    assert away.any()
    assert not away.all()
    hasty.close()
    assert target.partly_there()
    assert start("two", two.removeprefix("escrow://")) == two
    while target.send(batch(*rows, start=1000)).any():
        pass
    both = stored(one, "orders") + stored(two, "orders")
    assert len(both) == 240  # twice the rows, each once: the retry went where the first try did
    target.close()


def test_a_group_of_the_other_kind_is_the_operators_mistake(start: Start) -> None:
    url = start("a")
    with mq.connect(url) as bus:
        bus.producer("shop", checker=lambda _: mq.UNKNOWN).prepare("orders", b"")
    target = EscrowTarget(url, group="shop", timeout=PATIENT)
    with pytest.raises(Misuse):
        target.send(batch(("orders", "k", b"0")))
    target.close()


def test_embedded(tmp_path: Path) -> None:
    target = open_target(f"file:{tmp_path}/data", timeout=PATIENT)
    assert names(target.send(batch(("orders", "k", b"0")))) == ["OK"]
    target.close()


def test_urls_and_options_that_are_wrong_are_named() -> None:
    for url in ("http://x", "", "orders"):
        with pytest.raises(Misuse) as refused:
            open_target(url)
        assert refused.value.code is Code.BAD_URL
    with pytest.raises(Misuse) as refused:
        open_target("escrow://127.0.0.1:1", speed=11)
    assert "speed" in refused.value.message
    assert read_options("escrow://127.0.0.1:1", {"timeout": "2.5", "group": "g"}) == {"timeout": 2.5, "group": "g"}
    with pytest.raises(Misuse):
        read_options("escrow://127.0.0.1:1", {"timeout": "soon"})
