"""Reads: batches of useful size, filters and columns that spare the rest."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.broker.embedded import EmbeddedLink, open_embedded
from escrowmq.broker.reads import chunks, views
from escrowmq.client.bus import Bus
from escrowmq.errors import Code
from escrowmq.settings import BrokerSettings
from escrowmq.wire import HALF_VIEW_NAME, OP_VIEW_NAME


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedLink]:
    """A folder whose messages came one by one: every frame has one row."""
    place: Path = tmp_path_factory.mktemp("filters") / "data"
    settings = BrokerSettings(transaction_timeout=600.0)  # nothing is asked about meanwhile
    link = open_embedded(place, settings)
    with Bus([open_embedded(place, settings)]) as bus:
        producer = bus.producer("plain")
        for n in range(300):
            producer.send("t", b"%d" % n, key=f"k{n % 7}", tag=["a", "b", None][n % 3], queue=0)
        halves = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        for n in range(60):
            receipt = halves.prepare("h", b"%d" % n, key=f"h{n}", tag="a" if n % 2 else None, queue=0)
            halves.commit(receipt.transaction_id)
        yield link
    link.close()


def read(link: EmbeddedLink, source: str, **request) -> pa.Table:
    return link.read({"source": source, "queue": 0, **request}).read_all()


@pytest.mark.parametrize("source", ["t", "h", HALF_VIEW_NAME, OP_VIEW_NAME])
def test_small_frames_come_as_large_batches(link, source):
    batches = list(link.read({"source": source, "queue": 0}))
    assert sum(batch.num_rows for batch in batches) == (300 if source == "t" else 60)
    assert len(batches) <= 2


@pytest.mark.invariant("I41")
@pytest.mark.parametrize("source", [HALF_VIEW_NAME, OP_VIEW_NAME])
def test_chunks_end_at_their_bounds_and_hold_every_row_once(link, source, monkeypatch):
    whole = read(link, source)
    positions = whole["position"].to_pylist()
    for rows, size in ((7, 1 << 20), (1000, 700)):
        for module in (views, chunks):
            monkeypatch.setattr(module, "ROWS", rows)
            monkeypatch.setattr(module, "BYTES", size)
        batches = list(link.read({"source": source, "start": positions[3], "end": positions[50]}))
        assert 1 < max(batch.num_rows for batch in batches) <= rows
        assert pa.Table.from_batches(batches).equals(whole.slice(3, 47))


@pytest.mark.invariant("I41")
def test_tags_and_keys(link):
    whole = read(link, "t")
    tags, keys = whole["tag"].to_pylist(), whole["key"].to_pylist()
    for request, wanted in (
        ({"tags": ["a"]}, lambda tag, key: tag == "a"),
        ({"tags": ["b", "a", "unseen"]}, lambda tag, key: tag in ("a", "b")),
        ({"tags": ["unseen"]}, lambda tag, key: False),
        ({"key": "k3"}, lambda tag, key: key == "k3"),
        ({"key": "k3", "tags": ["a"]}, lambda tag, key: tag == "a" and key == "k3"),
    ):
        mask = [wanted(tag, key) for tag, key in zip(tags, keys, strict=True)]
        assert read(link, "t", **request).equals(whole.filter(pa.array(mask)).combine_chunks())
        part = read(link, "t", **request, start=100, end=200)
        assert part["offset"].to_pylist() == [o for o, chosen in enumerate(mask) if chosen and 100 <= o < 200]
    assert read(link, "t", tags=["a"], max_rows=5)["offset"].to_pylist() == [0, 3, 6, 9, 12]
    assert read(link, HALF_VIEW_NAME, tags=["a"])["body"].to_pylist() == [b"%d" % n for n in range(1, 60, 2)]
    assert read(link, HALF_VIEW_NAME, key="h9")["body"].to_pylist() == [b"9"]


def test_times(link):
    for source, column in (("t", "stored_us"), (HALF_VIEW_NAME, "stored_us"), (OP_VIEW_NAME, "decided_us")):
        whole = read(link, source)
        times = whole[column].to_pylist()
        low, high = times[10], times[40]
        found = read(link, source, stored_from_us=low, stored_until_us=high)
        assert found[column].to_pylist() == [time for time in times if low <= time < high]
        assert 0 < found.num_rows < whole.num_rows


@pytest.mark.parametrize("source", ["t", "h", HALF_VIEW_NAME, OP_VIEW_NAME])
def test_chosen_columns_are_those_of_the_whole_in_the_order_asked_for(link, source):
    whole = read(link, source)
    for name in whole.schema.names:
        assert read(link, source, columns=[name]).equals(whole.select([name]).combine_chunks()), name
    names = whole.schema.names[::-2]
    assert read(link, source, columns=names).equals(whole.select(names).combine_chunks())
    assert read(link, source, columns=["position"], max_rows=3).num_rows == 3


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("t", {"tags": []}),
        ("t", {"tags": "a"}),
        ("t", {"key": 3}),
        ("t", {"stored_from_us": "x"}),
        ("%op", {"key": "k"}),
    ],
)
def test_bad_filters_are_refused(link, source, asked):
    with pytest.raises(mq.Rejected) as caught:
        read(link, source, **asked)
    assert caught.value.code is Code.BAD_REQUEST
