"""Small parts: the timer, columns of outcomes, splitting, names."""

from __future__ import annotations

import mmap
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.admin import Admin
from escrowmq.client.lanes import timer as timers
from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.router import Router, broker_of
from escrowmq.client.producing.ending import outcome_column
from escrowmq.client.producing.outgoing import OutgoingCodec, as_batch, split
from escrowmq.errors import Misuse
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker
from escrowmq.testing.link import TwinLink

PAPER = Path(__file__).parents[2] / "docs" / "python.md"


def test_a_timer_calls_in_the_order_of_time_and_survives_a_failure(caplog, monkeypatch):
    timer, rung, done = Timer(), [], threading.Event()

    def fail():
        raise ValueError("no")

    all_there, began = threading.Event(), time.monotonic()
    with monkeypatch.context() as standing:  # all are due by one moment, however slow the machine
        standing.setattr(timers, "time", SimpleNamespace(monotonic=lambda: began))
        timer.after(0.0, lambda: all_there.wait(60))  # else the first is called before the second is there
        timer.after(0.06, done.set)
        timer.after(0.03, lambda: rung.append(2))
        timer.after(0.0, fail)
        timer.after(0.01, lambda: rung.append(1))
    all_there.set()
    assert done.wait(60)
    assert rung == [1, 2]
    timer.after(60, lambda: rung.append(3))
    timer.close()
    timer.after(0, lambda: rung.append(4))
    assert rung == [1, 2]
    assert "a delayed call failed" in caplog.text


@pytest.mark.parametrize("form", [list, np.array, lambda o: pa.array([int(x) for x in o]), lambda o: iter(list(o))])
def test_outcomes_in_every_form(form):
    outcomes = [mq.COMMIT, mq.ROLLBACK, mq.UNKNOWN]
    assert outcome_column(form(outcomes), 3).tolist() == [1, 2, 0]
    assert outcome_column(mq.ROLLBACK, 2).tolist() == [2, 2]


@pytest.mark.parametrize("wrong", [None, "commit", [mq.COMMIT], [3, 1], [-1, 1], [0.5, 1], ["a", "b"]])
def test_what_are_no_outcomes(wrong):
    with pytest.raises(mq.Misuse):
        outcome_column(wrong, 2)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 20), st.integers(400, 4000))
def test_splitting_keeps_all_rows_in_order_within_the_limits(sizes, rows, most):
    limits = Limits(max_batch_rows=rows, max_batch_bytes=most)
    batch = as_batch([mq.Message("t", b"x" * size) for size in sizes], Checker(Limits()), OutgoingCodec())
    pieces = split(batch, limits)
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([batch]))
    assert all(piece.num_rows <= rows for piece in pieces)
    assert all(piece.num_rows == 1 or sum(map(len, piece.column("body").to_pylist())) <= most for piece in pieces)


def test_a_table_that_is_too_large_for_one_batch_is_refused_whole():
    """Combined, such a column stays in pieces; what is behind the first of them must not be left out."""
    zeros = pa.py_buffer(mmap.mmap(-1, 1 << 30))
    body = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(np.array([0, 1 << 30], np.int32)), zeros])
    table = pa.table({"topic": ["a", "b"], "body": pa.chunked_array([body, body])})
    with pytest.raises(mq.Rejected, match="BATCH_TOO_LARGE"):
        as_batch(table, Checker(Limits()), OutgoingCodec())


texts = st.text(st.characters(codec="utf-8"), max_size=5)
messages = st.builds(
    mq.Message,
    topic=st.sampled_from(["a", "b"]),
    body=st.binary(max_size=20),
    key=st.none() | texts,
    tag=st.none() | texts,
    properties=st.none() | st.dictionaries(texts, texts, max_size=2),
    delay=st.sampled_from([0.0, 1.5]),
    check_immunity=st.sampled_from([None, 2.0]),
    queue=st.none() | st.integers(0, 5),
    message_id=st.none() | st.binary(min_size=16, max_size=16),
)


@given(st.lists(messages, min_size=1, max_size=30))
def test_columns_hold_what_the_messages_said(given_messages):
    batch = as_batch(given_messages, Checker(Limits()), OutgoingCodec())
    assert batch.schema == schemas.OUTGOING
    batch.validate(full=True)
    for row, message in zip(batch.to_pylist(), given_messages, strict=True):
        assert (row["topic"], row["body"], row["key"], row["tag"]) == (
            message.topic,
            message.body,
            message.key,
            message.tag,
        )
        assert dict(row["properties"] or ()) == dict(message.properties or {})
        assert row["delay_us"] == message.delay * 1_000_000
        assert row["immunity_us"] == (message.check_immunity or 0) * 1_000_000
        assert row["queue"] == (-1 if message.queue is None else message.queue)
        assert len(row["message_id"]) == 16
        assert message.message_id is None or row["message_id"] == message.message_id
    again = as_batch(pa.Table.from_batches([batch]), Checker(Limits()), OutgoingCodec())
    assert again.equals(batch)


def test_keys_go_where_they_always_went():
    """Numbers of the first release: a changed hash would split a key's messages between two brokers."""
    assert [broker_of(key, 3) for key in ("", "a", "b", "order-17", "schlüssel")] == EXPECTED
    router = Router([TwinLink(), TwinLink(), TwinLink()])
    keys = pa.array(["", "a", None, "b", "order-17", None, "schlüssel"])
    spread = router.spread(keys, lambda: 2).tolist()
    assert [spread[i] for i in (0, 1, 3, 4, 6)] == EXPECTED
    assert [spread[i] for i in (2, 5)] == [2, 2]


EXPECTED = [1, 2, 1, 0, 2]


def test_public_names_are_those_of_the_paper():
    documented = re.findall(r"^\| `(\w+)`", PAPER.read_text().split("## Quality")[0], re.MULTILINE)
    assert documented == mq.__all__


def test_importing_is_quick_because_heavy_parts_load_late():
    import subprocess
    import sys

    code = "import sys, escrowmq; print([m for m in ('pyarrow', 'numpy', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError):
        mq.nothing_of_that_name
    assert set(mq.__all__) <= set(dir(mq))


def test_a_dead_letter_of_several_brokers_names_its_broker():
    """Each broker has another message at the same topic, queue and offset: none is settled by mistake."""
    admin = Admin(SimpleNamespace(links=[SimpleNamespace(address="a"), SimpleNamespace(address="b")]))
    item = {"topic": "orders", "queue": 0, "offset": 17}
    for act in (admin.retry_dead_letters, admin.discard_dead_letters):
        with pytest.raises(Misuse, match="names none"):
            act("cart", [item | {"broker": "a"}, item])


def test_two_brokers_of_one_shard_are_refused():
    """A copied data folder served beside the first one: a decision must not reach the other one's transaction."""
    router = Router([TwinLink(shard=7, address="a"), TwinLink(shard=7, address="b"), TwinLink(shard=8, address="c")])
    router.learn_shard(0, 7)
    router.learn_shard(0, 7)
    with pytest.raises(Misuse, match="a and b are the same broker"):
        router.learn_shard(1, 7)
    with pytest.raises(Misuse, match="a and b are the same broker"):
        router.shard_of(1, 1.0)
    assert (router.shard_of(2, 1.0), router.known_shard(7)) == (8, 0)
